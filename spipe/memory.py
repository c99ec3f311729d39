"""Memory of a plan: itemised bytes per rank and host, fixed by the program before anything runs.

One static account for simulator and runtime. Slots are as large as their largest user; a received activation,
gradient or stage input has its place from the moment its receive may be posted.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from spipe.errors import SpipeError
from spipe.layer_list import Model
from spipe.model import ModelSpec
from spipe.ops import Kind
from spipe.program import Program

if TYPE_CHECKING:
    from spipe.plan import Plan

ALIGNMENT = 64
"""Every parameter starts at a multiple of this many bytes, in host memory and in the slots."""

SNAPSHOT_BYTES, UNDO_LOG_BYTES = 12.0, 3.5
"""Host memory for undoing a step, per parameter: a copy of master and moments, needed if a beta is 0, or a log."""
PROCESSES = "PyTorch processes"
"""Item of a host's memory: what ranks take by themselves, where the hardware says it."""
EVALUATION_BATCHES = 8
"""Microbatches of an evaluation, shared out over the ranks, each of which has all of its own at a time."""
WORKSPACE_BYTES = 32 << 20
"""What a matrix library takes per thread that calls it; the compute lane is one, autograd's another."""

Items = dict[str, int]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by item, for each rank's accelerator and each host, with what is there.

    On device ``cpu`` the ranks' items lie in host memory, too, and count there.
    """

    ranks: tuple[Items, ...]
    hosts: tuple[Items, ...]
    rank_capacity_bytes: float
    host_capacity_bytes: float

    def limited(self, rank_bytes: float, host_bytes: float) -> "MemoryReport":
        """With no more room than this on a rank and on a host."""
        rank, host = min(self.rank_capacity_bytes, rank_bytes), min(self.host_capacity_bytes, host_bytes)
        return replace(self, rank_capacity_bytes=rank, host_capacity_bytes=host)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        return tuple(sum(items.values()) for items in self.ranks)

    @property
    def host_bytes(self) -> tuple[int, ...]:
        return tuple(sum(items.values()) for items in self.hosts)

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit, with the largest items."""
        places: list[tuple[str, Items, float]] = [
            (f"rank {r}", items, self.rank_capacity_bytes) for r, items in enumerate(self.ranks)
        ]
        places += [(f"host {h}", items, self.host_capacity_bytes) for h, items in enumerate(self.hosts)]
        return tuple(
            f"{place} needs {size_words(total)} of {size_words(capacity)} usable, mostly {_largest(items)}"
            for place, items, capacity in places
            if (total := sum(items.values())) > capacity
        )

    @property
    def fits(self) -> bool:
        return not self.problems

    def require(self) -> None:
        """Raises SpipeError with the numbers if something does not fit."""
        if self.problems:
            raise SpipeError(
                f"not enough memory: {'; '.join(self.problems)}. Use a smaller microbatch, more and finer stages, "
                "more ranks, or hardware with more memory"
            )


def size_words(num_bytes: float) -> str:
    """In GiB, or, below a tenth of one, in MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def _largest(items: Items) -> str:
    top = sorted(items.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {size_words(num_bytes)}" for name, num_bytes in top)


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def layer_bytes(model: Model, layer: int, element_bytes: int, *, trained: bool = False) -> int:
    """Bytes of one layer's parameters, each aligned; ``trained``: of those that have gradients."""
    kind = model.layer_kind(layer)
    left_out = model.frozen_parameters(kind) if trained else frozenset()
    shapes = (shape for name, shape in model.parameter_shapes(kind).items() if name not in left_out)
    return sum(aligned(element_bytes * math.prod(shape)) for shape in shapes)


def memory(plan: "Plan", *, evaluates: bool = False) -> MemoryReport:
    """The plan's memory on its own hardware; ``evaluates``: with what evaluations between steps need."""
    return MemoryAccount(plan, evaluates).report()


