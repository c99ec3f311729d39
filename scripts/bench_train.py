#!/usr/bin/env python
"""Train one model on one GPU with a memory cap, and hold the step time against what the GPU needs for the compute alone.

    python scripts/bench_train.py                        # 4.3 B parameters, 16 x 2048 tokens a step, 24 GiB
    python scripts/bench_train.py --global-batch 4 --json small.json

The compute ceiling is measured in the same run: every pass of an isolated layer, times the number of microbatches.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from spipe import runtime
from spipe.hardware import HardwareSpec, load_hardware
from spipe.layout import Layout, Stage
from spipe.metrics import analyse
from spipe.model import ModelSpec
from spipe.ops import COMPUTE
from spipe.plan import Plan, make_plan, relative_layer_costs
from spipe.runtime import layers
from spipe.trace import Trace


def main() -> None:
    given = arguments()
    model = model_of(given)
    hardware = load_hardware(given.hardware).override({"accelerator.memory_gib": given.cap})
    plan = plan_of(given, model, hardware)
    ceiling_s = compute_ceiling(plan)
    row = run_ours(plan, given, ceiling_s)
    print(json.dumps(row, indent=1))
    if given.json:
        Path(given.json).write_text(json.dumps({"rows": [row]}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 20), ("hidden", 4096), ("ffn", 11008), ("heads", 32), ("vocabulary", 32000), ("sequence", 2048),
        ("microbatch", 2), ("global-batch", 16), ("steps", 6),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cap", type=float, default=24.0, help="GiB of GPU memory")
    parser.add_argument("--hardware", default="h200x1")
    parser.add_argument("--options", default="{}", help="JSON: options of the plan that differ from the defaults")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--output", help="keep the run directory here")
    return parser.parse_args()


def model_of(given: argparse.Namespace) -> ModelSpec:
    return ModelSpec(
        name="bench", num_layers=given.layers, hidden_size=given.hidden, ffn_size=given.ffn, num_heads=given.heads,
        vocab_size=given.vocabulary,
    )  # fmt: skip


def plan_of(given: argparse.Namespace, model: ModelSpec, hardware: HardwareSpec) -> Plan:
    """A stage per block; the embedding goes with the first, the head has one of its own, forward only below it."""
    blocks = [Stage(0, 2, 0), *(Stage(i, i + 1, 0) for i in range(2, given.layers + 1))]
    costs = relative_layer_costs(model, given.sequence)
    layout = Layout(len(costs), 1, tuple(blocks), (*blocks, Stage(given.layers + 1, given.layers + 2, 0)), tuple(costs))
    return make_plan(
        model, hardware, num_ranks=1, layout=layout, global_batch=given.global_batch, microbatch_size=given.microbatch,
        sequence=given.sequence, precision="bf16", options=json.loads(given.options),
    )  # fmt: skip


def compute_ceiling(plan: Plan) -> float:
    """Seconds that the compute of a step takes when nothing else happens: isolated passes of every layer kind."""
    model, device, dtype = plan.model, torch.device("cuda"), torch.bfloat16
    shape = (plan.microbatch_size, plan.sequence, model.hidden_size)
    rotary = layers.RotaryTable.build(model, plan.sequence, dtype, device)

    def parameters(kind: Any) -> dict[str, torch.Tensor]:
        shapes = model.parameter_shapes(kind).items()
        return {
            name: (0.02 * torch.randn(size, device=device)).to(dtype).requires_grad_() for name, size in shapes
        }

    def timed(work: Any, repeats: int = 12) -> float:
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return median(times[2:])

    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    block, head = parameters("block"), parameters("head")
    labels = torch.randint(0, model.vocab_size, shape[:2], device=device)
    gradient = torch.randn(shape, device=device).to(dtype)

    def forward() -> None:
        with torch.no_grad():
            layers.block(block, x, model, rotary)

    def both() -> None:
        layers.block(block, x, model, rotary).backward(gradient)

    def head_both() -> None:
        layers.head(head, x, labels, model).backward()

    forward_s, both_s, head_s = timed(forward), timed(both), timed(head_both)
    print(f"isolated: block forward {forward_s * 1e3:.2f} ms, recompute + backward {both_s * 1e3:.2f} ms, "
          f"head {head_s * 1e3:.2f} ms")  # fmt: skip
    torch.cuda.empty_cache()
    return plan.num_microbatches * (model.num_layers * (forward_s + both_s) + head_s)


def run_ours(plan: Plan, given: argparse.Namespace, ceiling_s: float) -> dict[str, Any]:
    from spipe.memory import memory

    output = Path(given.output or tempfile.mkdtemp()) / "run"
    begin = time.monotonic()
    done = runtime.run(plan, steps=given.steps, output=output, trace_steps=2, log=lambda row: print(row, flush=True))
    program, trace = plan.program(), Trace.load(output / "trace.json")
    step = max(trace.steps())
    metrics = analyse(program, trace, step)
    step_s = median(done.step_s[2:])
    report = memory(plan)
    print(f"run took {time.monotonic() - begin:.0f} s in all")
    show_gaps(plan, trace, step)
    return {
        "system": "spipe",
        "step_s": step_s,
        "tokens_per_s": plan.tokens_per_step / step_s,
        "compute_ceiling_s": ceiling_s,
        "share_of_ceiling": ceiling_s / step_s,
        "busy_s": metrics.busy_s[0],
        "bubbles": {cause: value for cause, value in metrics.bubbles[0].items() if value},
        "gpu_peak_bytes": done.summary["peak_device_bytes"][0],
        "predicted_gpu_bytes": {k: v / 2**30 for k, v in report.ranks[0].items()},
        "host_peak_bytes": done.summary["peak_resident_bytes"][0],
        "losses": done.losses,
    }


def show_gaps(plan: Plan, trace: Trace, step: int) -> None:
    """Time by kind and lane, and the largest idle intervals of the compute lane."""
    program = plan.program()
    kinds: dict[str, list[float]] = {}
    rows = [row for row in range(len(trace)) if trace.step[row] == step]
    for row in rows:
        kinds.setdefault(trace.names[trace.op[row]].split()[0], []).append(trace.end_s[row] - trace.start_s[row])
    for kind, values in sorted(kinds.items()):
        print(f"{kind:20} {len(values):5} x {median(values) * 1e3:8.3f} ms, sum {sum(values):7.3f} s")
    names = {kind.name for kind in COMPUTE}
    compute = sorted(
        (trace.start_s[row], trace.end_s[row], trace.names[trace.op[row]])
        for row in rows
        if trace.names[trace.op[row]].split()[0] in names
    )
    gaps = sorted(
        ((b[0] - a[1], a[2], b[2]) for a, b in zip(compute, compute[1:], strict=False)), reverse=True
    )
    total = sum(max(gap, 0) for gap, _, _ in gaps)
    print(f"compute gaps inside the step: {total * 1e3:.1f} ms in {len(gaps)}; the largest:")
    for gap, before, after in gaps[:12]:
        print(f"  {gap * 1e3:8.3f} ms between {before} and {after}")
    del program


if __name__ == "__main__":
    main()
