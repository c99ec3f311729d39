"""The host store: where every parameter, gradient and counter lies in the shared region, and the views on it.

Static offsets from the plan, the same in every process. Elements are numbered in one natural order (layers from the
bottom up, parameters in the order of ``ModelSpec.parameter_shapes``, each 64-byte aligned), which weights, gradients,
masters, moments and the slots of the ranks share. So the weights of neighbouring layers lie together and a FETCH is
one copy. A tied LM head has its place in the order (for its gradient) but no weight: its weight is the embedding's.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from spipe._native import Flags
from spipe.errors import SpipeError
from spipe.model import ModelSpec
from spipe.ops import RECVS, SENDS, Kind
from spipe.plan import ELEMENT_BYTES, Plan
from spipe.program import Program
from spipe.runtime.region import DTYPES, Region, RegionPlan, Span

ALIGN_ELEMENTS = 32
"""Elements between aligned positions: 64 bytes of the smallest type."""
ERROR_BYTES = 4096
MAILBOX_SLOTS = 2
COUNTER_BYTES = 64
ARRIVALS = ("validate", "barrier", "phase", "saved", "settled", "evaluated")
"""What ranks wait for each other for, apart from ops."""
NOTES = ("", "rollback", "bypass", "redo")
"""What came of an op, as it stands in a trace; its position is the code in the store."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of one layer: elements ``first`` to ``first + count`` of the natural order."""

    layer: int
    name: str
    shape: tuple[int, ...]
    first: int
    count: int

    @property
    def label(self) -> str:
        """Name by which state files know it, as ``3.mlp.up_proj.weight``."""
        return f"{self.layer}.{self.name}"


class ParameterTable:
    """All parameters in natural order."""

    def __init__(self, model: ModelSpec) -> None:
        self.layers: list[tuple[Parameter, ...]] = []
        self.bounds = [0]
        for layer in range(model.num_total_layers):
            first, row = self.bounds[-1], []
            for name, shape in model.parameter_shapes(model.layer_kind(layer)).items():
                row.append(Parameter(layer, name, shape, first, math.prod(shape)))
                first = aligned_elements(first + row[-1].count)
            self.layers.append(tuple(row))
            self.bounds.append(first)
        tied = model.tied_parameters()
        self.tied: tuple[Parameter, Parameter] | None = None
        """The embedding's weight and the head's, if they are one."""
        if tied:
            (low, low_name), (high, high_name) = tied
            self.tied = self.find(low, low_name), self.find(high, high_name)

    def find(self, layer: int, name: str) -> Parameter:
        return next(parameter for parameter in self.layers[layer] if parameter.name == name)

    def of(self, layers: Iterable[int]) -> list[Parameter]:
        """Parameters of some layers, in order."""
        return [parameter for layer in layers for parameter in self.layers[layer]]

    def span(self, layers: range) -> tuple[int, int]:
        """First element and stop of neighbouring layers."""
        return self.bounds[layers.start], self.bounds[layers.stop]

    @property
    def num_elements(self) -> int:
        return self.bounds[-1]

    @cached_property
    def num_weights(self) -> int:
        """Elements of the natural order that have a weight of their own."""
        return self.tied[1].first if self.tied else self.num_elements

    def owns_state(self, parameter: Parameter) -> bool:
        """Whether the parameter has masters and moments of its own (not so a tied head's weight)."""
        return self.tied is None or parameter != self.tied[1]


