"""What checkpoints, clipping, evaluations and traces cost a step: runs in turns, so that other load meets all alike.

    python scripts/bench_extras.py --json extras.json                                    # two CPU ranks, 200 s
    python scripts/bench_extras.py --hardware h200x1 --ranks 1 --model qwen3-1.7b --sequence 1024 --seconds 400

A round has one run of every kind, in an order that starts further on each time, between two runs without extras. Rounds
are repeated while the next one fits into --seconds; two are always done. A run's cost is its mean time per step,
after three steps of warm-up, over that of the two runs without; shown are medians and quartiles over the rounds.
Write rates are over the seconds from the first bucket of a checkpoint to its renaming, next to that of one file of the
same size, written and made durable alone.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.plan import Plan, make_plan
from spipe.runtime import RankProcesses, RunResult, run
from spipe.trace import WARM_UP_STEPS

CLIPPED = (0.0, 0.05, 0.5, 1.0)
VALIDATION_FRACTION = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--hardware", default="laptop")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backward-stages", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=43)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints, and evaluations")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--folder", type=Path, help="where runs are written; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS + options.every:
        parser.error(f"--steps {options.steps} should be above {WARM_UP_STEPS} + --every {options.every}")
    plan = make_plan(
        load_model(options.model),
        load_hardware(options.hardware),
        num_ranks=options.ranks,
        forward_stages=1,
        backward_stages=options.backward_stages,
        global_batch=options.global_batch,
        microbatch_size=2,
        sequence=options.sequence,
        precision=options.precision,
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as name, RankProcesses(options.ranks) as ranks:
        report = Bench(plan, options, Path(name), ranks).measure()
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


@dataclass
class Bench:
    """Runs of one plan, in turns."""

    plan: Plan
    options: argparse.Namespace
    folder: Path
    ranks: RankProcesses
    saves: list[tuple[float, float]] = field(default_factory=list)
    """Bytes and seconds of every checkpoint."""
    clipped: dict[float, list[float]] = field(default_factory=lambda: {share: [] for share in CLIPPED})
    """By the share of clipped steps that was aimed at: what it came to."""
    num_runs: int = 0

    def measure(self) -> dict[str, Any]:
        """Rounds of all kinds of runs; see the head of this file."""
        kinds = self.kinds(self.limits())
        costs: dict[str, list[float]] = {name: [] for name in kinds}
        bases: list[float] = []
        began, rounds = time.monotonic(), 0
        while rounds < 2 or (time.monotonic() - began) * (rounds + 1) / rounds < self.options.seconds:
            names = list(kinds)
            names = names[rounds % len(names) :] + names[: rounds % len(names)]
            before, *times, after = (step_s(go()) for go in [self.go, *(kinds[name] for name in names), self.go])
            base = (before + after) / 2
            bases.append(base)
            for name, seconds in zip(names, times, strict=True):
                costs[name].append(seconds / base - 1)
            rounds += 1
        size = self.saves[0][0]
        rates = [num_bytes / max(seconds, 0.005) for num_bytes, seconds in self.saves]
        disk = [disk_rate(self.folder, int(size)) for _ in range(5)]
        return {
            "model": self.plan.model.name,
            "hardware": self.plan.hardware.name,
            "ranks": self.options.ranks,
            "parameters": self.plan.model.num_parameters(),
            "rounds": rounds,
            "steps": self.options.steps,
            "step_s": spread(bases),
            "cost": {self.label(name): spread(values) for name, values in costs.items()},
            "checkpoint_bytes": size,
            "write_bytes_per_s": spread(rates),
            "disk_bytes_per_s": spread(disk),
            "share_of_disk": median(rates) / median(disk),
            "load": os.getloadavg()[0],
        }

    def go(self, max_norm: float | None = None, optimizer: str = "async", **more: Any) -> RunResult:
        """One run, by default without extras."""
        self.num_runs += 1
        plan = self.plan.replace(
            optimizer=self.plan.optimizer.replace(max_norm=max_norm), options={"optimizer": optimizer}
        )
        arguments = {"steps": self.options.steps, "trace_steps": 0, **more}
        return run(plan, output=self.folder / f"run{self.num_runs}", ranks=self.ranks, log=self.log, **arguments)

    def log(self, row: dict[str, Any]) -> None:
        if found := re.search(r", ([\d.]+) MB, ([\d.]+) s$", row.get("message", "")):
            self.saves.append((float(found[1]) * 1e6, float(found[2])))

    def limits(self) -> dict[float, float]:
        """The norm that about so many steps are above."""
        lines = (self.go(max_norm=1e9).output / "metrics.jsonl").read_text().splitlines()
        norms = sorted(json.loads(line)["gradient_norm"] for line in lines)
        return {share: {0.0: norms[-1] * 2, 1.0: norms[0] / 100}.get(share, norms[int((1 - share) * (len(norms) - 1))])
                for share in CLIPPED}  # fmt: skip

    def kinds(self, limits: dict[float, float]) -> dict[str, Callable[[], RunResult]]:
        every = self.options.every

        def clipping(share: float) -> RunResult:
            result = self.go(max_norm=limits[share])
            self.clipped[share].append(len(result.summary["clipped_steps"]) / self.options.steps)
            return result

        return {
            f"a checkpoint every {every} steps": lambda: self.go(checkpoint_every=every, keep=1),
            **{f"clipping {share}": lambda share=share: clipping(share) for share in CLIPPED},
            "synchronous optimizer, 5 % clipped": lambda: self.go(max_norm=limits[0.05], optimizer="sync"),
            f"an evaluation every {every} steps": lambda: self.go(
                evaluate_every=every, validation_fraction=VALIDATION_FRACTION
            ),
            "a trace of all steps": lambda: self.go(trace_steps=self.options.steps),
        }

    def label(self, name: str) -> str:
        """The name, with the share of steps that really were clipped."""
        if not name.startswith("clipping "):
            return name
        return f"clipping, {mean(self.clipped[float(name.split()[1])]):.0%} of steps clipped"


def step_s(result: RunResult) -> float:
    return mean(result.step_s[WARM_UP_STEPS:])


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes per second of one file, written in pieces and made durable."""
    data = os.urandom(min(num_bytes, 32 << 20))
    start = time.monotonic()
    with open(folder / "file", "wb", buffering=0) as file:
        for first in range(0, num_bytes, len(data)):
            file.write(data[: num_bytes - first])
        os.fsync(file.fileno())
    seconds = time.monotonic() - start
    (folder / "file").unlink()
    return num_bytes / seconds


def spread(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "low": low, "high": high}


def table(report: dict[str, Any]) -> str:
    """The report as text."""

    def row(what: str, value: dict[str, float], form: str, unit: float = 1.0) -> str:
        return f"{what:36}" + "".join(f"{form.format(value[key] / unit):>16}" for key in ("median", "low", "high"))

    lines = [
        f"{report['model']} on {report['hardware']}, {report['ranks']} ranks, {report['rounds']} rounds of "
        f"{report['steps']} steps",
        f"{'':36}" + "".join(f"{name:>16}" for name in ("median", "lower quartile", "upper quartile")),
        row("step, without extras", report["step_s"], "{:.1f} ms", 1e-3),
        *(row(name, cost, "{:+.1%}") for name, cost in report["cost"].items()),
        row("writing a checkpoint", report["write_bytes_per_s"], "{:.0f} MB/s", 1e6),
        row("the disk, one file", report["disk_bytes_per_s"], "{:.0f} MB/s", 1e6),
        f"checkpoints are written at {report['share_of_disk']:.0%} of the disk's rate; one has "
        f"{report['checkpoint_bytes'] / 1e6:.1f} MB, {report['parameters'] / 1e6:.2f} M parameters; load of the "
        f"machine at the end {report['load']:.1f}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
