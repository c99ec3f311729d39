"""Plan: everything that simulator and runtime need to know, in one validated file.

``plan.json`` holds the model, the full hardware spec, layout, schedule and options, precision, optimizer, batch and
predicted metrics. The same inputs give the same bytes. ``Plan.program()`` is the one place where a plan becomes ops.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.layer_list import LayerListSpec, Model
from spipe.layout import Layout, Stage
from spipe.lower import lower, require_size
from spipe.options import Options
from spipe.program import Program
from spipe.schedules import SCHEDULES, get_schedule
from spipe.units import Flag, NonNegative, Positive, Spec

SCHEMA_VERSION = 1
Dtype = Literal["fp32", "bf16", "fp16"]
ELEMENT_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

PositiveInt = Annotated[int, Field(strict=True, ge=1)]
# Bounds far above any use: what lies beyond is a slip of the hand, and would fill the memory before anything else.
Batch = Annotated[int, Field(strict=True, ge=1, le=2**20)]
SequenceLength = Annotated[int, Field(strict=True, ge=1, le=2**24)]
Threads = Annotated[int, Field(strict=True, ge=1, le=4096)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class StageSpec(Spec):
    """One stage of the layout file."""

    first: Annotated[int, Field(strict=True, ge=0)]
    stop: PositiveInt
    rank: Annotated[int, Field(strict=True, ge=0)]


class LayoutSpec(Spec):
    """The layout as it stands in the file; ``spipe.layout.Layout`` checks it."""

    num_ranks: PositiveInt
    forward: tuple[StageSpec, ...]
    backward: tuple[StageSpec, ...]
    layer_costs: tuple[float, ...]

    def layout(self) -> Layout:
        def stages(specs: Sequence[StageSpec]) -> tuple[Stage, ...]:
            return tuple(Stage(s.first, s.stop, s.rank) for s in specs)

        return Layout(
            len(self.layer_costs), self.num_ranks, stages(self.forward), stages(self.backward), self.layer_costs
        )

    @classmethod
    def of(cls, layout: Layout) -> "LayoutSpec":
        def specs(stages: Sequence[Stage]) -> tuple[StageSpec, ...]:
            return tuple(StageSpec(first=s.first, stop=s.stop, rank=s.rank) for s in stages)

        return cls(
            num_ranks=layout.num_ranks,
            forward=specs(layout.forward),
            backward=specs(layout.backward),
            layer_costs=layout.layer_costs,
        )


class AdamW(Spec):
    """AdamW with decoupled weight decay and bias correction, on fp32 masters."""

    learning_rate: NonNegative = 1e-3
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    """On matrices; norms and biases do not decay."""
    max_norm: Positive | None = None
    """Gradients whose global norm is larger are scaled down to it; None: never."""
    learning_rate_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After the warm-up: as it is; falling to ``minimum_learning_rate`` over the rest; or, ``wsd`` (warm-up, stable,
    decay), falling linearly over the last ``decay_steps``."""
    warmup_steps: Annotated[int, Field(strict=True, ge=0)] = 0
    """Updates over which the learning rate rises linearly; the first one already has a share of it."""
    total_steps: PositiveInt | None = None
    """Updates until a falling learning rate is at its minimum, warm-up included."""
    decay_steps: PositiveInt | None = None
    """For ``wsd``; None: a tenth of ``total_steps``."""
    minimum_learning_rate: NonNegative = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.decay_steps is not None and self.learning_rate_schedule != "wsd":
            raise ValueError(
                f"decay_steps = {self.decay_steps} is for learning_rate_schedule = 'wsd', not "
                f"{self.learning_rate_schedule!r}; leave it out"
            )
        if self.learning_rate_schedule == "constant":
            return self
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps = {self.total_steps} should be above warmup_steps = {self.warmup_steps}")
        if self.total_steps is not None and (self.decay_steps or 0) > self.total_steps - self.warmup_steps:
            raise ValueError(
                f"decay_steps = {self.decay_steps} should be at most total_steps - warmup_steps, "
                f"{self.total_steps - self.warmup_steps}"
            )
        if self.minimum_learning_rate > self.learning_rate:
            raise ValueError(
                f"minimum_learning_rate = {self.minimum_learning_rate} should be at most the learning rate, "
                f"{self.learning_rate}"
            )
        return self

    def learning_rate_of(self, update: int) -> float:
        """Learning rate of an update, counted from 0; steps that were skipped do not count."""
        if update < self.warmup_steps:
            return self.learning_rate * (update + 1) / self.warmup_steps
        kind, total = self.learning_rate_schedule, self.total_steps
        if kind == "constant" or total is None:
            return self.learning_rate
        first = self.warmup_steps
        if kind == "wsd":
            first = max(first, total - (self.decay_steps or max(1, total // 10)))
        done = min(max((update - first) / (total - first), 0.0), 1.0)
        left = (1 + math.cos(math.pi * done)) / 2 if kind == "cosine" else 1 - done
        return self.minimum_learning_rate + (self.learning_rate - self.minimum_learning_rate) * left

    def weight_decay_of(self, shape: Sequence[int]) -> float:
        """Weight decay of a parameter of this shape."""
        return self.weight_decay if len(shape) > 1 else 0.0


class LossScale(Spec):
    """Dynamic loss scale, used with fp16 only: halved on overflow, doubled after ``window`` good steps in a row."""

    initial: Positive = 65536.0
    window: PositiveInt = 1000
    minimum: Positive = 1.0


class Plan(Spec):
    """A job that can be simulated and run."""

    schema_version: Literal[1] = 1
    model: Model
    hardware: HardwareSpec
    schedule: str
    layout: LayoutSpec
    options: Options = Options()
    precision: Dtype = "bf16"
    """Weights, activations and messages; masters and moments are always fp32."""
    gradient_precision: Dtype | None = None
    """Gradients accumulate and travel to the host in this type; None: as ``precision``."""
    optimizer: AdamW = AdamW()
    loss_scale: LossScale = LossScale()
    sequence: SequenceLength
    microbatch_size: Batch
    """Sequences per microbatch."""
    num_microbatches: Batch
    compute_threads: Threads = 1
    """CPU threads of a rank's compute lane (device ``cpu``); results are bitwise equal only for the same number."""
    optimizer_threads: Annotated[int, Field(strict=True, ge=0, le=4096)] = 0
    """CPU threads of a rank's optimizer; 0: the host's cores shared out over its ranks, on device ``cuda`` less the two
    that launch kernels and copies."""
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    """Of what a block's attention and feed-forward add; built-in layers only. Part of what is trained, not of layout:
    masks are a function of seed, step, microbatch and layer."""
    z_loss: NonNegative = 0.0
    """Coefficient of the squared log-sum-exp of the logits in the loss; built-in layers only."""
    deterministic: Flag = False
    """Device ``cuda``: only kernels whose result does not change from run to run; slower."""
    compile_layers: Flag = False
    """Device ``cuda``: blocks go through ``torch.compile``, one graph for all; the first steps are slow."""
    cuda_graphs: Flag = False
    """Device ``cuda``: ops whose stages have blocks only are recorded (CUDA graphs) and replayed, which spares the host
    nearly all of issuing them: it bounds small microbatches. Takes room for what the largest such stage saves for its
    backward. Built-in layers without dropout only."""
    predicted: dict[str, Finite] | None = None
    """Metrics of the simulation that chose this plan."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        get_schedule(self.schedule)
        layers = self.model.num_total_layers
        if len(self.layout.layer_costs) != layers:
            raise SpipeError(
                f"layout.layer_costs has {len(self.layout.layer_costs)} entries, but {self.model.name} has {layers} "
                "layers (embedding, blocks and head)"
            )
        if isinstance(self.model, LayerListSpec) and (self.dropout or self.z_loss):
            raise SpipeError(
                f"dropout = {self.dropout} and z_loss = {self.z_loss} are for built-in layers; {self.model.name} is a "
                "list of layers: put them into its modules and its loss"
            )
        if self.options.device_layers and self.model.frozen_layers():
            raise SpipeError(
                f"device_layers = {self.options.device_layers} is for models that are trained as a whole; "
                f"{self.model.name} has frozen layers: leave it out"
            )
        self.model.check_sequence(self.sequence)
        if self.layout.num_ranks > self.hardware.num_ranks:
            raise SpipeError(
                f"the layout uses {self.layout.num_ranks} ranks, but {self.hardware.name} has {self.hardware.num_ranks}"
            )
        self.layout.layout()
        if self.cuda_graphs:
            require_recordable(self.model, self.dropout, self.compile_layers)
        for name in ("deterministic", "compile_layers", "cuda_graphs"):
            if getattr(self, name) and self.hardware.device != "cuda":
                raise SpipeError(
                    f"{name} = true is for device cuda; {self.hardware.name} has device {self.hardware.device}, where "
                    "results never change from run to run and layers run as they are: leave it out"
                )
        return self

    @property
    def global_batch(self) -> int:
        """Sequences per training step."""
        return self.microbatch_size * self.num_microbatches

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    @property
    def gradient_dtype(self) -> Dtype:
        return self.gradient_precision or self.precision

    def records(self, layers: range) -> bool:
        """Whether compute ops of a stage of these layers are recorded and replayed."""
        return self.cuda_graphs and layers.start > 0 and layers.stop < self.model.num_total_layers

    def program(self) -> Program:
        """The ops of one training step: the one schedule that simulator and runtime interpret."""
        model = self.model
        return _program(
            self.layout,
            self.schedule,
            self.num_microbatches,
            self.options,
            model.tied_embeddings,
            model.frozen_layers(),
        )

    def require_runnable(self) -> None:
        """Raises SpipeError if the schedule or an option is one that only the simulator knows."""
        unknown_there = [f"schedule {self.schedule}"] if get_schedule(self.schedule).simulated_only else []
        unknown_there += [f"option {option}" for option in self.options.simulated_only]
        if unknown_there:
            raise SpipeError(
                f"{', '.join(unknown_there)}: the simulator knows this, the runtime does not; run another schedule or "
                "option, or use `spipe simulate`"
            )

    def digest(self) -> str:
        """A short name for what is trained and how, predictions and hardware left out."""
        text = self.model_dump_json(exclude={"predicted", "hardware"})
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def text(self) -> str:
        """What ``plan.json`` holds; the same plan gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write ``plan.json``."""
        Path(path).write_text(self.text())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read and validate a plan. Raises SpipeError naming the field, its value and what is allowed."""
        path = Path(path)
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise SpipeError(f"{path}: cannot read the plan ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise SpipeError(f"{path}: not JSON ({error}); make a plan with `spipe search`") from None
        return cls.of_json(data, str(path))

    @classmethod
    def of_json(cls, data: Any, path: str) -> "Plan":
        """The plan that a JSON value describes; ``path`` is what messages call it. Raises SpipeError as `load`."""
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            version = data.get("schema_version") if isinstance(data, dict) else None
            raise SpipeError(
                f"{path}: schema_version = {version!r}, this version reads {SCHEMA_VERSION}; make the plan again with "
                "`spipe search`"
            )
        try:
            plan = cls.model_validate(data)
            plan.program()
        except SpipeError as error:
            raise SpipeError(f"{path}: {error}") from None
        return plan


@lru_cache(maxsize=2)  # a large program takes some 100 MB
def _program(
    layout: LayoutSpec, schedule: str, num_microbatches: int, options: Options, tied: bool, frozen: frozenset[int]
) -> Program:
    laid_out = layout.layout()
    require_size(laid_out, num_microbatches)
    order = get_schedule(schedule).compute_order(laid_out, num_microbatches)
    return lower(laid_out, order, num_microbatches, options, tied=tied, frozen=frozen)


def require_recordable(model: Model, dropout: float, compile_layers: bool) -> None:
    """Raises SpipeError if ``cuda_graphs`` is not for such a model, trained in this way."""
    if isinstance(model, LayerListSpec) or dropout or compile_layers:
        raise SpipeError(
            "cuda_graphs = true is for built-in layers without dropout and compile_layers: what is recorded runs the "
            "same kernels with the same random numbers each time; set it to false (--no-cuda-graphs), or leave the "
            "other out"
        )


def relative_layer_costs(model: Model, sequence: int) -> list[float]:
    """Forward operations of every layer, in units of a block's (of a list of layers: of the largest)."""
    flops = [
        model.layer_forward_flops(model.layer_kind(i), 1, sequence, causal=True) for i in range(model.num_total_layers)
    ]
    unit = max(flops) if isinstance(model, LayerListSpec) else flops[1]
    return [value / unit for value in flops] if unit else [1.0] * len(flops)


def make_plan(
    model: Model,
    hardware: HardwareSpec,
    *,
    schedule: str = "spipe",
    num_ranks: int | None = None,
    forward_stages: int = 2,
    backward_stages: int = 6,
    global_batch: int,
    microbatch_size: int,
    sequence: int,
    full_forward: bool = False,
    published: bool = False,
    layer_costs: Sequence[float] | None = None,
    layout: Layout | None = None,
    cross_mapping: bool = False,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> Plan:
    """A plan from a schedule and stages per rank.

    Args:
        num_ranks: ranks to use; None for all of the hardware.
        forward_stages, backward_stages: stages per rank F and B; equal unless the schedule is decoupled.
        global_batch: sequences per training step, a multiple of ``microbatch_size``.
        full_forward: also run forward what the top backward stage recomputes anyway.
        published: the options and full forward of the published system instead of our defaults.
        layer_costs: relative forward cost of every layer; None: from its operations.
        layout: a layout of your own instead of stages per rank.
        cross_mapping: order the ranks of several hosts by ``spipe.layout.cross_mapping`` instead of host by host.
        options: fields of ``Options`` that differ from the defaults.
        fields: further fields of ``Plan``.

    Raises:
        SpipeError: naming what does not fit and what would.
    """
    for name, value in (("global_batch", global_batch), ("microbatch_size", microbatch_size), ("sequence", sequence)):
        if not isinstance(value, int) or not 1 <= value <= 2**24:
            raise SpipeError(f"{name} = {value!r} should be a whole number of 1 to {2**24}")
    if global_batch % microbatch_size:
        raise SpipeError(
            f"a global batch of {global_batch} sequences does not divide into microbatches of {microbatch_size}; use a "
            "microbatch size that divides it"
        )
    system = get_schedule(schedule)
    ranks = hardware.num_ranks if num_ranks is None else num_ranks
    if not 1 <= ranks <= hardware.num_ranks:
        raise SpipeError(f"num_ranks = {ranks} should be 1 to {hardware.num_ranks}, the ranks of {hardware.name}")
    if layout is None:
        costs = list(layer_costs) if layer_costs is not None else relative_layer_costs(model, sequence)
        if ranks > len(costs):
            raise SpipeError(f"{ranks} ranks are more than the {len(costs)} layers of {model.name}; use fewer ranks")
        layout = system.make_layout(ranks, costs, forward_stages, backward_stages, full_forward or published)
    if cross_mapping:
        layout = layout.cross_mapped(hardware.ranks_per_host)
    chosen = Options(**{**(system.published if published else system.essential), **(options or {})})
    return Plan(
        model=model,
        hardware=hardware,
        schedule=schedule,
        layout=LayoutSpec.of(layout),
        options=chosen,
        sequence=sequence,
        microbatch_size=microbatch_size,
        num_microbatches=global_batch // microbatch_size,
        **fields,
    )


__all__ = ["SCHEDULES", "AdamW", "LayoutSpec", "LossScale", "Plan", "StageSpec", "make_plan", "relative_layer_costs"]
