#!/usr/bin/env python
"""Train one model with a cap on GPU memory: we first and last, and what else is installed in between.

    python scripts/bench_train.py                                        # 4.3 B parameters, 16 x 2048 tokens, 24 GiB
    python scripts/bench_train.py --systems ours,roundpipe --global-batch 4 --json small.json
    python scripts/bench_train.py --check --systems ours                 # and our losses against a plain reference
    python scripts/bench_train.py --gpus 2 --layers 32 --global-batch 32
    python scripts/bench_train.py --gpus 2 --plan mobius=mobius.json --plan fine=fine.json --systems fine,mobius,fine

Every system runs in processes of its own, on the same model, initial weights, tokens and cap; what fails becomes a row
with an error. The compute ceiling is measured in the same run, before and after: every pass of an isolated layer, over
and over for long enough that the clocks are those of a long run, times the number of microbatches.

tokens/s, step     mean over the timed steps
HFU                operations with whole recompute, over those of a bf16 matrix product measured in the same run
of ceiling         compute ceiling over step time: of the forwards and recomputes that the plan has, of all for peers
GPU                most that PyTorch reserved; in use: on the whole device, contexts and all else too, sampled
host               sum of Pss over the processes, while it grows; taken: by how much available memory fell
exact              whether every step uses the weights of the step before (peers: by their documentation)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from folders import output_folder
from ours import ceiling_s, compute_ceiling, run_ours
from peers import CORES, PEERS, Work, reference
from watching import watch

from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.layout import Layout, Stage
from spipe.model import ModelSpec
from spipe.options import Options
from spipe.plan import AdamW, Plan, make_plan, relative_layer_costs

SYSTEMS = ("ours", *PEERS)
LEARNING_RATE = 1e-5
CHECK_LAYERS, CHECK_STEPS, CHECK_LEARNING_RATE = 4, 5, 1e-4
ROW = (
    "system", "tokens_per_s", "step_s", "step_times_s", "gpu_peak_bytes", "gpu_used_bytes", "host_peak_bytes",
    "host_taken_bytes", "exact", "hfu", "share_of_ceiling", "losses", "wall_s", "error",
)  # fmt: skip


def main() -> int:
    given = arguments()
    if given.worker:
        work_in_this_process(*given.worker)
    try:
        plans = plans_of(given)
        systems = systems_of(given, plans)
        if not plans or ("ours" in systems and "ours" not in plans):
            plans["ours"] = plan_of(given)
        with output_folder(given.output, "bench-train-") as folder:
            Benchmark(given, plans, systems, folder).run()
    except SpipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 20), ("hidden", 4096), ("ffn", 11008), ("heads", 32), ("vocabulary", 32000), ("sequence", 2048),
        ("microbatch", 2), ("global-batch", 16), ("gpus", 1), ("steps", 3), ("warmup", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--cap", type=float, default=24.0, help="GiB of memory on each GPU (default 24)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, in this order (default: %(default)s)")
    parser.add_argument("--hardware", help="our plan's hardware; default h200xN, laptop on the CPU")
    parser.add_argument("--plan", action="append", default=[], metavar="[NAME=]FILE", help="a plan of ours, and its "
                        "name in --systems (default: ours); may be repeated. Without any: a stage per block, or "
                        "what a search gives for several GPUs")  # fmt: skip
    parser.add_argument("--options", default="{}", help="JSON: options of our plan that differ from the defaults")
    parser.add_argument("--compile", action="store_true", help="our blocks go through torch.compile")
    parser.add_argument("--cuda-graphs", action="store_true", help="our blocks are recorded and replayed")
    parser.add_argument("--no-ceiling", action="store_true", help="do not measure the compute ceiling")
    parser.add_argument("--check", action="store_true", help="also train 4 layers and compare with a plain reference")
    parser.add_argument("--gaps", type=int, default=12, help="how many gaps of our compute lane to show (default 12)")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for each system (default 300)")
    parser.add_argument("--json", type=Path, help="write everything here, after every system")
    parser.add_argument("--output", type=Path, help="keep runs, traces and logs in this new folder")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if min(given.gpus, given.steps) < 1 or min(given.warmup, given.gaps) < 0 or min(given.cap, given.time_limit) <= 0:
        parser.error("--gpus and --steps start at 1, --warmup and --gaps at 0; --cap and --time-limit are positive")
    return given


def plans_of(given: argparse.Namespace) -> dict[str, Plan]:
    """The plans from files, by name."""
    plans: dict[str, Plan] = {}
    for text in given.plan:
        name, _, file = text.rpartition("=")
        name = name or "ours"
        if name in plans or name in PEERS:
            raise SpipeError(f"--plan {text}: {name!r} is taken; give every plan a name of its own, as in fine={file}")
        plans[name] = plan_of(given, file=file)
    return plans


def systems_of(given: argparse.Namespace, plans: Iterable[str] = ()) -> list[str]:
    """The systems in order. Where ``ours`` is among peers, it comes once more at the end."""
    known = ["ours", *PEERS, *(name for name in plans if name != "ours")]
    names = [name.strip() for name in given.systems.split(",")]
    for name in names:
        if name not in known:
            raise SpipeError(f"--systems has {name!r}; choose from {', '.join(known)}")
    if names.count("ours") == 1 and any(name in PEERS for name in names):
        names.remove("ours")
        names = ["ours", *names, "ours"]
    return names


# Our plan: it also tells the other systems model, batch, precision, optimizer and cap.


def plan_of(
    given: argparse.Namespace, num_layers: int | None = None, learning_rate: float = LEARNING_RATE,
    file: str | None = None,
) -> Plan:  # fmt: skip
    """The plan in a file, or for one GPU a stage per block, or the search's for several."""
    model = ModelSpec(
        name="bench", num_layers=num_layers or given.layers, hidden_size=given.hidden, ffn_size=given.ffn,
        num_heads=given.heads, vocab_size=given.vocabulary,
    )  # fmt: skip
    hardware = load_hardware(given.hardware or ("laptop" if given.device == "cpu" else f"h200x{given.gpus}"))
    hardware = hardware.override({"accelerator.memory_gib": given.cap})
    if hardware.device != given.device:
        raise SpipeError(f"--hardware {hardware.name} has device {hardware.device}, but --device is {given.device}")
    try:
        options = json.loads(given.options)
    except ValueError as error:
        raise SpipeError(f"--options {given.options!r} is not JSON ({error})") from None
    if not isinstance(options, dict):
        raise SpipeError(f"--options {given.options!r} should be a JSON object, such as '{{\"weight_slots\": 3}}'")
    optimizer = AdamW(learning_rate=learning_rate)
    if file is not None:
        plan = Plan.load(file)
        options = Options(**{**plan.options.model_dump(), **options})
        plan = plan.model_copy(update={"hardware": hardware, "optimizer": optimizer, "options": options})
        require_same_job(plan, model, given, file)
        return plan
    if given.global_batch % (given.microbatch * given.gpus):
        raise SpipeError(
            f"--global-batch {given.global_batch} should be a multiple of --microbatch {given.microbatch} times --gpus "
            f"{given.gpus}: some systems give every GPU whole microbatches"
        )
    fields = {
        "num_ranks": given.gpus, "global_batch": given.global_batch, "microbatch_size": given.microbatch,
        "sequence": given.sequence, "precision": "fp32" if given.device == "cpu" else "bf16", "optimizer": optimizer,
        "options": options, "compile_layers": given.compile, "cuda_graphs": given.cuda_graphs,
    }  # fmt: skip
    if given.gpus == 1 and given.device == "cuda":
        # The layers that the next step needs first need not travel, and stage inputs make room for them.
        fields["options"] = {"device_layers": 2, "stage_input_route": "host"} | options
    if given.gpus > 1:
        from spipe.sim import search

        return search(model, hardware, **fields).plan
    return make_plan(model, hardware, layout=stage_per_block(model, given.sequence), **fields)