class MemoryAccount:
    """The account of one plan, item by item."""

    def __init__(self, plan: "Plan", evaluates: bool = False) -> None:
        from spipe.plan import ELEMENT_BYTES

        self.evaluation_batches = -(-EVALUATION_BATCHES // plan.layout.num_ranks) if evaluates else 0
        self.plan, self.model = plan, plan.model
        self.program: Program = plan.program()
        self.ops: list[list[int]] = [[] for _ in range(plan.layout.num_ranks)]
        for i, rank in enumerate(self.program.rank):
            self.ops[rank].append(i)
        self.element_bytes = ELEMENT_BYTES[plan.precision]
        self.gradient_bytes = ELEMENT_BYTES[plan.gradient_dtype]
        kinds = [self.model.layer_kind(i) for i in range(self.model.num_total_layers)]
        self.weights = [layer_bytes(self.model, i, self.element_bytes) for i in range(len(kinds))]
        self.gradients = [layer_bytes(self.model, i, self.gradient_bytes, trained=True) for i in range(len(kinds))]
        self.trained = [layer_bytes(self.model, i, self.element_bytes, trained=True) for i in range(len(kinds))]
        b, s = plan.microbatch_size, plan.sequence
        some_beta_is_zero = 0 in (plan.optimizer.beta1, plan.optimizer.beta2)
        self.undo_bytes = SNAPSHOT_BYTES if some_beta_is_zero else UNDO_LOG_BYTES
        self.token_bytes = sum(aligned(t.num_bytes(b, self.element_bytes)) for t in self.model.input_tensors(b, s))
        self.boundary = aligned(self.model.boundary_bytes(b, s, self.element_bytes))
        self.saved = [self.model.layer_activation_bytes(kind, b, s, self.element_bytes) for kind in kinds]
        self.in_backward = [self.model.layer_backward_bytes(kind, b, s, self.element_bytes) for kind in kinds]
        self.temporary = [self.model.layer_forward_activation_bytes(kind, b, s, self.element_bytes) for kind in kinds]

    def report(self) -> MemoryReport:
        plan, hardware = self.plan, self.plan.hardware
        ranks = [self.rank_items(rank) for rank in range(plan.layout.num_ranks)]
        hosts: list[defaultdict[str, int]] = [
            defaultdict(int) for _ in range(hardware.host_of(plan.layout.num_ranks - 1) + 1)
        ]
        for rank, items in enumerate(ranks):
            host = hosts[hardware.host_of(rank)]
            for name, num_bytes in self.host_items(rank).items():
                host[name] += num_bytes
            if hardware.device == "cpu":
                host["ranks"] += sum(items.values())
        return MemoryReport(
            tuple(ranks),
            tuple(dict(items) for items in hosts),
            hardware.accelerator.usable_memory_bytes,
            hardware.cpu.usable_memory_bytes,
        )

    def rank_items(self, rank: int) -> Items:
        """What the accelerator of a rank holds."""
        program, layout, boundary = self.program, self.program.layout, self.boundary
        weight_slots: dict[int, int] = defaultdict(int)
        gradient_slots: dict[int, int] = defaultdict(int)
        rings: dict[tuple[int, int], int] = {}
        sends: dict[tuple[int, int], int] = defaultdict(int)
        for i in self.ops[rank]:
            kind, layers = program.kind[i], program.layers(program.stage[i])
            if kind == Kind.FREE:
                weight_slots[program.slot[i]] = max(weight_slots[program.slot[i]], self.total(self.weights, layers))
            elif kind == Kind.OFFLOAD_GRAD:
                gradient_slots[program.slot[i]] = max(
                    gradient_slots[program.slot[i]], self.total(self.gradients, layers)
                )
            elif kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
                ring = (kind, program.lane[i])
                rings[ring] = max(rings.get(ring, 0), program.slot[i] + 1)
            elif kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT, Kind.SEND_STAGE_INPUT):
                ring = (kind, program.lane[i])
                sends[ring] = min(sends[ring] + 1, program.options.send_slots)
        microbatches = program.num_microbatches
        kept = len(layout.forward) if program.options.recompute == "never" else 0
        inputs = [k for k, s in enumerate(layout.backward) if s.rank == rank and s.first > 0 and k >= kept]
        if program.options.stage_input_route == "host" and program.options.recompute != "never":
            num_inputs = self.load_slots(rank)
        elif program.options.recompute != "never":
            num_inputs = sum(layout.stage_input(k).rank != rank for k in inputs) * microbatches
        else:
            num_inputs = len(inputs) * microbatches
        readers = [layout.forward[0]] if layout.forward else []
        readers += [layout.backward[0], layout.backward[-1]]
        held = [i for s in layout.backward if s.rank == rank for i in s.layers if program.is_held(i)]
        tokens = sum(stage.rank == rank for stage in readers) * min(program.options.token_slots, microbatches)
        return {
            "weights": sum(weight_slots.values()),
            "gradients": sum(gradient_slots.values()),
            "weights, gradients and optimizer state of held layers": self.total(self.weights, held)
            + self.total(self.gradients, held)
            + 12 * self.total(self.weights, held) // self.element_bytes,
            "stage inputs": num_inputs * boundary,
            "received messages": sum(rings.values()) * boundary,
            "unsent messages": sum(sends.values()) * boundary,
            **self.activation_items(rank),
            "tokens": tokens * self.token_bytes,
        }

    def activation_items(self, rank: int) -> Items:
        """What compute ops allocate and drop, at its peak."""
        layout, on_gpu = self.program.layout, self.plan.hardware.device == "cuda"
        workspaces = {"workspaces of libraries": 2 * WORKSPACE_BYTES} if on_gpu else {}
        if self.program.options.recompute != "never":
            working = max(self.working_set(rank), self.evaluation())
            data = {"evaluation data": self.evaluation_batches * self.token_bytes} if self.evaluation_batches else {}
            return {"activations and temporaries": working, **self.recorded_items(rank), **data, **workspaces}
        pairs = (pairwise(stages) for stages in (layout.forward, layout.backward))
        local = sum(any(a.rank == b.rank == rank for a, b in stages) for stages in pairs)
        return {
            "local activations": (self.program.num_microbatches + 1) * self.boundary * local,
            "saved by forwards": self.saved_by_forwards(rank),
            "activations and temporaries": self.arena(rank),
            **workspaces,
        }

    def recorded_items(self, rank: int) -> Items:
        """With CUDA graphs: the pool for what lies inside recorded ops, and what goes in and comes out."""
        if not self.plan.cuda_graphs:
            return {}
        layout, outputs = self.program.layout, 1
        own = [0]
        for stage in (*layout.forward, *layout.backward):
            if stage.rank == rank and self.plan.records(stage.layers):
                own.append(self.total(self.saved, stage.layers) + max(self.in_backward[x] for x in stage.layers))
        for number in range(len(layout.forward)):
            kept = sum(
                source.origin != "tokens" and source.forward == number
                for source in map(layout.stage_input, range(len(layout.backward)))
            )
            outputs = max(outputs, 1 + kept)
        return {"recorded ops": max(own) + (2 + outputs) * self.boundary}

    def evaluation(self) -> int:
        """What an evaluation has in use at a time, between steps: one layer's weights, all boundaries, temporaries."""
        if not self.evaluation_batches:
            return 0
        layers = max(w + t for w, t in zip(self.weights, self.temporary, strict=True))
        return layers + self.evaluation_batches * self.boundary

    def working_set(self, rank: int) -> int:
        """The most that a rank's compute ops have in use at a time: what lives from one to another, and their own."""
        return max((during for _, during, _ in self.working_sets(rank)), default=0)

    def working_sets(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """For each FORWARD and BACKWARD of a rank in order: the op, bytes in use during it, and from its end on.

        Boundaries live from the FORWARD that makes them to the FORWARD of the next stage and, as stage inputs, to the
        end of the BACKWARD that starts from them; gradients from one BACKWARD to the next. All of that only where maker
        and reader are this rank; what comes from elsewhere has a place of its own.
        """
        program, layout, first = self.program, self.program.layout, len(self.program.layout.forward)
        on_host = program.options.stage_input_route == "host"
        made: dict[int, list[set[tuple[str, int]]]] = {
            k: [] for k in range(first)
        }  # forward stage -> its outputs' readers
        for k, stage in enumerate(layout.forward):
            readers: dict[int, set[tuple[str, int]]] = {}
            if k + 1 < first and layout.forward[k + 1].rank == rank:
                readers[stage.stop] = {("F", k + 1)}
            for j, other in enumerate(layout.backward):
                source = layout.stage_input(j)
                if source.origin != "tokens" and source.forward == k and other.rank == rank and not on_host:
                    readers.setdefault(other.first, set()).add(("B", j))
            made[k] = list(readers.values())
        alive: dict[tuple[int, int, int], set[tuple[str, int]]] = {}  # (stage number, output, microbatch) -> readers
        readers_of: dict[tuple[str, int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for i in self.ops[rank]:
            kind = program.kind[i]
            if kind not in (Kind.FORWARD, Kind.BACKWARD):
                continue
            stage_number, m = program.stage[i], program.index[i]
            layers, k = program.layers(stage_number), stage_number - first
            if kind == Kind.FORWARD:
                own = max(self.temporary[x] for x in layers) + self.boundary * ((len(layers) > 1) + on_host)
                me, outputs = ("F", stage_number), made[stage_number]
            else:
                own = self.total(self.saved, layers) + max(self.in_backward[x] for x in layers)
                below = k > 0 and layout.backward[k - 1].rank == rank
                me, outputs = ("B", k), [{("B", k - 1)}] if below else []
            during = len(alive) * self.boundary + own
            for number, readers_left in enumerate(outputs):
                alive[stage_number, number, m] = set(readers_left)
                for reader in readers_left:
                    readers_of[*reader, m].append((stage_number, number, m))
            for key in readers_of.pop((*me, m), []):
                alive[key].discard(me)
                if not alive[key]:
                    del alive[key]
            yield i, during, len(alive) * self.boundary

    def saved_by_forwards(self, rank: int) -> int:
        """Without recompute: the most that forwards have saved and no backward has used up, at any time."""
        program, num_forward = self.program, len(self.program.layout.forward)
        if program.options.recompute != "never":
            return 0
        stages = [stage for stage in program.layout.forward if stage.rank == rank]
        saved = [self.total(self.saved, stage.layers) for stage in stages]
        if program.options.stage_input_route == "host":
            staying, leaving = program.options.stage_input_slots, program.options.send_slots
            places = min(staying + leaving + self.load_slots(rank), len(stages) * program.num_microbatches)
            return max(saved, default=0) * places
        last = Kind.WEIGHT_GRADIENT if Kind.WEIGHT_GRADIENT in program.kind else Kind.BACKWARD
        held = most = 0
        for i in self.ops[rank]:
            if program.kind[i] == Kind.FORWARD:
                held += self.total(self.saved, program.layers(program.stage[i]))
                most = max(most, held)
            elif program.kind[i] == last and program.stage[i] - num_forward < num_forward:
                held -= self.total(self.saved, program.layers(program.stage[i]))
        return most

    def load_slots(self, rank: int) -> int:
        """Places for what is loaded back from host memory."""
        program = self.program
        loads = (i for i in self.ops[rank] if program.kind[i] == Kind.LOAD_STAGE_INPUT)
        return max((program.slot[i] + 1 for i in loads), default=0)

    def arena(self, rank: int) -> int:
        """The largest need of one compute op: temporaries of a forward, or a whole stage's saved activations."""
        layout, boundary = self.program.layout, self.boundary
        kept = len(layout.forward) if self.program.options.recompute == "never" else 0
        forward = [max(self.temporary[i] for i in s.layers) + 2 * boundary for s in layout.forward if s.rank == rank]
        backward = [
            (self.total(self.saved, s.layers) if k >= kept else 0)
            + max(self.temporary[i] for i in s.layers)
            + 2 * boundary
            for k, s in enumerate(layout.backward)
            if s.rank == rank
        ]
        return max([*forward, *backward], default=0)

    def host_items(self, rank: int) -> Items:
        """What a rank holds in its host's memory: all that belongs to the layers whose backward it runs."""
        layout = self.program.layout
        layers = [i for s in layout.backward if s.rank == rank for i in s.layers]
        owned = self.total(self.weights, layers)
        state = 12 * self.total(self.trained, [i for i in layers if not self.program.is_held(i)]) // self.element_bytes
        if (
            isinstance(self.model, ModelSpec)
            and self.model.tied_embeddings
            and self.model.num_total_layers - 1 in layers
        ):
            tied = self.model.vocab_size * self.model.hidden_size
            owned -= aligned(tied * self.element_bytes)
            state -= 12 * tied
        options, microbatches = self.program.options, self.program.num_microbatches
        if options.recompute == "never":
            stages = [self.total(self.saved, s.layers) for s in layout.forward if s.rank == rank]
        else:
            stages = [self.boundary for s in layout.backward if s.rank == rank and s.first > 0]
        return {
            "weights": owned * (2 if options.optimizer == "stale" else 1),
            "gradients": self.total(self.gradients, layers),
            "master weights and moments": state,
            "undo data": 0 if options.optimizer == "sync" else int(state / 12 * self.undo_bytes),
            "stage inputs": sum(stages) * microbatches if options.stage_input_route == "host" else 0,
            PROCESSES: round(self.plan.hardware.cpu.process_bytes or 0),
        }

    @staticmethod
    def total(of_layer: list[int], layers: Iterable[int]) -> int:
        return sum(of_layer[i] for i in layers)
