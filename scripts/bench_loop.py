#!/usr/bin/env python
"""The closed loop: profile this machine, calibrate on one run, predict other plans, run them, and compare.

    python scripts/bench_loop.py --device cuda --json loop.json      # one GPU of more than 24 GiB, about 5 minutes
    python scripts/bench_loop.py --device cpu --json loop.json       # CPU ranks, about 4 minutes

Predictions are written to disk before each run (``predictions.json`` of the output folder). On the CPU the experiment
is made in rounds, because virtual machines change their speed within seconds: each round calibrates on one run,
predicts and then runs all others; medians over the rounds count.

step      seconds of a step: predicted from the calibrated spec, its 90 % interval, and the median that was measured
GPU       most memory that the tensors of the fullest rank had at a time
host      most resident memory of the rank's process (one rank only: several share what they map)
order     share of pairs of plans, of one model and more than 3 % apart in time per token, that are predicted in order
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from folders import output_folder

from spipe import runtime, sim
from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.layout import Layout, Stage
from spipe.memory import memory
from spipe.model import ModelSpec, load_model
from spipe.plan import Plan, make_plan, relative_layer_costs
from spipe.runtime import RankProcesses, profiling
from spipe.runtime.job import Job
from spipe.sim.interval import interval
from spipe.sim.profiled import hardware_of, warnings_of
from spipe.trace import Trace

CAP_GIB, APART = 24.0, 0.03
STEPS = {"cuda": 9, "cpu": 14}
ROUNDS = {"cuda": 1, "cpu": 3}


def main() -> int:
    given = arguments()
    try:
        with output_folder(given.output, "bench-loop-") as folder:
            result = Loop(given, folder).run()
    except (SpipeError, runtime.RunFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(result))
    return 0 if given.most_error is None or result["summary"]["mean_error"] <= given.most_error else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--json", type=Path, help="write everything here, after every run")
    parser.add_argument("--output", type=Path, help="keep specs, predictions, plans and runs in this new folder")
    parser.add_argument("--plans", help="only these plans, by name, separated by semicolons")
    parser.add_argument("--steps", type=int, help="steps of a run; all but the first three count")
    parser.add_argument("--rounds", type=int, help="rounds of the experiment (default: 1 on cuda, 3 on cpu)")
    parser.add_argument("--effort", type=float, default=1.0, help="time spent on the profile, against the usual")
    parser.add_argument("--tiny", action="store_true", help="small models and few steps, to try this script itself")
    parser.add_argument("--most-error", type=float, help="end with 1 if the mean error of step times is larger")
    given = parser.parse_args()
    if given.steps is not None and given.steps < 6:
        parser.error("--steps starts at 6: three do not count, and a step time needs two more")
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds starts at 1")
    return given


# Plans: the first one calibrates, the others are judged.

Maker = Callable[[HardwareSpec], Plan]


def cuda_plans(tiny: bool) -> dict[str, Maker]:
    """One rank: models of 1, 2 and 4 B parameters, 2048 tokens a sequence."""
    shapes = {
        "1b": (22, 2048, 5632, 16), "2b": (26, 2560, 6912, 20), "4b": (20, 4096, 11008, 32),
    }  # fmt: skip
    sequence = 2048
    if tiny:
        shapes, sequence = {name: (4, 64 * k, 192, 4) for k, name in enumerate(shapes, 2)}, 128
    models = {
        name: ModelSpec(name=name, num_layers=n, hidden_size=h, ffn_size=f, num_heads=a, vocab_size=32000)
        for name, (n, h, f, a) in shapes.items()
    }
    held = {"device_layers": 2, "stage_input_route": "host"}

    def maker(model: str, size: int, batch: int, stages: str | tuple[int, int], schedule: str = "spipe",
              **options: Any) -> Maker:  # fmt: skip
        def make(hardware: HardwareSpec) -> Plan:
            chosen, fields = models[model], {}
            if stages == "blocks":
                fields["layout"] = stage_per_block(chosen, sequence)
            else:
                fields["forward_stages"], fields["backward_stages"] = stages
            return make_plan(
                chosen, hardware, num_ranks=1, schedule=schedule, global_batch=batch, microbatch_size=size,
                sequence=sequence, precision="bf16", cuda_graphs=True, options=options,
                optimizer={"learning_rate": 1e-5},  # without a warm-up, more throws the first steps off their course
                **fields,
            )  # fmt: skip

        return make

    cuts = (2, 3) if tiny else (5, 11)
    return {
        "calibrating: 1b": maker("1b", 4, 24, "blocks", **held),
        "1b, microbatches of 2": maker("1b", 2, 16, "blocks", **held),
        "1b, microbatches of 1": maker("1b", 1, 8, "blocks", **held),
        "1b, 5 and 11 stages, all on the host": maker("1b", 4, 32, cuts),
        "1b, mobius, 3 slots": maker("1b", 4, 16, (cuts[1], cuts[1]), "mobius", weight_slots=3),
        "1b, synchronous": maker("1b", 4, 16, cuts, optimizer="sync", barrier=True, reuse_weights=False),
        "2b": maker("2b", 2, 16, "blocks", **held),
        "4b": maker("4b", 2, 16, "blocks", **held),
    }


def stage_per_block(model: ModelSpec, sequence: int) -> Layout:
    """A stage per block; the embedding goes with the first, the head has one of its own."""
    last = model.num_layers
    blocks = [Stage(0, 2, 0), *(Stage(i, i + 1, 0) for i in range(2, last + 1))]
    costs = relative_layer_costs(model, sequence)
    return Layout(len(costs), 1, tuple(blocks), (*blocks, Stage(last + 1, last + 2, 0)), tuple(costs))


def cpu_plans(tiny: bool) -> dict[str, Maker]:
    """One to three ranks of small models; the first model is as wide as the second, but they differ in depth."""
    models = {
        "tiny": load_model("tiny"),
        "deep": load_model("tiny").replace(name="deep", num_layers=10),
        "wide": ModelSpec(name="wide", num_layers=6, hidden_size=192, ffn_size=512, num_heads=6, vocab_size=256),
    }

    def maker(model: str, ranks: int, schedule: str, stages: tuple[int, int], size: int, count: int,
              ends: tuple[float, float] = (0.0, 0.5), **options: Any) -> Maker:  # fmt: skip
        def make(hardware: HardwareSpec) -> Plan:
            chosen = models[model]
            return make_plan(
                chosen, hardware, num_ranks=ranks, schedule=schedule, forward_stages=stages[0],
                backward_stages=stages[1], microbatch_size=size, global_batch=size * count, sequence=128,
                precision="fp32", layer_costs=[ends[0], *[1.0] * chosen.num_layers, ends[1]], options=options,
            )  # fmt: skip

        return make

    found = {
        "calibrating: 2 ranks": maker("tiny", 2, "spipe", (1, 2), 2, 8),
        "mobius, 2 x 2 stages": maker("tiny", 2, "mobius", (2, 2), 4, 4),
        "1f1b, uneven": maker("tiny", 2, "1f1b", (1, 1), 2, 6, (0.0, 2.0)),
        "gpipe, uneven": maker("tiny", 2, "gpipe", (1, 1), 4, 4, (2.0, 0.0)),
        "one rank": maker("tiny", 1, "spipe", (1, 2), 2, 6),
        "wide": maker("wide", 2, "spipe", (1, 2), 2, 6),
        "deep, synchronous": maker("deep", 2, "spipe", (1, 3), 2, 6, optimizer="sync"),
        "three ranks": maker("tiny", 3, "spipe", (1, 1), 2, 6),
    }
    return dict(list(found.items())[:3]) if tiny else found


# The experiment.


@dataclass
class Loop:
    """Profiles, calibrates, predicts and runs; ``result`` is all that is known so far."""

    given: argparse.Namespace
    folder: Path
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        device, begin = self.given.device, time.monotonic()
        makers = cuda_plans(self.given.tiny) if device == "cuda" else cpu_plans(self.given.tiny)
        first, *others = makers
        if self.given.plans:
            wanted = [name.strip() for name in self.given.plans.split(";")]
            others = [name for name in others if name in wanted]
            if len(others) < len(wanted):
                raise SpipeError(f"--plans {self.given.plans}: choose from {'; '.join(list(makers)[1:])}")
        profiled = self.profile(makers.values())
        say(f"profile took {self.facts['profile_s']:.0f} s")
        plans = {name: makers[name](profiled) for name in (first, *others)}
        for name, plan in plans.items():
            memory(plan).require()
            self.rows[name] = {"plan": name, "used_for": "fit" if name == first else "judge", "rounds": []}
            self.rows[name] |= expected_memory(plan)
        ranks = max(plan.layout.num_ranks for plan in plans.values())
        with processes(device, ranks) as shared:
            for number in range(self.given.rounds or ROUNDS[device]):
                self.round(number, plans, first, profiled, shared)
        self.facts["together"] = self.together(plans, profiled)
        self.facts["elapsed_s"] = time.monotonic() - begin
        return self.save()

    def profile(self, makers: Sequence[Maker] | Any) -> HardwareSpec:
        """Profile the layers of every plan's model and microbatch, on the spec that says the least."""
        device, begin = self.given.device, time.monotonic()
        from spipe.hardware import load_hardware

        drafts = [make(load_hardware("h200x1" if device == "cuda" else "laptop")) for make in makers]
        shapes = list(dict.fromkeys((block_shape(p.model), p.microbatch_size, p.sequence, p.precision) for p in drafts))
        models = {block_shape(p.model): p.model for p in drafts}
        found = profiling.profile(
            [(models[shape], *rest) for shape, *rest in shapes], device=device, effort=self.given.effort,
            progress=lambda done, total, what: say(f"profile {done} of {total}: {what}"),
        )  # fmt: skip
        (self.folder / "profile.json").write_text(json.dumps(found.to_json()))
        spec = hardware_of(found, "here")
        if device == "cuda":
            spec = spec.override({"accelerator.memory_gib": min(CAP_GIB, spec.accelerator.memory_bytes / 2**30)})
        else:
            spec = spec.replace(ranks_per_host=max(spec.ranks_per_host, 4))
        spec.save(self.folder / "profile.toml")
        self.facts |= {
            "device": device, "machine": {k: v for k, v in found.machine.items() if k != "topology"},
            "profile_s": time.monotonic() - begin, "warnings": warnings_of(found), "command": sys.argv,
            "python": platform.python_version(),
        }  # fmt: skip
        for warning in self.facts["warnings"]:
            say(f"warning: {warning}")
        return spec

    def round(
        self, number: int, plans: dict[str, Plan], first: str, profiled: HardwareSpec, shared: RankProcesses | None
    ) -> None:
        calibrated: HardwareSpec | None = None
        for position, (name, plan) in enumerate(plans.items()):
            row: dict[str, Any] = {"profiled_s": sim.simulate(plan, hardware=profiled).step_s}
            if calibrated is not None:
                simulation = sim.simulate(plan, hardware=calibrated)
                found = interval(simulation)
                row["predicted_s"] = simulation.step_s
                row["interval_s"] = None if found is None else found.seconds
            with open(self.folder / "predictions.json", "a") as file:  # before the run
                file.write(json.dumps({"round": number, "plan": name, "time": time.time(), **row}) + "\n")
            output = self.folder / f"round-{number}-plan-{position}"
            begin = time.monotonic()
            say(f"round {number + 1}, {name}: predicted {row.get('predicted_s', row['profiled_s']):.4g} s", end=", ")
            try:
                row |= self.measure(plan, output, shared)
            except runtime.RunFailedError as error:
                if name == first or shared is not None:  # the shared processes are gone then
                    raise
                self.rows[name]["failure"] = str(error)
                say(f"failed: {error}")
                continue
            say(f"measured {row['measured_s']:.4g} s ({time.monotonic() - begin:.0f} s)")
            if name == first:
                calibration = sim.calibrate([(plan, Trace.load(output / "trace.json"))], profiled)
                calibrated = calibration.hardware
                calibrated.save(self.folder / f"calibrated-{number}.toml")
                row["predicted_s"] = calibration.runs[0]["predicted_s"]
                self.facts.setdefault("calibrations", []).append(calibration.to_json())
            self.rows[name]["rounds"].append(row)
            self.save()

    def together(self, plans: dict[str, Plan], profiled: HardwareSpec) -> dict[str, Any]:
        """A calibration with the runs of the last round, each of which is also predicted by a fit to others."""
        runs, names = [], []
        for name, plan in plans.items():
            for last in self.rows[name]["rounds"][-1:]:
                runs.append((plan, Trace.load(Path(last["output"]) / "trace.json")))
                names.append(name)
        found = sim.calibrate(runs, profiled, names=names)
        found.hardware.save(self.folder / "calibrated-together.toml")
        return {"held_out": found.held_out, "prediction_error": found.hardware.prediction_error,
                "warnings": found.warnings}  # fmt: skip

    def measure(self, plan: Plan, output: Path, shared: RankProcesses | None) -> dict[str, Any]:
        """What a run took; on the GPU it has processes of its own, whose memory is its own."""
        steps = self.given.steps or (7 if self.given.tiny else STEPS[plan.hardware.device])
        done = runtime.run(plan, steps=steps, output=output, data=self.tokens(), trace_steps=steps, ranks=shared)
        summary = done.summary
        alone = shared is None and plan.layout.num_ranks == 1
        return {
            "output": str(done.output),
            "measured_s": done.median_step_s,
            "step_s": done.step_s,
            "device_bytes": max(summary["peak_device_bytes"]) or None,
            "reserved_bytes": max(summary["peak_reserved_bytes"]) or None,
            "host_bytes": max(summary["peak_resident_bytes"]) if alone else None,
        }

    def tokens(self) -> Path:
        """Random bytes: every model here has at least 256 tokens."""
        path = self.folder / "tokens.npy"
        if not path.exists():
            np.save(path, np.random.default_rng(0).integers(0, 256, 1 << 19, dtype=np.uint16))
        return path

    def save(self) -> dict[str, Any]:
        rows = [summary_of(row) for row in self.rows.values()]
        result = {**self.facts, "rows": rows, "summary": summary(rows)}
        if self.given.json:
            self.given.json.write_text(json.dumps(result, indent=1) + "\n")
        return result