def stage_per_block(model: ModelSpec, sequence: int) -> Layout:
    """A stage per block; the embedding goes with the first, the top one has two blocks and the head, as long as there
    are more. Forward runs only what is below the top stage."""
    layers = model.num_total_layers
    top = max(2, layers - 3)
    below = (Stage(0, 2, 0), *(Stage(i, i + 1, 0) for i in range(2, top)))
    return Layout(layers, 1, below, (*below, Stage(top, layers, 0)), tuple(relative_layer_costs(model, sequence)))


def require_same_job(plan: Plan, model: ModelSpec, given: argparse.Namespace, file: str) -> None:
    """Raises SpipeError unless a plan from a file is for what the other systems are told to train."""
    if plan.layout.num_ranks > given.gpus:
        raise SpipeError(f"{file}: the plan has {plan.layout.num_ranks} ranks, more than --gpus {given.gpus}")
    sizes = ("num_layers", "hidden_size", "ffn_size", "num_heads", "vocab_size")
    theirs = {name: getattr(plan.model, name) for name in sizes}
    theirs |= {"sequence": plan.sequence, "microbatch": plan.microbatch_size}
    asked = {name: getattr(model, name) for name in sizes}
    asked |= {"sequence": given.sequence, "microbatch": given.microbatch}
    theirs["global_batch"], asked["global_batch"] = plan.global_batch, given.global_batch
    wrong = [f"{name} = {theirs[name]} instead of {asked[name]}" for name in asked if theirs[name] != asked[name]]
    if wrong:
        raise SpipeError(f"{file}: the plan has {', '.join(wrong)}; give the same numbers to this script")


