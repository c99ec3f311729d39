"""Search space: which plans a search looks at, and what none of them can beat."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.layer_list import Model
from spipe.layout import Layout, Stage, decoupled_layout
from spipe.options import Options
from spipe.plan import ELEMENT_BYTES
from spipe.schedules import SCHEDULES, get_schedule
from spipe.sim.bounds import least_step_s
from spipe.sim.candidates import Candidate, any_number_of_stages, ranks_mapped
from spipe.sim.judge import Job, Verdict

STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
BACKWARD_PER_FORWARD = (1, 2, 3, 4)
HELD_LAYERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
FIRST_HELD = (1, 4, 16)  # tried before any is known to help; from the best of them the search climbs
VARIATIONS: tuple[dict[str, Any], ...] = (
    {"weight_slots": 3},
    {"weight_slots": 4},
    {"recompute": "late"},
    {"bucket_layers": 0},
    {"bucket_layers": 2},
    {"stage_input_route": "host"},
    {"optimizer_workers": 2},
    {"optimizer": "sync"},
)


@dataclass(frozen=True)
class Space:
    """The choices to enumerate, each sorted; see ``spipe.sim.search.search``."""

    job: Job
    global_batch: int
    schedules: Sequence[str]
    num_ranks: Sequence[int]
    forward_stages: Sequence[int] | None
    backward_stages: Sequence[int] | None
    microbatch_sizes: Sequence[int]
    compute_threads: Sequence[int] = (1,)
    full_forward: bool = False
    cross_mapping: bool = False
    """Whether all have the ranks of several hosts in the order of ``spipe.layout.cross_mapping``."""
    wide_tops: bool = True
    """Whether the top stage of one rank may have more layers than the others."""

    # ------------------------------------------------------------------ candidates

    def candidates(self, refused: dict[str, int]) -> list[Candidate]:
        """All candidates, best bound first. What cannot be laid out is counted by reason in ``refused``."""
        found: dict[tuple[object, ...], Candidate] = {}
        for num_ranks in self.num_ranks:
            for size in self.microbatch_sizes:
                for threads in self.compute_threads:
                    for schedule in self.schedules:
                        made: list[Candidate] = []
                        for stages in self._stages(schedule, num_ranks):
                            try:
                                made.append(self._candidate(schedule, num_ranks, size, *stages, threads))
                            except SpipeError as error:
                                refused[str(error)] = refused.get(str(error), 0) + 1
                        for candidate in [*made, *self._wide_tops(made)]:
                            same = (get_schedule(schedule).compute_order, candidate.layout, size, threads)
                            found.setdefault(same, candidate)
        return sorted(found.values(), key=lambda candidate: candidate.key)

    def presets(self, like: Candidate) -> Iterator[Candidate]:
        """What the built-in systems would run with the ranks and microbatches of a candidate."""
        for name in self.schedules:
            system = get_schedule(name)
            forward, backward = (1, 1) if name == "gpipe" else (2, 6) if system.decoupled else (2, 2)
            if forward not in (self.forward_stages or [forward]) or backward not in (
                self.backward_stages or [backward]
            ):
                continue
            published: dict[str, Any] = dict(system.published)
            for options in ({}, published):
                if Options(**options).simulated_only and not system.simulated_only:
                    continue
                space = replace(self, full_forward=bool(options) or self.full_forward)
                try:
                    preset = space._candidate(
                        name, like.num_ranks, like.microbatch_size, forward, backward, like.compute_threads
                    )
                except SpipeError:
                    continue  # these stages cannot be laid out
                yield replace(preset.with_options(**options), cuts="preset")

    def variations(self, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
        """The same candidate with one option changed, memory put to another use, or its ranks in other places."""
        first_held = () if candidate.options.get("device_layers") else self.held_next(candidate)
        for variation in (*VARIATIONS, *({"device_layers": held} for held in first_held)):
            (name,) = variation
            if name in self.job.options or candidate.options.get(name) == variation[name]:
                continue
            if name == "optimizer_workers" and not self.job.contention:
                continue  # what two STEPs at a time share is all that keeps them from being twice as fast
            yield f"{name} = {variation[name]}", candidate.with_options(**variation)
        yield from self.trades(candidate)
        if self.cross_mapping:
            return
        for number, mapped in enumerate(ranks_mapped(candidate, self.job.hardware, self.job.costs(candidate))):
            yield f"ranks in order {number}", mapped

    def trades(self, candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
        """Accelerators' memory put to another use, by what for: fewer or more layers are held, if any are, and, on one
        rank, fewer or more are in the top stage: one, or what a held layer makes room for."""
        held = candidate.options.get("device_layers", 0)
        fixed = not held or "device_layers" in self.job.options
        for number in (held, *([] if fixed else self.held_next(candidate))):
            widths = (-1, 1) if number == held else range(0, 5) if number < held else range(0, -5, -1)
            for more in widths:
                shape = self._with_top(candidate, more) if more else candidate
                if shape is not None:
                    width = len(shape.layout.backward[-1].layers)
                    changed = shape.with_options(device_layers=number) if number else shape
                    yield f"{number} layers held, {width} in the top stage", changed

    def held_next(self, candidate: Candidate) -> list[int]:
        """Numbers of layers to hold that are tried next: a few if it holds none, else one fewer and one more."""
        most, held = self.most_held(candidate), candidate.options.get("device_layers", 0)
        if not held:
            return [number for number in FIRST_HELD if number <= most]
        fewer, more = ([n for n in HELD_LAYERS if n < held], [n for n in HELD_LAYERS if held < n <= most])
        return [*fewer[-1:], *more[:1]]

    def most_held(self, candidate: Candidate | None = None) -> int:
        """How many of the lowest layers accelerators may keep with all their state; more would not fit."""
        options = {**(candidate.options if candidate else {}), **self.job.options}
        unheld = options.get("bucket_layers", 1) != 1 or options.get("optimizer") == "stale"
        if self.job.hardware.device != "cuda" or unheld:
            return 0
        model, num_ranks = self.job.model, candidate.num_ranks if candidate else max(self.num_ranks)
        room = self._rank_room() * num_ranks
        most = 0
        while most < model.num_total_layers and room > 0:
            room -= self._held_bytes(most)
            most += room > 0
        return most

    def holding(self, verdict: Verdict) -> Candidate | None:
        """The same candidate, with as many layers held as there is room for beside what its ranks need; if any more."""
        candidate = verdict.candidate
        held = candidate.options.get("device_layers", 0)
        owner = {layer: stage.rank for stage in candidate.layout.backward for layer in stage.layers}
        room = dict.fromkeys(owner.values(), self._rank_room() - verdict.rank_bytes)
        most, number = 0 if "device_layers" in self.job.options else self.most_held(candidate), held
        while number < most and (left := room[owner[number]] - self._held_bytes(number)) >= 0:
            room[owner[number]] = left
            number += 1
        if number == held:
            return None
        return candidate.with_options(device_layers=number).bounded(self.job.costs(candidate), self.job.options)

    def bound_s(self, candidate: Candidate) -> float:
        """No step of a candidate can be faster, however many layers are held."""
        most = 0 if "device_layers" in self.job.options else self.most_held(candidate)
        if not most:
            return candidate.bound_s
        costs = self.job.costs(candidate)
        return candidate.with_options(device_layers=most).bounded(costs, self.job.options).bound_s

    def _rank_room(self) -> float:
        return min(self.job.hardware.accelerator.usable_memory_bytes, self.job.max_rank_bytes)

    def _held_bytes(self, layer: int) -> int:
        """Weights, gradients, master weights and moments of a layer."""
        model, fields = self.job.model, self.job.plan_fields
        dtypes = fields["precision"], fields.get("gradient_precision") or fields["precision"]
        per_parameter = 12 + sum(ELEMENT_BYTES[dtype] for dtype in dtypes)
        return per_parameter * model.layer_num_parameters(model.layer_kind(layer))

    def _candidate(
        self, schedule: str, num_ranks: int, size: int, forward: int, backward: int, threads: int
    ) -> Candidate:
        costs = self.job.cost_model(size, num_ranks, threads)
        layout = _layout(schedule, num_ranks, _relative(costs.layer_costs()), forward, backward, self.full_forward)
        if self.cross_mapping:
            layout = layout.cross_mapped(self.job.hardware.ranks_per_host)
        count = self.global_batch // size
        system = get_schedule(schedule)
        options = dict(system.essential)
        unbounded = Candidate(
            schedule, num_ranks, forward, backward, size, count, layout, 0.0, options, compute_threads=threads
        )
        return unbounded.bounded(costs, self.job.options)

    def _with_top(self, candidate: Candidate, more: int) -> Candidate | None:
        """With so many more layers in the top stage of one rank (all of the stages that they are in), or fewer (which
        get stages of their own); None where that cannot be."""
        forward, backward = candidate.layout.forward, candidate.layout.backward
        first = backward[-1].first - more
        if not self._may_have_wide_top(candidate) or not 0 <= first < backward[-1].stop:
            return None
        first = max((stage.first for stage in backward if stage.first <= first), default=0) if more > 0 else first
        alone = tuple(Stage(layer, layer + 1, 0) for layer in range(backward[-1].first, first))
        below = tuple(replace(stage, stop=min(stage.stop, first)) for stage in forward if stage.first < first)
        kept = tuple(stage for stage in backward[:-1] if stage.stop <= first)
        return self._recut(candidate, (*below, *alone), (*kept, *alone, Stage(first, backward[-1].stop, 0)))

    def _may_have_wide_top(self, candidate: Candidate) -> bool:
        possible = self.wide_tops and not self.full_forward and candidate.num_ranks == 1
        return possible and candidate.schedule in ("spipe", "mobius")

    def _recut(self, like: Candidate, forward: tuple[Stage, ...], backward: tuple[Stage, ...]) -> Candidate | None:
        """Other stages for one rank; None if the numbers of stages are fixed, and not to these."""
        numbers = len(forward), len(backward)
        fixed = self.forward_stages, self.backward_stages
        if any(wanted and number not in wanted for number, wanted in zip(numbers, fixed, strict=True)):
            return None
        layout = replace(like.layout, forward=forward, backward=backward)
        other = replace(like, forward_stages=numbers[0], backward_stages=numbers[1], layout=layout)
        return other.bounded(self.job.costs(other), self.job.options)

    def _wide_tops(self, made: Sequence[Candidate]) -> Iterator[Candidate]:
        """For one rank: a stage per layer, but several in the top one, of whose layers no forward is needed.

        Balanced stages keep ranks from waiting for each other; one rank waits for none, and saves a forward with every
        layer that its memory has room for in the top stage.
        """
        layers = self.job.model.num_total_layers
        for width in (width for width in STAGES_PER_RANK if 1 < width < layers):
            stages = tuple(Stage(layer, layer + 1, 0) for layer in range(layers - width))
            for like in filter(self._may_have_wide_top, made[:1]):
                if wide := self._recut(like, stages, (*stages, Stage(layers - width, layers, 0))):
                    yield replace(wide, cuts="wide")

    def _stages(self, schedule: str, num_ranks: int) -> Iterator[tuple[int, int]]:
        """(F, B): stages per rank of forward and backward."""
        layers, blocks = self.job.model.num_total_layers, self.job.model.num_layers
        limit = max(1, layers // num_ranks)
        if any_number_of_stages(schedule):
            limit = -(-layers // num_ranks)  # the last round of stages need not reach every rank
        chosen_forward, chosen_backward = self.forward_stages, self.backward_stages
        usual = sorted({n for n in (*STAGES_PER_RANK, limit, blocks // num_ranks) if 1 <= n <= limit})
        for forward in chosen_forward or usual:
            if not get_schedule(schedule).decoupled:
                if chosen_backward is None or forward in chosen_backward:
                    yield forward, forward
                continue
            multiples = {forward * factor for factor in BACKWARD_PER_FORWARD}
            for backward in chosen_backward or sorted({min(n, limit) for n in multiples if n < 2 * limit} | {limit}):
                if chosen_backward or backward >= forward:
                    yield forward, backward

    # ------------------------------------------------------------------ bound

    def least_step_s(self) -> tuple[float, str]:
        """What no plan of the space can beat, and what limits it."""
        options = self.job.options
        held = options.get("device_layers", self.most_held())
        together = options.get("optimizer_workers", 2 if self.job.contention else 1) > 1
        bounds = []
        for size in self.microbatch_sizes:
            for num_ranks in self.num_ranks:
                limits = least_step_s(
                    self.job.cost_model(size, num_ranks, max(self.compute_threads)),
                    num_ranks,
                    self.global_batch // size,
                    full_forward=self.full_forward and not set(self.schedules) - {"spipe"},
                    barrier=bool(options.get("barrier")) and options.get("optimizer") != "stale",
                    held_layers=held,
                    steps_together=together,
                    recompute="never" not in self._values_of("recompute"),
                    stale=options.get("optimizer") == "stale",
                )
                limit = max(limits, key=lambda name: limits[name])
                bounds.append((limits[limit], limit))
        return min(bounds)

    def _values_of(self, name: str) -> list[Any]:
        """What an option is in this search: what was fixed, else what systems cannot do without."""
        if name in self.job.options:
            return [self.job.options[name]]
        systems = [get_schedule(schedule) for schedule in self.schedules]
        return [system.essential.get(name) for system in systems if system.essential]


def _relative(seconds: Sequence[float]) -> tuple[float, ...]:
    """Layer costs in units of a block's, coarse enough that candidates share their cuts."""
    block = seconds[min(1, len(seconds) - 1)] or 1.0
    return tuple(round(cost / block, 2) for cost in seconds)


