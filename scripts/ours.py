"""Our side of ``bench_train.py``: a run with what its trace shows, and the ceiling that compute alone sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any

import torch
from peers import Work

from spipe import runtime
from spipe.memory import memory
from spipe.metrics import analyse
from spipe.ops import COMPUTE
from spipe.plan import Plan
from spipe.runtime import layers
from spipe.sim.cost import CostModel
from spipe.trace import Trace


def run_ours(work: Work) -> dict[str, Any]:
    plan = work.plan
    done = runtime.run(
        plan, steps=work.warmup + work.steps, output=work.output, data=work.data, trace_steps=2,
        log=lambda row: print(row, flush=True),
    )  # fmt: skip
    trace = Trace.load(done.output / "trace.json")
    step = max(trace.steps())
    metrics = analyse(plan.program(), trace, step)
    return {
        "step_times_s": done.step_s[work.warmup :],
        "losses": done.losses,
        "gpu_peak_bytes": max(done.summary["peak_reserved_bytes"]),
        "predicted_gpu_bytes": [sum(items.values()) for items in memory(plan).ranks],
        "gpu_in_use_bytes": done.summary["peak_device_bytes"],
        "startup_s": done.summary["startup_s"],
        "busy_s": list(metrics.busy_s),
        "bubbles": [{cause: value for cause, value in rank.items() if value} for rank in metrics.bubbles],
        "lines": gaps(trace, step, work.num_gaps) if work.num_gaps else [],
    }


def gaps(trace: Trace, step: int, number: int) -> list[str]:
    """Time by kind of op, and the largest idle intervals inside the step of every rank's compute lane."""
    kinds: dict[str, list[float]] = {}
    computed: dict[int, list[tuple[float, float, str]]] = {}
    compute = {kind.name for kind in COMPUTE}
    for row in range(len(trace)):
        if trace.step[row] == step:
            name, start_s, end_s = trace.names[trace.op[row]], trace.start_s[row], trace.end_s[row]
            kinds.setdefault(name.split()[0], []).append(end_s - start_s)
            if name.split()[0] in compute:
                computed.setdefault(trace.ranks[trace.op[row]], []).append((start_s, end_s, name))
    lines = [f"  {kind:20} {len(times):5} x {median(times) * 1e3:8.3f} ms, sum {sum(times):7.3f} s"
             for kind, times in sorted(kinds.items())]  # fmt: skip
    for rank, ops in sorted(computed.items()):
        ops.sort()
        idle = sorted(((b[0] - a[1], a[2], b[2]) for a, b in pairwise(ops)), reverse=True)
        total = sum(max(gap, 0) for gap, _, _ in idle)
        lines.append(
            f"  compute gaps of rank {rank} inside the step: {total * 1e3:.1f} ms in {len(idle)}; the largest:"
        )
        lines += [f"  {gap * 1e3:8.3f} ms between {before} and {after}" for gap, before, after in idle[:number]]
    return lines


def ceiling_s(times: Mapping[str, float], plan: Plan, *, whole: bool = False) -> float:
    """Seconds of a step's compute on each rank, from those of isolated passes (``compute_ceiling``).

    A plan leaves out the forward of what its top stage recomputes, and of a recompute what only its stage's output
    needs; ``whole``: nothing is left out, as other systems do.
    """
    model, layout = plan.model, plan.layout.layout()
    costs = CostModel.of(plan)
    blocks = [layer for layer in range(layout.num_layers) if model.layer_kind(layer) == "block"]
    forward = len(blocks) if whole else sum(layer in stage.layers for stage in layout.forward for layer in blocks)
    without_output = 0 if whole else sum(costs.unseen(stage.layers) > 0 for stage in layout.backward)
    microbatch_s = (
        forward * times["block_forward_s"]
        + without_output * times["block_recompute_and_backward_s"]
        + (len(blocks) - without_output) * times["block_whole_recompute_and_backward_s"]
        + times["head_s"]
    )
    return plan.num_microbatches * microbatch_s / layout.num_ranks


def compute_ceiling(work: Work) -> dict[str, Any]:
    """Seconds that the compute of a step takes when nothing else happens, and the rate of a matrix product."""
    plan, model, dtype = work.plan, work.plan.model, work.dtype
    device = torch.device("cuda" if work.on_gpu else "cpu")
    if not work.on_gpu:
        torch.set_num_threads(plan.compute_threads)
    rotary = layers.RotaryTable.build(model, plan.sequence, dtype, device)

    def parameters(layer: int) -> dict[str, torch.Tensor]:
        names = model.parameter_shapes(model.layer_kind(layer))
        return {name: work.initial(f"{layer}.{name}").to(device, dtype).requires_grad_() for name in names}

    tokens, labels = (part.to(device) for part in work.batch(0, 0))
    block, head = parameters(1), parameters(model.num_layers + 1)
    x = layers.embedding(parameters(0), tokens).detach().requires_grad_()
    gradient = torch.randn_like(x) / x.numel()
    square = torch.randn(8192 if work.on_gpu else 512, 8192 if work.on_gpu else 512, device=device).to(dtype)

    def forward() -> None:
        with torch.no_grad():
            layers.block(block, x, model, rotary)

    def recompute_and_backward(output: bool) -> None:  # gradients of parameters are accumulated, as in training
        layers.block(block, x, model, rotary, output=output).backward(gradient)
        x.grad = None

    def head_and_backward() -> None:
        layers.head(head, x, labels, model).backward()
        x.grad = None

    passes = {
        "block_forward_s": forward,
        "block_recompute_and_backward_s": partial(recompute_and_backward, False),
        "block_whole_recompute_and_backward_s": partial(recompute_and_backward, True),
        "head_s": head_and_backward,
        "matmul_s": lambda: square @ square,
    }
    times = {name: sustained(work_once, device) for name, work_once in passes.items()}
    facts = {"gpu": torch.cuda.get_device_name(), "num_gpus": torch.cuda.device_count()} if work.on_gpu else {}
    return {
        **times,
        "step_s": ceiling_s(times, plan),
        "matmul_flops_per_s": 2 * len(square) ** 3 / times["matmul_s"],
        "machine": facts,
        "lines": [
            "  " + ", ".join(f"{name.removesuffix('_s')} {time_s * 1e3:.2f} ms" for name, time_s in times.items())
        ],
    }


def sustained(work_once: Callable[[], object], device: torch.device) -> float:
    """Seconds of one of many calls in a row, issued ahead of the device, once it is warm."""
    on_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None

    def seconds(repeats: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            work_once()
        wait()
        return time.perf_counter() - begin

    seconds(2)
    once_s = seconds(3) / 3
    seconds(ceil((0.7 if on_gpu else 0.02) / once_s))
    repeats = ceil((1.8 if on_gpu else 0.1) / once_s)
    return seconds(repeats) / repeats