def block_shape(model: ModelSpec) -> tuple[int, ...]:
    """What the layers of models have to share to take the same time."""
    return model.hidden_size, model.ffn_size, model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size


@contextmanager
def processes(device: str, number: int) -> Iterator[RankProcesses | None]:
    if device == "cuda":
        yield None
        return
    with RankProcesses(number) as shared:
        yield shared


def expected_memory(plan: Plan) -> dict[str, Any]:
    report = memory(plan)
    host = sum(Job(plan, 1, Path("unused")).table_of_bytes().values())
    tokens = plan.tokens_per_step
    return {
        "model": plan.model.name, "tokens": tokens, "ranks": plan.layout.num_ranks,
        "parameters": plan.model.num_parameters(), "device_items": max(report.ranks, key=lambda x: sum(x.values())),
        "predicted_device_bytes": max(report.rank_bytes) if plan.hardware.device == "cuda" else None,
        "predicted_host_bytes": host if plan.layout.num_ranks == 1 else None,
    }  # fmt: skip


def summary_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its medians over the rounds, and errors relative to what was measured."""
    rounds = [each for each in row["rounds"] if "predicted_s" in each]
    made = dict(row)
    if not rounds:
        return made
    for key in ("profiled_s", "predicted_s", "measured_s"):
        made[key] = median(each[key] for each in rounds)
    made["error"] = made["predicted_s"] / made["measured_s"] - 1
    made["profiled_error"] = made["profiled_s"] / made["measured_s"] - 1
    spans = [each["interval_s"] for each in rounds if each.get("interval_s")]
    made["interval_s"] = [median(span[end] for span in spans) for end in (0, 1)] if spans else None
    for kind in ("device", "host"):
        seen = [each[f"{kind}_bytes"] for each in rounds if each[f"{kind}_bytes"]]
        made[f"{kind}_bytes"] = max(seen, default=None)
        expected = made[f"predicted_{kind}_bytes"]
        made[f"{kind}_error"] = expected / max(seen) - 1 if seen and expected else None
    return made


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over the judged plans."""
    judged = [row for row in rows if row["used_for"] == "judge" and "error" in row]
    if not judged:
        return {}
    spans = [row for row in judged if row["interval_s"]]
    pairs = [
        (a, b)
        for a, b in combinations([row for row in rows if "error" in row], 2)
        if a["model"] == b["model"] and abs(per_token(a, "measured_s") / per_token(b, "measured_s") - 1) > APART
    ]
    kept = [
        (per_token(a, "measured_s") < per_token(b, "measured_s"))
        == (per_token(a, "predicted_s") < per_token(b, "predicted_s"))
        for a, b in pairs
    ]
    found: dict[str, Any] = {
        "plans": len(judged),
        "mean_error": mean(abs(row["error"]) for row in judged),
        "max_error": max(abs(row["error"]) for row in judged),
        "mean_error_of_the_profile_alone": mean(abs(row["profiled_error"]) for row in judged),
        "in_interval": sum(row["interval_s"][0] <= row["measured_s"] <= row["interval_s"][1] for row in spans),
        "order_kept": sum(kept),
        "pairs": len(kept),
    }
    for kind in ("device", "host"):
        errors = [abs(row[f"{kind}_error"]) for row in rows if row.get(f"{kind}_error") is not None]
        found[f"max_{kind}_memory_error"] = max(errors, default=None)
    return found