@lru_cache(maxsize=4096)
def _layout(
    schedule: str, num_ranks: int, costs: tuple[float, ...], forward: int, backward: int, full_forward: bool
) -> Layout:
    layers = len(costs)
    if num_ranks > layers:
        raise SpipeError(f"{num_ranks} ranks are more than the {layers} layers of the model")
    if any_number_of_stages(schedule) and layers < num_ranks * backward < layers + num_ranks:
        return decoupled_layout(num_ranks, costs, num_ranks * forward, layers, full_forward=full_forward)
    return get_schedule(schedule).make_layout(num_ranks, costs, forward, backward, full_forward)


def make_space(
    model: Model,
    hardware: HardwareSpec,
    *,
    global_batch: int,
    sequence: int,
    schedules: Sequence[str] | None = None,
    num_ranks: int | Sequence[int] | None = None,
    forward_stages: int | Sequence[int] | None = None,
    backward_stages: int | Sequence[int] | None = None,
    microbatch_size: int | Sequence[int] | None = None,
    compute_threads: int | Sequence[int] = 1,
    precision: str | None = None,
    contention: bool = True,
    full_forward: bool = False,
    cross_mapping: bool = False,
    max_rank_bytes: float | None = None,
    max_host_bytes: float | None = None,
    options: Mapping[str, Any] | None = None,
    **plan_fields: Any,
) -> Space:
    """The space of these choices; see ``spipe.sim.search.search``. Raises SpipeError naming a choice that is none."""
    Options(**(options or {}))  # an unknown option is the caller's mistake, not a plan that fails
    model.check_sequence(sequence)
    precision = precision or default_precision(hardware)
    hardware.accelerator.peak(precision)
    runnable = [name for name in SCHEDULES if not SCHEDULES[name].simulated_only]
    names = runnable if schedules is None else list(schedules)
    for name in names:
        get_schedule(name)
    if not names:
        raise SpipeError(f"schedules = {schedules!r} should name one at least; None for all that can be run")
    for name, limit in (("max_rank_bytes", max_rank_bytes), ("max_host_bytes", max_host_bytes)):
        if limit is not None and not limit > 0:
            raise SpipeError(f"{name} = {limit!r} should be more than 0")
    job = Job(
        model,
        hardware,
        sequence,
        contention,
        dict(options or {}),
        {**plan_fields, "precision": precision},
        max_rank_bytes or math.inf,
        max_host_bytes or math.inf,
    )
    return Space(
        job,
        global_batch,
        names,
        _rank_choices(hardware, num_ranks),
        _choices("forward_stages", forward_stages),
        _choices("backward_stages", backward_stages),
        _microbatch_choices(global_batch, microbatch_size),
        _thread_choices(hardware, compute_threads),
        full_forward,
        cross_mapping,
    )


