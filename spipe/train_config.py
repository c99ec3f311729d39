"""Training configuration: ``train.toml``, whose keys are the names of ``spipe run``'s options."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import Field

from spipe.errors import SpipeError
from spipe.memory import memory
from spipe.plan import AdamW, Dtype, Plan
from spipe.units import NonNegative, Positive, Spec, read_table

Count = Annotated[int, Field(strict=True, ge=1)]
CONFIG_FILE = "train.toml"
_OPTIMIZER = tuple(AdamW.model_fields)
_PLAN = ("gradient_precision", "deterministic", "compile_layers", "cuda_graphs", "dropout", "z_loss")
_NEEDED = {"plan": "PLAN", "steps": "--steps", "output": "--output"}


class TrainConfig(Spec):
    """What a run is given besides its plan. What is None is left to the plan, or to the default that it names."""

    plan: str
    """``plan.json``, or a folder that holds one."""
    steps: Count
    """Training steps, those before a checkpoint included."""
    output: str
    """Run folder."""
    data: str | None = None
    tokenizer: str | None = None
    token_bytes: Literal[2, 4] | None = None
    validation_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0
    evaluate_every: Count | None = None
    checkpoint_every: Count | None = None
    keep: Count | None = None
    resume: str | None = None
    model_folder: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    transport: str = "auto"
    timeout_s: Positive = 600.0
    trace_steps: Count = 25
    host_memory_gib: Positive | None = None
    gpu_memory_limit_gib: Positive | None = None
    """Of each GPU; PyTorch is held to it."""
    gradient_precision: Dtype | None = None
    deterministic: bool | None = None
    compile_layers: bool | None = None
    cuda_graphs: bool | None = None
    dropout: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    z_loss: NonNegative | None = None
    tensorboard: bool = False
    wandb: str | None = None
    learning_rate: NonNegative | None = None
    beta1: NonNegative | None = None
    beta2: NonNegative | None = None
    epsilon: Positive | None = None
    weight_decay: NonNegative | None = None
    max_norm: Positive | None = None
    learning_rate_schedule: Literal["constant", "linear", "cosine", "wsd"] | None = None
    warmup_steps: Annotated[int, Field(strict=True, ge=0)] | None = None
    total_steps: Count | None = None
    decay_steps: Count | None = None
    minimum_learning_rate: NonNegative | None = None

    @classmethod
    def load(cls, file: Path | None, options: Mapping[str, Any]) -> "TrainConfig":
        """The file's values, and on top of them the options that are not None. Raises SpipeError."""
        table = {} if file is None else read_table(file)
        if "from" in table and "model_folder" not in table:  # as the option is spelled
            table["model_folder"] = table.pop("from")
        table |= {key: value for key, value in options.items() if value is not None}
        source = "options" if file is None else f"{file} and options"
        config = cls.from_table({"plan": "", "steps": 1, "output": "", **table}, source)  # what is there comes first
        missing = [option for name, option in _NEEDED.items() if name not in table]
        if missing:
            where = "on the command line" if file is None else f"in {file} or on the command line"
            raise SpipeError(f"{', '.join(missing)} is missing; give it {where}")
        return config

    def text(self) -> str:
        """The file that says the same."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    def files(self) -> dict[str, str]:
        """Text files that say in the run folder what was given."""
        return {CONFIG_FILE: self.text()}

    def run_arguments(self) -> dict[str, Any]:
        """Arguments of ``spipe.runtime.run`` and fields of its job, but for the plan."""
        names = (
            "steps", "output", "data", "tokenizer", "token_bytes", "validation_fraction", "evaluate_every",
            "checkpoint_every", "keep", "resume", "model_folder", "transport", "timeout_s", "trace_steps",
        )  # fmt: skip
        gib = self.host_memory_gib
        return {
            **{name: getattr(self, name) for name in names},
            "host_memory_bytes": None if gib is None else max(1, int(gib * 2**30)),
        }

    def apply(self, plan: Plan) -> Plan:
        """The plan with this configuration's optimizer, loss, kernels and memory limit.

        Raises SpipeError for values that do not go together, and if the plan does not fit into the memory or the
        device.
        """
        if self.device is not None and self.device != plan.hardware.device:
            raise SpipeError(
                f"--device {self.device}: the plan is for {plan.hardware.name}, whose device is "
                f"{plan.hardware.device}; make a plan with `spipe search --hardware` of a {self.device} machine"
            )
        changes: dict[str, Any] = {name: value for name in _PLAN if (value := getattr(self, name)) is not None}
        optimizer = {name: value for name in _OPTIMIZER if (value := getattr(self, name)) is not None}
        if self.learning_rate_schedule not in (None, "wsd"):
            optimizer.setdefault("decay_steps", None)  # of the plan's schedule, which is not that of the run
        if optimizer:
            changes["optimizer"] = plan.optimizer.replace(**optimizer)
        limit = self.gpu_memory_limit_gib
        if limit is not None:
            if plan.hardware.device != "cuda":
                raise SpipeError(
                    f"gpu_memory_limit_gib = {limit:g} is for device cuda; {plan.hardware.name} has device "
                    f"{plan.hardware.device}: leave it out"
                )
            accelerator = plan.hardware.accelerator.replace(memory_bytes=limit * 2**30)
            changes["hardware"] = plan.hardware.replace(accelerator=accelerator)
        plan = plan.replace(**changes) if changes else plan
        if limit is not None or self.gradient_precision is not None:
            memory(plan, evaluates=self.evaluate_every is not None).require()
        return plan
