"""What a run leaves behind: metrics while it runs, trace and summary at its end. Written by rank 0."""

import json
import os
import platform
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count, takewhile
from math import fsum, inf, isnan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import spipe
from spipe import _native
from spipe.ops import RECVS, Kind
from spipe.program import Program
from spipe.runtime.job import Job
from spipe.runtime.settlement import Settlement
from spipe.runtime.store import DEVICE_ITEMS, NOTES, Store
from spipe.trace import WARM_UP_STEPS, Trace


class Reporter:
    """Writes a row of ``metrics.jsonl`` as each step is validated, and passes it on."""

    def __init__(
        self, job: Job, store: Store, settlement: Settlement, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.job, self.store, self.settlement, self.report = job, store, settlement, report
        self._thread = threading.Thread(target=self._follow, name="reporter", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the last row is written (or the run was aborted)."""
        self._thread.join()

    def _follow(self) -> None:
        flags, abort = self.store.flags, self.store.layout.abort
        try:
            self._write_rows()
        except _native.AbortedError:
            pass
        except Exception as error:
            self.store.write_error(0, f"rank 0, metrics of {self.job.output}: {error}")
            flags.abort(abort)

    def _write_rows(self) -> None:
        flags, abort = self.store.flags, self.store.layout.abort
        session, path = self.settlement.session, self.job.output / "metrics.jsonl"
        kept = rows_before(path, self.job.start.step) if self.job.continues_run else []
        new = path.with_suffix(".jsonl.part")
        new.write_text("".join(kept))
        os.replace(new, path)
        with open(path, "a", buffering=1) as file:
            for step in takewhile(lambda step: step < session.last, count()):
                flags.wait(self.settlement.validate_op, step + 1, inf, abort)
                if session.evaluates_after(step):
                    session.wait_evaluated(step + 1)
                row = metrics_row(self.job, self.store, self.settlement, step)
                file.write(json.dumps(row) + "\n")
                self.report(row)
                if row["skipped"]:
                    self.report({"message": skipped_message(self.settlement, step)})


def rows_before(path: Path, first_step: int) -> list[str]:
    """The lines of a ``metrics.jsonl`` about steps before ``first_step``."""
    try:
        lines = path.read_text().splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < first_step]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def evaluation_row(job: Job, step: int) -> int:
    """The row of ``store.evaluations`` for the evaluation before ``step`` (counted from the start of the run)."""
    assert job.evaluate_every is not None
    return -(-(job.start.step + step) // job.evaluate_every) - job.start.step // job.evaluate_every


def metrics_row(job: Job, store: Store, settlement: Settlement, step: int) -> dict[str, Any]:
    """One step's metrics, as they stand in ``metrics.jsonl``; a non-finite loss or norm is null."""
    step_s = float(store.step_ends[step + 1, 0] - store.step_ends[step, 0])
    verdict, loss = settlement.verdicts[step], float(store.losses[step])
    num_updates = settlement.scaling[step].num_updates
    row = {
        "step": job.start.step + step,
        "loss": _finite(loss),
        "step_s": step_s,
        "tokens_per_s": job.plan.tokens_per_step / step_s,
        "loss_scale": settlement.scaling[step].loss_scale,
        "skipped": verdict.overflow,
        "gradient_norm": _finite(verdict.gradient_norm),
        "clipping": verdict.clipping,
        "learning_rate": job.plan.optimizer.learning_rate_of(num_updates),
        "device_peak_bytes": int(store.in_use[:, 0].max()),
        "host_bytes": int(store.in_use[:, 1].sum()) + store.layout.num_bytes,
    }
    if settlement.session.evaluates_after(step):
        losses = store.evaluations[evaluation_row(job, step + 1)]
        row["validation_loss"] = _finite(fsum(losses) / len(losses))
    return row


def skipped_message(settlement: Settlement, step: int) -> str:
    """The log line about a step that changed nothing."""
    before, after = settlement.scaling[step].loss_scale, settlement.scaling[step + 1].loss_scale
    what = f"loss scale {before:g} -> {after:g}" if before != after else f"loss scale stays {after:g}"
    step += settlement.session.start.step
    return f"step {step}: a gradient is not finite; weights and optimizer state are unchanged, {what}"


def _finite(value: float) -> float | None:
    return None if isnan(value) or abs(value) == inf else value


def write_results(job: Job, store: Store, settlement: Settlement, about: dict[str, Any]) -> None:
    """``trace.json`` and ``result.json``; the latter comes last, so a run that has one is complete."""
    program = job.plan.program()
    num_steps, session = settlement.session.last, settlement.session
    trace = measured_trace(program, store, job.traced_from, num_steps)
    trace.metadata |= {"plan": job.plan.digest(), "device": about["device"], "transport": about["transport"]}
    trace.metadata["usable_cores"] = _native.features()["usable_cores"]
    trace.save(job.output / "trace.json")
    rows = [metrics_row(job, store, settlement, step) for step in range(num_steps)]
    times = [row["step_s"] for row in rows]
    counted = times[WARM_UP_STEPS:] or times
    result = {
        "steps": num_steps,
        "first_step": job.start.step,
        "stopped": session.stopped,
        "losses": [row["loss"] for row in rows],
        "step_s": times,
        "median_step_s": median(counted),
        "median_tokens_per_s": job.plan.tokens_per_step / median(counted),
        "measured_steps": len(counted),
        "skipped_steps": [row["step"] for row in rows if row["skipped"]],
        "clipped_steps": [row["step"] for row in rows if row["clipping"] != 1.0],
        "validation_losses": {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row},
        "loss_scale": settlement.scaling[num_steps].loss_scale,
        "num_updates": settlement.scaling[num_steps].num_updates,
        "num_ranks": job.num_ranks,
        "peak_device_bytes": [int(peak) for peak in store.peaks[:, 0]],
        "peak_reserved_bytes": [int(peak) for peak in store.peaks[:, 2]],
        "peak_resident_bytes": [int(peak) for peak in store.peaks[:, 1]],
        "device_items_bytes": [dict(zip(DEVICE_ITEMS, map(int, row), strict=True)) for row in store.items],
        "host_items_bytes": store.layout.table_of_bytes(),
        "host_planned_bytes": job.table_of_bytes(),
        "ops_per_step": {Kind(kind).name: n for kind, n in sorted(Counter(program.kind).items())},
        "traced_steps": [min(job.traced_from, num_steps), num_steps],
        "plan": job.plan.digest(),
        **about,
        "compute_threads": job.plan.compute_threads,
        "instruction_set": _native.features()["instruction_set"],
        "versions": {
            "spipe": spipe.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "host": platform.node(),
    }
    temporary = job.output / "result.json.part"
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, job.output / "result.json")


def measured_trace(program: Program, store: Store, first_step: int, num_steps: int) -> Trace:
    """All ranks' times on one clock. An op is ready when its last dependency ends (or when the job starts).

    Both halves of a message have the same start, when both sides were there, and the same end, when it had arrived; a
    collective has the start of its last rank.
    """
    trace = Trace.empty(program, "measured")
    origin = float(store.step_ends[0].max())
    collectives = [list(members) for members in program.collectives()]
    previous = None
    for offset, rows in enumerate(store.times[: max(num_steps - first_step, 0)]):
        step = first_step + offset
        start, end = rows[:, 0].copy(), rows[:, 1].copy()
        for i, partner in enumerate(program.partner):
            if partner > i:
                start[i] = start[partner] = max(start[i], start[partner])
                received = partner if program.kind[partner] in RECVS else i
                end[i] = end[partner] = max(end[received], start[i])
        for members in collectives:
            start[members] = start[members].max()
            end[members] = np.maximum(end[members], start[members])
        for i in range(len(program)):
            before = [end[d] for d in program.dependencies[i]]
            if previous is not None:
                before += [previous[d] for d in program.carried[i]]
            ready = min(max(before, default=min(origin, start[i])), start[i])
            trace.add(step, i, float(ready), float(start[i]), float(end[i]), float(rows[i, 2]))
            note = NOTES[int(rows[i, 3])]
            if note:
                trace.notes[step, i] = note
        previous = end
    return trace