def aligned_elements(count: int) -> int:
    return -(-count // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


class StoreLayout:
    """Spans and flag numbers of one job on one host."""

    def __init__(self, plan: Plan, steps: int, trace_steps: int, evaluations: tuple[int, int] = (0, 0)) -> None:
        program, self.table = plan.program(), ParameterTable(plan.model)
        num_ops, num_ranks = len(program), plan.layout.num_ranks
        self.steps, self.trace_steps, self.num_ops, self.num_ranks = steps, trace_steps, num_ops, num_ranks
        self.weight_dtype, self.gradient_dtype = plan.precision, plan.gradient_dtype
        self.boundary_bytes = plan.model.boundary_bytes(
            plan.microbatch_size, plan.sequence, ELEMENT_BYTES[plan.precision]
        )
        self._number_flags(program)
        region = RegionPlan()
        self.flags = region.add(self.num_flags * Flags.BYTES_PER_FLAG)
        self.errors = region.add(ERROR_BYTES * num_ranks)
        self.statistics = region.add(8 * 2 * 2 * sum(map(len, self.table.layers)))
        self.losses = region.add(8 * steps)
        self.stops = region.add(8 * 2 * num_ranks)
        self.evaluations_shape = evaluations
        self.evaluations = region.add(8 * evaluations[0] * evaluations[1])
        self.step_ends = region.add(8 * (steps + 1) * num_ranks)
        self.peaks = region.add(8 * 3 * num_ranks)
        self.times = region.add(8 * 4 * trace_steps * num_ops)
        self.control_bytes = region.num_bytes
        page = 4096
        self.data_offset = region.add(0, page).offset
        self.weights = region.add(self.table.num_weights * ELEMENT_BYTES[plan.precision])
        self.gradients = region.add(self.table.num_elements * ELEMENT_BYTES[plan.gradient_dtype])
        self.stage_inputs = {
            (program.stage[i], program.index[i]): region.add(self.boundary_bytes)
            for i in range(num_ops)
            if program.kind[i] == Kind.STORE_STAGE_INPUT
        }
        self.mailboxes = {
            key: [region.add(self.boundary_bytes) for _ in range(MAILBOX_SLOTS)] for key in self.mailbox_flags
        }
        self.message_counters = {key: region.add(2 * COUNTER_BYTES) for key in self.mailbox_flags}
        """By (lane, sending rank): a word that counts messages put in, and one for those taken out, for devices."""
        self.num_bytes = region.add(0, page).offset
        self.data_span = Span(self.data_offset, self.num_bytes - self.data_offset)
        """What is copied to and from devices."""

    def _number_flags(self, program: Program) -> None:
        """Flags: one per op, then abort, then per rank its arrivals, then two per mailbox."""
        self.abort = self.num_ops
        first = self.num_ops + 1
        self.arrivals = {name: first + n * self.num_ranks for n, name in enumerate(ARRIVALS)}
        first += len(ARRIVALS) * self.num_ranks
        directions = sorted(
            {
                (program.lane[i], program.rank[i])
                for i in range(self.num_ops)
                if program.kind[i] in SENDS or program.kind[i] in RECVS
            }
        )
        self.mailbox_flags = {key: first + 2 * n for n, key in enumerate(directions)}
        """By (lane, sending rank): the flag that counts messages put in; the next one counts messages taken out."""
        self.num_flags = first + 2 * len(directions)

    def table_of_bytes(self) -> dict[str, int]:
        """What the region holds, itemised."""
        return {
            "weights": self.weights.num_bytes,
            "gradients": self.gradients.num_bytes,
            "stage inputs": sum(span.num_bytes for span in self.stage_inputs.values()),
            "mailboxes": sum(span.num_bytes for spans in self.mailboxes.values() for span in spans),
            "flags and times": self.control_bytes,
        }


class Store:
    """Typed views of a rank on the region of its host."""

    def __init__(self, layout: StoreLayout, region: Region) -> None:
        if region.num_bytes != layout.num_bytes:
            raise SpipeError(
                f"the shared region has {region.num_bytes} bytes, this rank expects {layout.num_bytes}: the ranks were "
                "started with different plans or options"
            )
        self.layout, self.region, self.table = layout, region, layout.table
        self.flags = Flags(region.pointer(layout.flags), layout.num_flags)
        self.weights = region.tensor(layout.weights, DTYPES[layout.weight_dtype])
        self.gradients = region.tensor(layout.gradients, DTYPES[layout.gradient_dtype])
        self.statistics = self._doubles(layout.statistics, (2, -1, 2))
        """Per parity of the step and parameter: whether its gradient is non-finite, sum of squares."""
        self.losses = self._doubles(layout.losses, (-1,))
        self.evaluations = self._doubles(layout.evaluations, layout.evaluations_shape)
        """Per evaluation and batch of validation text: its loss."""
        self.stops = self._doubles(layout.stops, (2, layout.num_ranks))
        """Per parity of the step and rank: whether it was asked to stop."""
        self.step_ends = self._doubles(layout.step_ends, (layout.steps + 1, layout.num_ranks))
        """End of each step's VALIDATE per rank, seconds of the monotonic clock; row 0: start of the job."""
        self.peaks = self._doubles(layout.peaks, (layout.num_ranks, 3))
        """Per rank: most bytes of device memory, most resident bytes of its process."""
        self.times = self._doubles(layout.times, (layout.trace_steps, layout.num_ops, 4))
        """Per traced step and op: start, end, processor seconds, code of the note."""
        self.boundary_dtype = DTYPES[layout.weight_dtype]

    def _doubles(self, span: Span, shape: tuple[int, ...]) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self.region.tensor(span, torch.float64).numpy()
        return values.reshape(shape)

    def boundary(self, span: Span) -> torch.Tensor:
        """A flat activation in the region: a stage input or a mailbox."""
        return self.region.tensor(span, self.boundary_dtype)

    def write_error(self, rank: int, text: str) -> None:
        """Leave a message for the others, with the time; only a rank's first one is kept."""
        first = self.layout.errors.offset + rank * ERROR_BYTES
        slot = self.region.tensor(Span(first, ERROR_BYTES), torch.uint8)
        if not slot[0]:
            data = f"{time.monotonic():020.6f} {text}".encode()[: ERROR_BYTES - 1]
            slot[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def first_error(self) -> str:
        """The earliest message of any rank; empty if there is none."""
        found = []
        for rank in range(self.layout.num_ranks):
            first = self.layout.errors.offset + rank * ERROR_BYTES
            data = bytes(self.region.tensor(Span(first, ERROR_BYTES), torch.uint8).numpy()).rstrip(b"\0")
            if data:
                found.append(data.decode(errors="replace"))
        return min(found, default="").partition(" ")[2]
