"""What `spipe run` shows while it trains."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spipe.cli.common import progress, step_log
from spipe.errors import SpipeError

if TYPE_CHECKING:
    from spipe.plan import Plan
    from spipe.train_config import TrainConfig

Log = Callable[[dict[str, Any]], None]


@contextmanager
def training_log(config: "TrainConfig", plan: "Plan") -> Iterator[Log]:
    """Reports rows of metrics and messages on stderr: a bar on a terminal, elsewhere a line from time to time.

    Raises SpipeError if TensorBoard or Weights & Biases is wanted and not installed.
    """
    with ExitStack() as stack:
        logs: list[Log] = []
        if config.tensorboard:
            logs.append(stack.enter_context(_tensorboard(Path(config.output) / "tensorboard")))
        if config.wandb:
            logs.append(stack.enter_context(_wandb(config)))
        if sys.stderr.isatty():
            logs.append(stack.enter_context(_bar(config.steps, plan)))
        else:
            logs.append(step_log(config.steps))
        yield _all(logs)


def hardware_flops_utilization(plan: "Plan", tokens_per_s: float) -> float:
    """Share of the accelerators' peak that the step's operations take, recompute included; causal attention."""
    operations = plan.model.model_flops_per_token(plan.sequence, causal=True) * 4 / 3
    peak = plan.hardware.accelerator.peak(plan.precision) * plan.layout.num_ranks
    return operations * tokens_per_s / peak


def _all(logs: list[Log]) -> Log:
    def log(row: dict[str, Any]) -> None:
        for each in logs:
            each(row)

    return log


@contextmanager
def _bar(steps: int, plan: "Plan") -> Iterator[Log]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    skipped = -1
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=steps)

        def log(row: dict[str, Any]) -> None:
            nonlocal skipped
            if "message" in row:
                bar.console.print(row["message"], highlight=False, markup=False)
                return
            if skipped < 0:  # the time left is told from this run's steps, not from those before a checkpoint
                bar.reset(task, completed=row["step"])
                skipped = 0
            skipped += row["skipped"]
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            words = [f"loss {loss}", f"{row['tokens_per_s']:.4g} tokens/s"]
            words.append(f"HFU {hardware_flops_utilization(plan, row['tokens_per_s']):.1%}")
            if row.get("device_peak_bytes"):
                words.append(f"GPU {row['device_peak_bytes'] / 2**30:.1f} GiB")
            if row.get("host_bytes"):
                words.append(f"host {row['host_bytes'] / 2**30:.1f} GiB")
            if skipped:
                words.append(f"{skipped} skipped")
            bar.update(task, completed=row["step"] + 1, description=", ".join(words))
            if "validation_loss" in row:
                bar.console.print(validation_message(row), highlight=False)

        yield log


def validation_message(row: dict[str, Any]) -> str:
    """One line about an evaluation."""
    loss = "not finite" if row["validation_loss"] is None else f"{row['validation_loss']:.4f}"
    return f"after step {row['step'] + 1}: validation loss {loss}"


@contextmanager
def _tensorboard(folder: Path) -> Iterator[Log]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SpipeError(
            "--tensorboard needs the package tensorboard, of the extra train: pip install tensorboard"
        ) from None
    progress(f"tensorboard --logdir {folder}")
    writer: Any = SummaryWriter(folder)

    def log(row: dict[str, Any]) -> None:
        for name, value in _scalars(row).items():
            writer.add_scalar(name, value, row["step"] + 1)

    yield log
    writer.close()


@contextmanager
def _wandb(config: "TrainConfig") -> Iterator[Log]:
    try:
        wandb: Any = import_module("wandb")
    except ImportError:
        raise SpipeError("--wandb needs the package wandb: pip install wandb, and wandb login") from None
    with wandb.init(project=config.wandb, dir=config.output, config=config.model_dump(exclude_none=True)) as run:

        def log(row: dict[str, Any]) -> None:
            if scalars := _scalars(row):
                run.log(scalars, step=row["step"] + 1)

        yield log


def _scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a step; none for a message."""
    return {name: float(v) for name, v in row.items() if name != "step" and isinstance(v, int | float)}