# The benchmark.


@dataclass
class Benchmark:
    """Starts one system after another and keeps what they measure."""

    given: argparse.Namespace
    plans: dict[str, Plan]
    systems: list[str]
    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    ceilings: list[dict[str, Any]] = field(default_factory=list)
    check: dict[str, Any] | None = None
    num_started: int = 0

    @property
    def plan(self) -> Plan:
        """The one that tells other systems model, batch, precision, optimizer and cap."""
        return max(self.plans.values(), key=lambda plan: plan.layout.num_ranks)

    def run(self) -> None:
        self.save()
        tokens = str(self.folder / "tokens.bin")
        values = np.random.default_rng(0).integers(0, min(2**16, self.given.vocabulary), 1 << 20, dtype=np.uint16)
        Path(tokens).write_bytes(values.tobytes())
        if self.given.check:
            self.check = self.checked()
        self.measure_ceiling(tokens)
        for name in self.systems:
            self.rows.append(self.row(name, tokens))
            self.save()
        self.measure_ceiling(tokens)
        self.save()
        print(table(self.rows, self.result()))

    def measure_ceiling(self, tokens: str) -> None:
        if not self.given.no_ceiling:
            self.ceilings.append(self.start("ceiling", self.plan, data=tokens))

    def start(self, name: str, plan: Plan, *, data: str | None = None, steps: int | None = None) -> dict[str, Any]:
        """Run a worker to its end; what it returns, or ``error``, and what was seen of it from outside."""
        self.num_started += 1
        stem = self.folder / f"{self.num_started}-{name}"
        plan_file, result_file, log_file = (stem.with_suffix(end) for end in (".plan.json", ".result.json", ".log"))
        plan.save(plan_file)
        work = Work(
            str(plan_file), steps or self.given.steps, 0 if steps else self.given.warmup, data, str(stem),
            self.given.gaps,
        )  # fmt: skip
        work.save(stem.with_suffix(".work.json"))
        begin = time.monotonic()
        result: dict[str, Any] = {"error": missing(name)}
        print(f"{time.strftime('%H:%M:%S')} {name}", end=" ", flush=True)
        if not result["error"]:
            worker = [__file__, "--worker", name, str(stem.with_suffix(".work.json")), str(result_file)]
            with open(log_file, "w") as log:
                process = subprocess.Popen(
                    [*launcher(name, self.given.gpus), *worker],
                    env=environment(name, self.given.gpus), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
                seen = watch(process, self.given.time_limit)
            result = result_of(process, result_file, log_file, seen.timed_out, self.given.time_limit)
            result |= {
                "gpu_used_bytes": seen.gpu_bytes, "host_peak_bytes": seen.host_bytes,
                "host_taken_bytes": seen.host_taken_bytes,
            }  # fmt: skip
        result["wall_s"] = time.monotonic() - begin
        print(f"took {result['wall_s']:.0f} s" + (f": {result['error']}" if result.get("error") else ""), flush=True)
        for line in result.pop("lines", []):
            print(line)
        return result

    def row(self, name: str, data: str) -> dict[str, Any]:
        result = self.start(name, self.plans.get(name, self.plan), data=data)
        row: dict[str, Any] = dict.fromkeys(ROW) | {"system": name, "exact": name not in PEERS or PEERS[name].exact}
        row |= result
        if not row["error"]:
            row["step_s"] = mean(row["step_times_s"])
            row["tokens_per_s"] = self.plan.tokens_per_step / row["step_s"]
        return row

    def checked(self) -> dict[str, Any]:
        """Our losses of some steps on a text, next to those of a plain reference: a row's fields and ``reference``."""
        plan = plan_of(self.given, CHECK_LAYERS, CHECK_LEARNING_RATE)
        ours, plain = (self.start(name, plan, steps=CHECK_STEPS) for name in ("ours", "reference"))
        check = {
            "layers": CHECK_LAYERS, "learning_rate": CHECK_LEARNING_RATE, "precision": plan.precision,
            "losses": ours.get("losses"), "reference": plain.get("losses"), "max_difference": None,
            "error": ours.get("error") or plain.get("error"),
        }  # fmt: skip
        if not check["error"]:
            pairs = list(zip(ours["losses"], plain["losses"], strict=True))
            check["max_difference"] = max(abs(a - b) for a, b in pairs)
            print("losses, ours and reference: " + ", ".join(f"{a:.4f} {b:.4f}" for a, b in pairs))
            print(f"largest difference {check['max_difference']:.2g}")
        return check

    def result(self) -> dict[str, Any]:
        """All that is known so far; what is relative to the ceilings is relative to their mean."""
        model, plan, gpus = self.plan.model, self.plan, self.given.gpus
        good = [ceiling for ceiling in self.ceilings if not ceiling.get("error")]
        if good:
            rate = mean(ceiling["matmul_flops_per_s"] for ceiling in good)
            forward = {
                kind: model.layer_forward_flops(kind, plan.global_batch, plan.sequence, causal=True)
                for kind in ("block", "head")
            }
            flops = 4 * model.num_layers * forward["block"] + 3 * forward["head"]
            for row in self.rows:
                if not row["error"]:
                    own = self.plans.get(row["system"])
                    used = own.layout.num_ranks if own else gpus
                    row["hfu"] = flops / row["step_s"] / used / rate
                    least_s = mean(ceiling_s(ceiling, own or plan, whole=not own) for ceiling in good)
                    row["share_of_ceiling"] = least_s / row["step_s"]
        return {
            "rows": self.rows,
            "machine": machine() | (good[0]["machine"] if good else {}),
            "ceiling": self.ceilings,
            "check": self.check,
            "command": sys.argv,
            "model": model.model_dump(mode="json") | {"parameters": model.num_parameters()},
            "tokens_per_step": plan.tokens_per_step,
            "cap_gib": self.given.cap,
            "gpus": gpus,
        }

    def save(self) -> None:
        if self.given.json:
            try:
                self.given.json.write_text(json.dumps(self.result(), indent=1) + "\n")
            except OSError as error:
                raise SpipeError(f"--json {self.given.json}: cannot write there ({error.strerror})") from None


def machine() -> dict[str, Any]:
    return {
        "host": platform.node(), "cores": CORES,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The rows in aligned columns, below what they were measured on."""

    def number(value: float | None, form: str, unit: float = 1) -> str:
        return "-" if value is None else format(value / unit, form)

    def cells(row: dict[str, Any]) -> list[str]:
        return [
            row["system"], number(row["tokens_per_s"], ",.0f"), number(row["step_s"], ".3f"), number(row["hfu"], ".3f"),
            number(row["share_of_ceiling"], ".3f"), number(row["gpu_peak_bytes"], ".1f", 2**30),
            number(row["gpu_used_bytes"], ".1f", 2**30), number(row["host_peak_bytes"], ".1f", 2**30),
            number(row["host_taken_bytes"], ".1f", 2**30), "yes" if row["exact"] else "no", row["error"] or "",
        ]  # fmt: skip

    titles = [
        "system",
        "tokens/s",
        "step s",
        "HFU",
        "of ceiling",
        "GPU GiB",
        "in use",
        "host GiB",
        "taken",
        "exact",
        "",
    ]
    lines = [titles, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles) - 1)]
    facts, model = about["machine"], about["model"]
    ceilings = [number(c.get("step_s"), ".3f") + " s" for c in about["ceiling"]]
    return "\n".join([
        f"\n{about['gpus']} x {facts.get('gpu', 'CPU')}, {facts['cores']} cores, torch {facts['torch']}, "
        f"{facts['date']}; {model['parameters'] / 1e9:.2f} B parameters, {about['tokens_per_step']:,} tokens a step, "
        f"cap {about['cap_gib']:g} GiB; compute ceiling {' and '.join(ceilings)} (before and after)",
        *(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:]), line[-1]]).rstrip()
            for line in lines
        ),
    ])  # fmt: skip


# Processes of a system, from outside.


def missing(name: str) -> str | None:
    package = PEERS[name].package if name in PEERS else "torch"
    return None if find_spec(package) else f"{package} is not installed"


def launcher(name: str, gpus: int) -> list[str]:
    if name not in PEERS or not PEERS[name].torchrun:
        return [sys.executable]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus), "--master-addr", "127.0.0.1",
        "--master-port", str(port),
    ]  # fmt: skip


def environment(name: str, gpus: int) -> dict[str, str]:
    """The first GPUs only; with a process per GPU, the cores are shared out among them."""
    result = dict(os.environ)
    visible = result.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    result["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:gpus])
    if name in PEERS and PEERS[name].torchrun:
        result["OMP_NUM_THREADS"] = str(max(1, CORES // gpus))
    return result


def result_of(process: subprocess.Popen[Any], file: Path, log: Path, timed_out: bool, limit_s: float) -> dict[str, Any]:
    """What the worker wrote, or why it could not; then the end of its log is shown."""
    if not timed_out:
        with suppress(OSError, ValueError):
            return dict(json.loads(file.read_text()))
    lines = log.read_text(errors="replace").splitlines()
    print("", *lines[-12:], sep="\n", file=sys.stderr)
    code = process.returncode
    if timed_out:
        why = f"not done after the time limit of {limit_s:g} s"
    elif code < 0:
        why = f"killed by {signal.Signals(-code).name}, perhaps for lack of memory"
    else:
        why = f"ended without a result, exit code {code}"
    named = [line.strip() for line in lines if "Error: " in line]  # of a thread, say, that its process waits for
    return {"error": f"{why} ({named[0][:200]})" if named else why}


# What runs in a process of its own.


def work_in_this_process(name: str, work_file: str, result_file: str) -> None:
    """Do the work, write the result, and leave whatever threads the system still has."""
    run = PEERS[name].run if name in PEERS else WORKERS.get(name, run_ours)
    try:
        result = run(Work.load(work_file))
    except Exception as error:
        traceback.print_exc()
        result = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    if os.environ.get("RANK", "0") == "0" or "error" in result:
        part = Path(f"{result_file}.{os.getpid()}")
        part.write_text(json.dumps(result))
        part.rename(result_file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit("error" in result)


WORKERS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "ours": run_ours,
    "ceiling": compute_ceiling,
    "reference": reference,
}


if __name__ == "__main__":
    sys.exit(main())