def default_precision(hardware: HardwareSpec) -> str:
    """fp32 on device ``cpu``; on ``cuda`` bf16, or fp16 where the accelerator has no bf16."""
    if hardware.device == "cpu":
        return "fp32"
    return next((dtype for dtype in ("bf16", "fp16") if dtype in hardware.accelerator.peak_flops), "fp32")


def _choices(name: str, value: int | Sequence[int] | None) -> list[int] | None:
    """One value, or several, sorted; None is kept."""
    if value is None:
        return None
    values = [value] if isinstance(value, int) else sorted(set(value))
    if not values or not all(isinstance(each, int) and each >= 1 for each in values):
        raise SpipeError(f"{name} = {value!r} should be whole numbers of at least 1")
    return values


def _rank_choices(hardware: HardwareSpec, value: int | Sequence[int] | None) -> list[int]:
    """Numbers of ranks; None: all, and downwards by halves."""
    chosen = _choices("num_ranks", value)
    if chosen is None:
        chosen, ranks = [], hardware.num_ranks
        while ranks >= 1:
            chosen.append(ranks)
            ranks //= 2
        return chosen
    if max(chosen) > hardware.num_ranks:
        raise SpipeError(f"num_ranks = {max(chosen)}, but {hardware.name} has {hardware.num_ranks}")
    return chosen