def per_token(row: dict[str, Any], key: str) -> float:
    return float(row[key]) / float(row["tokens"])


def table(result: dict[str, Any]) -> str:
    """The rows in aligned columns."""

    def number(value: float | None, form: str, unit: float = 1.0) -> str:
        return "-" if value is None else format(value / unit, form)

    lines = [["plan", "for", "ranks", "profile", "predicted", "interval", "measured", "error", "GPU GiB", "error",
              "host GiB", "error"]]  # fmt: skip
    failures = [f"{row['plan']} failed: {row['failure']}" for row in result["rows"] if "failure" in row]
    for row in result["rows"]:
        if "error" not in row:
            continue
        span = row["interval_s"]
        lines.append([
            row["plan"], row["used_for"], str(row["ranks"]), number(row["profiled_s"], ".4f"),
            number(row["predicted_s"], ".4f"), "-" if span is None else f"{span[0]:.4f}-{span[1]:.4f}",
            number(row["measured_s"], ".4f"), f"{row['error']:+.1%}",
            number(row["device_bytes"], ".2f", 2**30), number(row["device_error"], "+.1%"),
            number(row["host_bytes"], ".1f", 2**30), number(row["host_error"], "+.1%"),
        ])  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    made = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    made += failures
    facts, found = result["machine"], result["summary"]
    if found:
        made.append(
            f"judged {found['plans']} plans: step time off by {found['mean_error']:.1%} on average, "
            f"{found['max_error']:.1%} at most (profile alone: {found['mean_error_of_the_profile_alone']:.1%}); "
            f"{found['in_interval']} inside their intervals; order kept in {found['order_kept']} of {found['pairs']} "
            "pairs"
        )
    left_out = result.get("together", {}).get("held_out")
    if left_out:
        error = mean(abs(row["error"]) for row in left_out)
        made.append(f"fitted to all runs but one fold, which is predicted: off by {error:.1%} on average")
    gpu = f", {facts['gpus'][0]['name']}" if facts["gpus"] else ""
    made.append(f"{facts['cpu']}, {facts['cores']} cores{gpu}, torch {facts['torch']}, {facts['date']}")
    return "\n" + "\n".join(made)


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


if __name__ == "__main__":
    sys.exit(main())
