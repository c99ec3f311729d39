#!/usr/bin/env python
"""The walk of docs/train.md on this machine: a model folder, training, a signal, another number of ranks, export, text.

    python scripts/train_walk.py --device cuda --json walk.json     # 1.1 B parameters, ranks share what GPUs there are
    python scripts/train_walk.py --device cpu                       # a small model

Makes a folder as Hugging Face has it (random weights, in shards), trains it on the default text with two ranks, sends
SIGTERM in the middle, goes on with one rank and other cuts, and exports the result. Then it checks that

* a run that was never interrupted, on one rank, has the same losses to the bit (deterministic kernels; --no-straight
  leaves it out);
* every exported weight is the trained master, rounded;
* our forward pass over the exported folder has the validation loss that the run found;
* transformers, if it is installed, has the logits of our forward pass, both in fp32.

It needs no network, nor what only the commands of ``spipe`` need. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from folders import output_folder

import spipe
from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.memory import EVALUATION_BATCHES
from spipe.model import ModelSpec, from_huggingface, load_model
from spipe.plan import ELEMENT_BYTES, Plan, make_plan
from spipe.runtime import layers
from spipe.runtime.checkpoint import Checkpoint, export, find_checkpoint
from spipe.runtime.data import Corpus, ValidationFeed
from spipe.runtime.huggingface import ModelFolder, parameter_name, write_model
from spipe.runtime.sample import Sampler, generate

BILLION = ModelSpec(
    name="1b", num_layers=22, hidden_size=2048, ffn_size=5632, num_heads=32, num_kv_heads=4, vocab_size=32000,
    max_sequence=2048,
)  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"model": "1b", "steps": 24, "sequence": 1024, "global_batch": 16, "precision": "bf16"},
    "cpu": {"model": "tiny", "steps": 60, "sequence": 64, "global_batch": 8, "precision": "fp32"},
}
MICROBATCH, VALIDATION_FRACTION, LOGIT_TOKENS = 2, 0.05, 64
LOSS_TOLERANCE = {"bf16": 1e-2, "fp16": 1e-2, "fp32": 1e-4}
LOGIT_TOLERANCE = 1e-3
SHARDS = 3


class WalkError(Exception):
    """A part of the walk did not come to its end."""


def main() -> int:
    given = arguments()
    try:
        with output_folder(given.output, "train-walk-") as folder:
            report = Walk(given, folder).run()
    except (SpipeError, WalkError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(check["passed"] for check in report["checks"]) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="1b, or what spipe knows as a model (default: 1b on cuda, tiny on the CPU)")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--global-batch", type=int)
    parser.add_argument("--precision", choices=tuple(LOSS_TOLERANCE))
    parser.add_argument("--ranks", type=int, default=2, help="of the first part (default 2); the second has one")
    parser.add_argument("--no-straight", action="store_true", help="no run without interruption to compare with")
    parser.add_argument("--host-memory-gib", type=float, help="of this machine, if it shows less than it has")
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for each run (default 240)")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--output", type=Path, help="keep folders and logs in this new folder")
    given = parser.parse_args()
    for name, value in DEFAULTS[given.device].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


class Walk:
    """The parts in order; each is timed and leaves a row."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.model = BILLION if given.model == BILLION.name else load_model(given.model)

    def run(self) -> dict[str, Any]:
        given, run, model, trained = self.given, self.folder / "run", self.folder / "model", self.folder / "trained"
        print(f"{self.model.name}, {self.model.num_parameters() / 1e9:.3f} B parameters, {given.device}", flush=True)
        self.part("model folder", lambda: self.make_folder(model))
        first, second = self.plans(from_huggingface(model))
        (self.folder / "train.toml").write_text(self.configuration(model))
        self.part(f"train, {given.ranks} ranks, SIGTERM", lambda: self.train(first, run, interrupt=True))
        self.part("go on, 1 rank, to the end", lambda: self.train(second, run))
        if not given.no_straight:
            self.part("all steps at once, 1 rank", lambda: self.straight(second, run))
        self.part("export", lambda: self.export(run, trained))
        self.part("our forward pass", lambda: self.validate(second, run, trained))
        if find_spec("transformers"):
            self.part("transformers", lambda: self.transformers(trained))
        self.part("sample", lambda: self.sample(trained))
        return {"model": self.model.name, "parameters": self.model.num_parameters(), "device": given.device,
                "parts": self.rows, "checks": self.checks}  # fmt: skip

    def part(self, name: str, do: Callable[[], dict[str, Any]]) -> None:
        began = time.monotonic()
        found = do()
        row = {"part": name, "seconds": time.monotonic() - began, **found}
        self.rows.append(row)
        words = ", ".join(f"{key} {shown(value)}" for key, value in found.items())
        print(f"{name:28} {row['seconds']:6.1f} s  {words}", flush=True)

    def check(self, name: str, passed: bool, found: str) -> None:
        self.checks.append({"check": name, "passed": passed, "found": found})
        print(f"{'ok    ' if passed else 'FAILED'} {name}: {found}", flush=True)

    def make_folder(self, folder: Path) -> dict[str, Any]:
        """Random weights, sharded, in the precision of training."""
        kinds = [(i, self.model.layer_kind(i)) for i in range(self.model.num_total_layers)]
        places = {parameter_name(self.model, i, name): (i, name)
                  for i, kind in reversed(kinds) for name in self.model.parameter_shapes(kind)}  # fmt: skip
        threads = len(os.sched_getaffinity(0))

        def fill(name: str, out: torch.Tensor) -> None:
            value = torch.empty(out.shape)
            layers.initialize(self.model, 0, *places[name], value, threads)
            out.copy_(value)

        folder.mkdir()
        num_bytes = self.model.num_parameters() * ELEMENT_BYTES[self.given.precision]
        write_model(folder, self.model, self.given.precision, fill, shard_bytes=num_bytes // SHARDS)
        return {"GB": size_of(folder) / 1e9, "shards": len(list(folder.glob("*.safetensors")))}

    def plans(self, model: ModelSpec) -> tuple[Plan, Plan]:
        """For the first ranks, and for one with other cuts and another schedule."""
        given = self.given
        hardware = load_hardware("h200x2" if given.device == "cuda" else "laptop")

        def plan(**layout: Any) -> Plan:
            return make_plan(
                model, hardware, global_batch=given.global_batch, microbatch_size=MICROBATCH, sequence=given.sequence,
                precision=given.precision, deterministic=given.device == "cuda", **layout,
            )  # fmt: skip

        first = plan(num_ranks=given.ranks, forward_stages=1, backward_stages=2)
        return first, plan(num_ranks=1, forward_stages=3, backward_stages=3, schedule="mobius")

    def configuration(self, model: Path) -> str:
        given = self.given
        lines = [
            f'model_folder = "{model}"', f"steps = {given.steps}", f"total_steps = {given.steps}",
            f"validation_fraction = {VALIDATION_FRACTION}", f"evaluate_every = {given.steps}",
            'learning_rate = 3e-4', 'learning_rate_schedule = "cosine"', "warmup_steps = 5", "weight_decay = 0.1",
            "max_norm = 1.0", 'trace_steps = 1',
        ]  # fmt: skip
        if given.host_memory_gib:
            lines.append(f"host_memory_gib = {given.host_memory_gib}")
        return "\n".join(lines) + "\n"

    def train(self, plan: Plan, output: Path, *, interrupt: bool = False, saves: bool = True) -> dict[str, Any]:
        """Train in processes of their own, as ``spipe run`` does; ``interrupt``: SIGTERM after a quarter of the steps.

        Raises WalkError unless the run ends in order.
        """
        given, file = self.given, self.folder / f"plan-{plan.layout.num_ranks}.json"
        plan.save(file)
        command = [sys.executable, "-m", "spipe.runtime", str(file), "--config", str(self.folder / "train.toml")]
        command += ["-o", str(output)]
        if saves:
            command += ["--checkpoint-every", str(given.steps), "--keep", "1", "--resume", "auto"]
        root = str(Path(spipe.__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        environment["PYTHONUNBUFFERED"] = "1"
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        limit = threading.Timer(given.time_limit, process.kill)
        limit.start()
        said, sent = [], False
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            number = re.match(r"step (\d+):", line)
            if interrupt and not sent and number and int(number[1]) >= given.steps // 4:
                process.send_signal(signal.SIGTERM)
                sent = True
        code = process.wait()
        limit.cancel()
        (self.folder / f"{output.name}-{plan.layout.num_ranks}.log").write_text("".join(said))
        if code:
            raise WalkError(f"{' '.join(command)} ended with code {code}:\n{''.join(said[-20:])}")
        result = json.loads((output / "result.json").read_text())
        if interrupt and not result["stopped"]:
            raise WalkError(f"all {given.steps} steps were done before the signal came; give more --steps")
        found = {"steps": result["steps"], "first loss": result["losses"][0], "last loss": result["losses"][-1],
                 "s/step": median(result["step_s"][1:]), "start s": sum(result["startup_s"].values())}  # fmt: skip
        if given.device == "cuda":
            found["GPU GiB"] = max(result["peak_device_bytes"]) / 2**30
        found["host GiB"] = sum(result["host_planned_bytes"].values()) / 2**30
        if saved := re.findall(r"checkpoint of step \d+: .*, ([\d.]+) MB, ([\d.]+) s", "".join(said)):
            found |= {"checkpoint GB": float(saved[-1][0]) / 1e3, "written in s": float(saved[-1][1])}
        return found

    def straight(self, plan: Plan, run: Path) -> dict[str, Any]:
        """The same steps without an interruption and without checkpoints."""
        found = self.train(plan, self.folder / "straight", saves=False)
        losses = [[json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
                  for folder in (run, self.folder / "straight")]  # fmt: skip
        differing = [step for step, (one, other) in enumerate(zip(*losses, strict=True)) if one != other]
        self.check(
            "losses of all steps, interrupted or not", not differing,
            f"{len(losses[0])} equal to the bit" if not differing else f"first different in step {differing[0]}",
        )  # fmt: skip
        return found

    def export(self, run: Path, target: Path) -> dict[str, Any]:
        export(run, target)
        masters, found = Checkpoint.load(find_checkpoint(run)).files(), ModelFolder(target, from_huggingface(target))
        different = []
        for name, file in found.files.items():
            weight = file.view(name)
            if not torch.equal(weight, masters[f"master.{name}"].view(f"master.{name}").to(weight.dtype)):
                different.append(name)
        self.check(
            "exported weights", not different,
            f"{len(found.files)} tensors equal to the masters, rounded" if not different else ", ".join(different[:5]),
        )  # fmt: skip
        return {"GB": size_of(target) / 1e9, "tensors": len(found.files)}

    def validate(self, plan: Plan, run: Path, folder: Path) -> dict[str, Any]:
        """The validation loss of the exported folder, every token of it in fp32."""
        _, text = Corpus.load().split(VALIDATION_FRACTION, plan.sequence)
        feed, sampler, losses = ValidationFeed(plan, text), Sampler(folder, self.given.device), []
        for number in range(EVALUATION_BATCHES):
            for inputs, labels in zip(*feed.tensors(0, number), strict=True):
                losses.append(F.cross_entropy(sampler.logits(inputs), labels).item())
        ours, trained = sum(losses) / len(losses), json.loads((run / "result.json").read_text())["validation_losses"]
        (theirs,) = trained.values()
        difference, tolerance = abs(ours - theirs), LOSS_TOLERANCE[self.given.precision]
        self.check(
            "validation loss, exported and in the run", difference <= tolerance,
            f"{ours:.5f} and {theirs:.5f}, apart by {difference:.1e} (at most {tolerance:g})",
        )  # fmt: skip
        return {"loss": ours, "loss in the run": theirs, "tokens": plan.sequence * len(losses)}

    def transformers(self, folder: Path) -> dict[str, Any]:
        """Logits of the exported folder; a package that cannot be imported here is no failure of the folder."""
        try:
            from transformers import AutoModelForCausalLM
        except Exception as error:
            return {"not there": str(error).splitlines()[0]}
        tokens = torch.from_numpy(Corpus.load().batch(0, 0, 1, LOGIT_TOKENS))[0, :-1]
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = theirs(tokens[None]).logits[0]
        difference = float((Sampler(folder).logits(tokens) - expected).abs().max())
        self.check(
            "logits, ours and transformers'", difference <= LOGIT_TOLERANCE,
            f"apart by {difference:.1e} at most (at most {LOGIT_TOLERANCE:g})",
        )  # fmt: skip
        return {"largest difference": difference}

    def sample(self, folder: Path) -> dict[str, Any]:
        began = time.monotonic()
        count = 24
        text = "".join(generate(folder, "The import statement", count, temperature=0.0, device=self.given.device))
        return {"s/token": (time.monotonic() - began) / count, "text": text}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


if __name__ == "__main__":
    sys.exit(main())