def _microbatch_choices(global_batch: int, value: int | Sequence[int] | None) -> list[int]:
    """Microbatch sizes; None: all that divide the global batch."""
    if not isinstance(global_batch, int) or global_batch < 1:
        raise SpipeError(f"global_batch = {global_batch!r} should be a whole number of at least 1")
    divisors = [size for size in range(1, global_batch + 1) if global_batch % size == 0]
    chosen = _choices("microbatch_size", value)
    wrong = [size for size in chosen or [] if size not in divisors]
    if wrong:
        raise SpipeError(
            f"a global batch of {global_batch} sequences does not divide into microbatches of {wrong[0]}; use one of "
            f"{', '.join(map(str, divisors[:12]))}"
        )
    return chosen or divisors


def _thread_choices(hardware: HardwareSpec, value: int | Sequence[int]) -> list[int]:
    """Threads of a rank's compute lane, on device ``cpu``."""
    chosen = _choices("compute_threads", value)
    assert chosen is not None
    if hardware.device != "cpu" and chosen != [1]:
        raise SpipeError(f"compute_threads = {value!r} is for device cpu; {hardware.name} has {hardware.device}")
    if max(chosen) > hardware.cpu.cores:
        raise SpipeError(
            f"compute_threads = {max(chosen)}, but a host of {hardware.name} has {hardware.cpu.cores} cores"
        )
    return chosen
