"""What `spipe run` shows while it trains."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    Raises SpipeError if TensorBoard is wanted and not installed.
    """
    logs: list[Log] = []
    writer = _tensorboard(Path(config.output) / "tensorboard") if config.tensorboard else None
    if writer is not None:
        logs.append(lambda row: _write_scalars(writer, row))
    if not sys.stderr.isatty():
        yield _all([*logs, step_log(config.steps)])
    else:
        with _bar(config.steps, plan) as log:
            yield _all([*logs, log])
    if writer is not None:
        writer.close()


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
    skipped = 0
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=steps)

        def log(row: dict[str, Any]) -> None:
            nonlocal skipped
            if "message" in row:
                bar.console.print(row["message"], highlight=False, markup=False)
                return
            skipped += row["skipped"]
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            words = [f"loss {loss}", f"{row['tokens_per_s']:.4g} tokens/s"]
            words.append(f"HFU {hardware_flops_utilization(plan, row['tokens_per_s']):.1%}")
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


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise SpipeError(
            "--tensorboard needs the package tensorboard, of the extra train: pip install tensorboard"
        ) from None
    progress(f"tensorboard --logdir {folder}")
    return SummaryWriter(folder)


def _write_scalars(writer: Any, row: dict[str, Any]) -> None:
    for name, value in row.items():
        if name not in ("step", "message") and isinstance(value, int | float):
            writer.add_scalar(name, float(value), row["step"] + 1)
