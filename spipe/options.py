"""Options of lowering: everything about a plan that is neither layout nor compute order."""

from typing import Literal, Self

from pydantic import Field, model_validator

from spipe.errors import SpipeError
from spipe.units import Flag, Spec


class Options(Spec):
    """How a compute order becomes a program. Slots are buffers; reusing one is a dependency."""

    recompute: Literal["early", "late", "never"] = "early"
    """``early``: recompute as soon as the stage input is there; ``late``: only once the gradient is there, too;
    ``never``: what a forward saves is kept for its backward, on the GPU or (``stage_input_route`` ``host``) in host
    memory. RECOMPUTE then takes no time, but for a stage that no forward runs."""
    recompute_output: Flag = False
    """Whether a RECOMPUTE also computes what its stage passes on, which no op reads (the published systems do). What is
    left out is the last product of the stage's last layer: a fifth of a block. Lists of modules, compiled layers and
    dropout always compute it."""
    optimizer: Literal["async", "sync", "stale"] = "async"
    """``async``: a bucket steps as soon as its gradient is on the host; ``sync``: after every gradient is validated;
    ``stale``: as ``async``, but a step reads the weights as they were one step earlier, so that steps overlap."""
    barrier: Flag = False
    """Whether all ranks wait for all optimizer steps before the next training step starts (the published order)."""
    step_order: Literal["deadline", "arrival"] = "deadline"
    """``deadline``: of the gradients there, step the layers needed first in the next training step."""
    optimizer_workers: int = Field(default=1, ge=1, le=65536)
    """STEPs of a rank that may run at a time; they share its cores and the host's memory bandwidth."""
    device_layers: int = Field(default=0, ge=0, le=65536)
    """So many of the lowest layers have weights and optimizer state on the accelerator that runs their backward; they
    are stepped there, once the verdict is known. Tied embedding and head stay on the host."""
    bucket_layers: int = Field(default=1, ge=0, le=65536)
    """Layers per FETCH, OFFLOAD_GRAD and STEP; 0 for whole stages."""
    reuse_weights: Flag = True
    """Keep fetched weights as long as a later use is nearer than that of what would replace them."""
    weight_slots: int | None = Field(default=2, ge=1, le=65536)
    """Stages whose weights a GPU holds at a time; None for all it computes with: resident, fetched once a step."""
    gradient_slots: int | None = Field(default=None, ge=1, le=65536)
    """Stages whose gradients a GPU holds at a time; None for 2, or as many as the schedule alternates between."""
    receive_slots: int = Field(default=2, ge=1, le=65536)
    """Received activations or gradients held per peer and class of message."""
    send_slots: int = Field(default=2, ge=1, le=65536)
    """Unsent activations or gradients held per peer and class of message."""
    token_slots: int = Field(default=2, ge=1, le=65536)
    """Microbatches of tokens held by a stage that reads them."""
    message_route: Literal["p2p", "host"] = "p2p"
    """Of activations and gradients between stages; ``host``: copy engines carry them through host memory."""
    stage_input_route: Literal["p2p", "host"] = "p2p"
    """``p2p``: to the GPU that needs it, as soon as it is produced; ``host``: through host memory."""
    stage_inputs: Literal["async", "sync"] = "async"
    """``sync``: a rank computes on only after it has sent the stage inputs it produced (route ``p2p`` only)."""
    stage_input_slots: int = Field(default=2, ge=1, le=65536)
    """Stage inputs that a GPU loads ahead from host memory (route ``host`` only)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.device_layers and self.bucket_layers != 1:
            raise ValueError(
                f"device_layers = {self.device_layers} needs bucket_layers = 1, got {self.bucket_layers}: what is held "
                "is decided layer by layer"
            )
        if self.device_layers and self.optimizer == "stale":
            raise ValueError(
                f"device_layers = {self.device_layers} steps layers exactly, optimizer = stale does not: leave out one"
            )
        if self.optimizer == "stale" and self.barrier:
            raise SpipeError(
                "optimizer = stale lets steps overlap, barrier = true forbids it: set barrier to false or optimizer to "
                "async or sync"
            )
        return self

    def holds(self, layer: int, num_layers: int, tied: bool) -> bool:
        """Whether ``device_layers`` takes in a layer; the two layers of a tied weight are never."""
        return layer < self.device_layers and not (tied and layer in (0, num_layers - 1))

    @property
    def simulated_only(self) -> tuple[str, ...]:
        """Options that the simulator knows and the runtime does not, as ``name = value``."""
        values = {"recompute": "never", "optimizer": "stale", "message_route": "host"}
        return tuple(f"{name} = {value}" for name, value in values.items() if getattr(self, name) == value)
