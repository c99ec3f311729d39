"""Speed of the native CPU AdamW against the memory it runs on and against other implementations.

    python scripts/bench_adam.py [--quick] [--json FILE] [--sizes 1e6,1e7,...] [--threads 1,2,...] [--rounds N]

Every number is a median over rounds in which all contestants take turns on the same buffers; a ratio is the median of
the ratios inside the rounds. bf16 gradients and weights, fp32 master and moments: 28 bytes of traffic a parameter.

streams        reads gradient, master, moments and writes master, moments, half weight without arithmetic, best of
               plain stores, the weight past the caches, and everything past the caches
triad          STREAM triad, 12 bytes an element, best of plain stores and stores past the caches
fused, foreach torch AdamW on the fp32 tensors alone
passes         fused plus what torch needs for the same result: half to fp32 gradient, unscale and test for non-finite
               values, norm, half copy of the weight; compared with our step with the norm
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from spipe import _native as native

BYTES_PER_PARAMETER = 28
STREAMS = ("streams", "streams_weight_nt", "streams_nt")
TRIADS = ("triad", "triad_nt")
STEP = {"learning_rate": 1e-5, "gradient_scale": 0.5}
HYPERPARAMETERS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
Timer = Callable[[], float]
Times = dict[str, list[float]]


class Buffers:
    """One set of buffers that all contestants share, in huge pages, written first by all threads."""

    def __init__(self, count: int) -> None:
        def tensor(dtype: torch.dtype) -> torch.Tensor:
            memory = mmap.mmap(-1, max(count * dtype.itemsize, 1 << 21))
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=dtype, count=count)

        pattern = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
        self.gradient = _fill(tensor(torch.bfloat16), pattern * 2e-3)
        self.master = _fill(tensor(torch.float32), pattern.roll(7) * 0.02)
        self.first_moment = _fill(tensor(torch.float32), pattern.roll(77) * 2.3e-4)
        self.second_moment = _fill(tensor(torch.float32), 1e-6 * (1 + 0.3 * pattern.roll(777).clamp(-3, 3)))
        self.weight = _fill(tensor(torch.bfloat16), pattern.roll(7) * 0.02)
        self.gradient32 = _fill(tensor(torch.float32), pattern * 1e-3)

    def addresses(self) -> dict[str, int]:
        names = ("gradient", "master", "first_moment", "second_moment", "weight")
        return {name: getattr(self, name).data_ptr() for name in names}

    def parameters(self, counts: Sequence[int]) -> list[native.Parameter]:
        """The first ``sum(counts)`` elements as parameters of these sizes, one behind the other."""
        result, first = [], 0
        for count in counts:
            at = {name: address + first * (2 if name in ("gradient", "weight") else 4)
                  for name, address in self.addresses().items()}  # fmt: skip
            result.append(native.Parameter(gradient_dtype="bf16", weight_dtype="bf16", count=count, weight_decay=0.1,
                                           **at))  # fmt: skip
            first += count
        return result


def _fill(tensor: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    pattern = pattern.to(tensor.dtype)
    for first in range(0, tensor.numel(), pattern.numel()):
        part = tensor[first : first + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    return tensor


class OurStep:
    """Steps of one bucket with the native optimizer; calling it takes one step, and settles it, and returns the seconds
    of the step."""

    def __init__(self, threads: native.WorkerPool, parameters: list[native.Parameter], rollback: str | None = None,
                 **options: Any) -> None:  # fmt: skip
        keywords = {} if rollback is None else {"rollback": rollback}
        self.optimizer = native.Optimizer(threads, **HYPERPARAMETERS, **keywords)
        self.bucket = self.optimizer.add_bucket(parameters)
        self.options = STEP | options | {"speculative": rollback is not None}
        self.steps = 10
        self.submit_s: list[float] = []

    def __call__(self) -> float:
        seconds = self.step()
        if self.options["speculative"]:
            self.optimizer.commit(self.bucket)
        return seconds

    def settling(self, action: str) -> Timer:
        """Takes a step and returns the seconds of its ``commit`` or ``rollback`` alone."""
        settle = timed(lambda: getattr(self.optimizer, action)(self.bucket))

        def run() -> float:
            self.step()
            return settle()

        return run

    def step(self) -> float:
        self.steps += 1
        start = time.perf_counter()
        self.optimizer.submit(self.bucket, step=self.steps, **self.options)
        submitted = time.perf_counter()
        self.optimizer.join(self.bucket)
        end = time.perf_counter()
        self.submit_s.append(submitted - start)
        return end - start


def timed(function: Callable[[], object]) -> Timer:
    def run() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return run


def torch_contestants(buffers: Buffers, count: int, with_foreach: bool) -> dict[str, Timer]:
    b = buffers
    master, gradient32 = b.master[:count], b.gradient32[:count]
    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient32

    def adamw(**kind: bool) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW([parameter], lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, **kind)
        optimizer.state[parameter] = {"step": torch.tensor(10.0), "exp_avg": b.first_moment[:count],
                                      "exp_avg_sq": b.second_moment[:count]}  # fmt: skip
        return optimizer

    fused = adamw(fused=True)
    found, inverse_scale = torch.zeros(1), torch.full((1,), 0.5)

    def passes() -> None:
        gradient32.copy_(b.gradient[:count])
        torch._amp_foreach_non_finite_check_and_unscale_([gradient32], found, inverse_scale)
        torch.linalg.vector_norm(gradient32)
        fused.step()
        b.weight[:count].copy_(master)

    contestants: dict[str, Timer] = {"fused": timed(fused.step), "passes": timed(passes)}
    if with_foreach:
        contestants["foreach"] = timed(adamw(foreach=True).step)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        theirs = DeepSpeedCPUAdam([parameter], lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
                                  adamw_mode=True)  # fmt: skip
        theirs.state[parameter] = {"step": 10, "exp_avg": b.first_moment[:count],
                                   "exp_avg_sq": b.second_moment[:count]}  # fmt: skip
        contestants["deepspeed"] = timed(theirs.step)
    except Exception as error:  # not installed, or its compiler run failed: the benchmark goes on without it
        if not isinstance(error, ImportError):
            print(f"DeepSpeed is installed but does not work here: {error}", file=sys.stderr)
    return contestants


def take_turns(contestants: dict[str, Timer], rounds: int, repeats: int) -> Times:
    """Seconds of each contestant in each round, ``repeats`` runs a round (their mean); one round more to warm up."""
    times: Times = {name: [] for name in contestants}
    order = list(contestants)
    for round_number in range(rounds + 1):
        for name in order:
            time.sleep(0.005)  # OpenMP threads of the contestant before stop spinning
            seconds = sum(contestants[name]() for _ in range(repeats)) / repeats
            if round_number > 0:
                times[name].append(seconds)
        order = order[1:] + order[:1]
    return times


def best_of(times: Times, names: Sequence[str]) -> str:
    return min(names, key=lambda name: statistics.median(times[name]))


def speedup(times: Times, ours: str, theirs: str) -> float:
    """How many times faster ``ours`` is than ``theirs``: median over the rounds."""
    return statistics.median(b / a for a, b in zip(times[ours], times[theirs], strict=True))


def spread(seconds: list[float]) -> float:
    """Distance of the quartiles, relative to the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def measure(buffers: Buffers, count: int, num_threads: int, rounds: int, with_foreach: bool) -> dict[str, Any]:
    """One case: all contestants on the first ``count`` elements with ``num_threads`` threads."""
    pool = native.WorkerPool(num_threads)
    torch.set_num_threads(num_threads)
    parameters = buffers.parameters([count])
    ours = OurStep(pool, parameters)
    delta = OurStep(pool, parameters, "delta")
    contestants: dict[str, Timer] = {
        "ours": ours,
        "ours_norm": OurStep(pool, parameters, statistics=True),
        "delta": delta,
        "snapshot": OurStep(pool, parameters, "snapshot"),
    }
    streams = buffers.addresses() | {"destination": buffers.gradient32.data_ptr(), "count": count // 64 * 64}
    for name in STREAMS + TRIADS:
        contestants[name] = timed(lambda name=name: native._run_streams(pool, name, **streams))
    contestants |= torch_contestants(buffers, count, with_foreach)
    times = take_turns(contestants, rounds, max(1, 20_000_000 // count))
    best_streams, best_triad = best_of(times, STREAMS), best_of(times, TRIADS)
    our_seconds = statistics.median(times["ours"])
    rates = {name: count / statistics.median(seconds) for name, seconds in times.items()}
    return {
        "count": count,
        "threads": num_threads,
        "params_per_s": rates["ours"],
        "bytes_per_s": rates["ours"] * BYTES_PER_PARAMETER,
        "spread": spread(times["ours"]),
        "ratio_to_same_streams": speedup(times, "ours", best_streams),
        "ratio_to_triad": speedup(times, "ours", best_triad) * BYTES_PER_PARAMETER / 12,
        "ratio_to_torch_fused": speedup(times, "ours", "fused"),
        "ratio_to_torch_passes": speedup(times, "ours_norm", "passes"),
        "ratio_to_torch_foreach": speedup(times, "ours", "foreach") if with_foreach else None,
        "ratio_to_deepspeed": speedup(times, "ours", "deepspeed") if "deepspeed" in times else None,
        "delta_overhead": speedup(times, "delta", "ours") ** -1 - 1,
        "delta_bytes_per_param": delta.optimizer.undo_bytes / count,
        "snapshot_overhead": speedup(times, "snapshot", "ours") ** -1 - 1,
        "norm_overhead": speedup(times, "ours_norm", "ours") ** -1 - 1,
        "submit_s": statistics.median(ours.submit_s),
        "seconds": our_seconds,
        "best_streams": best_streams,
        "best_triad": best_triad,
        "params_per_s_of": rates,
        "spread_of": {name: spread(seconds) for name, seconds in times.items()},
    }


def measure_many_tensors(buffers: Buffers, num_threads: int, rounds: int) -> dict[str, Any]:
    """A stage of 10,000 tensors of 1,000 elements against one tensor of 10^7."""
    pool = native.WorkerPool(num_threads)
    many = OurStep(pool, buffers.parameters([1000] * 10_000))
    times = take_turns({"one": OurStep(pool, buffers.parameters([10_000_000])), "many": many}, rounds, 3)
    return {"threads": num_threads, "many_tensors_ratio": speedup(times, "many", "one"),
            "submit_s": statistics.median(many.submit_s)}  # fmt: skip


def measure_settling(buffers: Buffers, count: int, num_threads: int, rounds: int) -> dict[str, Any]:
    """Commit and rollback of a step by kind of undoing, and what a rollback moves: state and weight, undo data (and for
    the undo log the gradient)."""
    pool = native.WorkerPool(num_threads)
    steps = {kind: OurStep(pool, buffers.parameters([count]), kind) for kind in ("delta", "snapshot", "defer")}
    contestants: dict[str, Timer] = {"step": OurStep(pool, buffers.parameters([count]))}
    for kind, step in steps.items():
        contestants |= {f"{kind} {action}": step.settling(action) for action in ("commit", "rollback")}
    times = take_turns(contestants, rounds, 1)
    seconds = {name: statistics.median(values) for name, values in times.items()}
    moved = {kind: 26 + 2 * (kind == "delta") + step.optimizer.undo_bytes / count for kind, step in steps.items()}
    return {
        "count": count,
        "threads": num_threads,
        "step_s": seconds["step"],
        "commit_s": {kind: seconds[f"{kind} commit"] for kind in steps},
        "rollback_s": {kind: seconds[f"{kind} rollback"] for kind in steps},
        "rollback_bytes_per_s": {
            kind: moved[kind] * count / seconds[f"{kind} rollback"] for kind in ("delta", "snapshot")
        },
    }


def measure_variants(buffers: Buffers, count: int, num_threads: int, rounds: int) -> list[dict[str, Any]]:
    """The same step with other kinds of stores, prefetch distances and sizes of a worker's share."""
    pool = native.WorkerPool(num_threads)
    choices = [(stores, ahead, 16) for stores in ("plain", "weight", "all") for ahead in (0, 256, 512, 1024, 2048)]
    choices += [("weight", 512, blocks) for blocks in (1, 4, 64)]

    def contestant(stores: str, ahead: int, blocks: int) -> Timer:
        native._set_tuning(stores=stores, prefetch_elements=ahead, chunk_blocks=blocks)
        step = OurStep(pool, buffers.parameters([count]))  # the bucket keeps its size of a worker's share

        def run() -> float:
            native._set_tuning(stores=stores, prefetch_elements=ahead, chunk_blocks=blocks)
            return step()

        return run

    times = take_turns({" ".join(map(str, c)): contestant(*c) for c in choices}, rounds, max(1, 20_000_000 // count))
    native._set_tuning()
    return [{"stores": stores, "prefetch_elements": ahead, "chunk_blocks": blocks, "count": count,
             "params_per_s": count / statistics.median(times[f"{stores} {ahead} {blocks}"])}
            for stores, ahead, blocks in choices]  # fmt: skip


def measure_real_training(steps: int = 40) -> dict[str, Any]:
    """Undo bytes a parameter on the gradients of a small language model that learns this interpreter's own sources."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("a*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
    layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = torch.nn.Sequential(
        torch.nn.Embedding(256, 128), layers, torch.nn.LayerNorm(128), torch.nn.Linear(128, 256)
    )
    weights = list(model.parameters())
    states = [[w.detach().clone(), torch.zeros_like(w), torch.zeros_like(w)] for w in weights]
    gradients = [torch.zeros_like(w, dtype=torch.bfloat16) for w in weights]
    halves = [w.detach().to(torch.bfloat16) for w in weights]
    native_parameters = [
        native.Parameter(gradient=g.data_ptr(), gradient_dtype="bf16", weight=h.data_ptr(), weight_dtype="bf16",
                         master=s[0].data_ptr(), first_moment=s[1].data_ptr(), second_moment=s[2].data_ptr(),
                         count=g.numel(), weight_decay=0.1)
        for g, h, s in zip(gradients, halves, states, strict=True)
    ]  # fmt: skip
    optimizer = native.Optimizer(native.WorkerPool(1), **HYPERPARAMETERS, rollback="delta")
    bucket = optimizer.add_bucket(native_parameters)
    count = sum(w.numel() for w in weights)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(64)
    bytes_per_param, losses = {}, []
    for step in range(1, steps + 1):
        at = torch.randint(len(tokens) - 65, (16,))
        batch = torch.stack([tokens[i : i + 65] for i in at])
        hidden = model[1](model[0](batch[:, :-1]), mask=mask)
        loss = torch.nn.functional.cross_entropy(model[3](model[2](hidden)).flatten(0, 1), batch[:, 1:].flatten())
        for gradient, value in zip(gradients, torch.autograd.grad(loss, weights), strict=True):
            gradient.copy_(value)
        optimizer.submit(bucket, step=step, learning_rate=1e-3, speculative=True)
        optimizer.join(bucket)
        bytes_per_param[step] = optimizer.logged_bytes(bucket) / count
        optimizer.commit(bucket)
        with torch.no_grad():
            for weight, half in zip(weights, halves, strict=True):
                weight.copy_(half)
        losses.append(loss.item())
    return {"parameters": count, "steps": steps, "first_loss": losses[0], "last_loss": losses[-1],
            "delta_bytes_per_param": max(bytes_per_param.values()), "by_step": bytes_per_param}  # fmt: skip


def host() -> dict[str, Any]:
    model = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    return {"name": platform.node(), "cpu": model[0] if model else platform.machine(), "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "torch": torch.__version__, "python": platform.python_version(), **native.features()}  # fmt: skip


def print_table(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    cells = [list(columns), *([_cell(row.get(key)) for key in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |")
        if line is cells[0]:
            print("|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"
    return f"{value:.0e}".replace("e+0", "e") if isinstance(value, int) and value >= 10_000 else str(value)


COLUMNS = {"parameters": "count", "threads": "threads", "G param/s": "rate", "GB/s": "gigabytes", "spread": "spread",
           "/streams": "ratio_to_same_streams", "/triad": "ratio_to_triad", "/fused": "ratio_to_torch_fused",
           "/passes": "ratio_to_torch_passes", "/foreach": "ratio_to_torch_foreach", "/DeepSpeed": "ratio_to_deepspeed",
           "delta": "delta_overhead", "snapshot": "snapshot_overhead", "norm": "norm_overhead",
           "submit µs": "submit_us"}  # fmt: skip


def thread_counts(usable: int) -> list[int]:
    return sorted({2**i for i in range(int(math.log2(usable)) + 1)} | {usable})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sizes up to 3e7 and few rounds: about a minute")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--sizes", help="comma-separated numbers of parameters")
    parser.add_argument("--threads", help="comma-separated numbers of threads")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--variants", action="store_true", help="also compare kinds of stores and prefetch distances")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    usable = native.features()["usable_cores"]
    sizes = [int(float(s)) for s in options.sizes.split(",")] if options.sizes else (
        [10**6, 10**7, 3 * 10**7] if options.quick else [10**6, 10**7, 10**8, 10**9])  # fmt: skip
    threads = [int(t) for t in options.threads.split(",")] if options.threads else thread_counts(usable)
    rounds = options.rounds or (5 if options.quick else 7)
    largest = max(sizes)
    buffers = Buffers(max(largest, 10_000_000))
    result: dict[str, Any] = {"host": host(), "threads": max(threads), "date": datetime.date.today().isoformat(),
                              "command": " ".join(["python", *sys.argv]), "cases": []}  # fmt: skip
    for count in sizes:
        # All numbers of threads on one size that exceeds the caches; every size with all of them.
        for num_threads in threads if count == min(largest, 10**8) else [max(threads)]:
            case = measure(buffers, count, num_threads, rounds, with_foreach=count <= 10**8)
            case |= {"rate": case["params_per_s"] / 1e9, "gigabytes": case["bytes_per_s"] / 1e9,
                     "submit_us": case["submit_s"] * 1e6}  # fmt: skip
            result["cases"].append(case)
            rates = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in case["params_per_s_of"].items())
            print(f"{count:.0e} parameters, {num_threads} threads, G/s: {rates}", flush=True)
    result["many_tensors"] = measure_many_tensors(buffers, max(threads), rounds)
    result["settling"] = measure_settling(buffers, min(largest, 10**8), max(threads), rounds)
    result["real_training"] = measure_real_training()
    if options.variants or not options.quick:
        result["variants"] = measure_variants(buffers, min(largest, 3 * 10**8), max(threads), rounds)
    real_bytes = result["real_training"]["delta_bytes_per_param"]
    result["summary"] = result["cases"][-1] | {"delta_bytes_per_param": real_bytes}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for variant in sorted(result.get("variants", []), key=lambda v: -v["params_per_s"]):
        print("stores {stores:6} prefetch {prefetch_elements:4} blocks {chunk_blocks:2}".format(**variant),
              f"{variant['params_per_s'] / 1e9:.3f} G/s")  # fmt: skip
    facts = result["host"]
    print(f"\n{facts['cpu']}, {usable} cores, {facts['instruction_set']}, torch {facts['torch']}, {result['date']}")
    print_table(result["cases"], COLUMNS)
    settling = result["settling"]
    for kind in ("delta", "snapshot", "defer"):
        commit, rollback = settling["commit_s"][kind], settling["rollback_s"][kind]
        rate = settling["rollback_bytes_per_s"].get(kind, 0.0) / 1e9
        print(f"{kind}: commit {commit * 1e6:.0f} µs, rollback {rollback * 1e6:.0f} µs, "
              f"{rollback / settling['step_s']:.2f} of a step{f', {rate:.1f} GB/s' if rate else ''}")  # fmt: skip
    many, real = result["many_tensors"], result["real_training"]
    print(f"10,000 tensors of 1,000: {many['many_tensors_ratio']:.2f} of one of 10^7; "
          f"submit {many['submit_s'] * 1e6:.0f} µs; undo log on real gradients: at most "
          f"{real['delta_bytes_per_param']:.2f} bytes a parameter")  # fmt: skip


if __name__ == "__main__":
    main()
