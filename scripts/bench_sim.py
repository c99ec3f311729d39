"""Speed and memory of the simulator: 30B on 8 V100, SPipe 2:6, 16 microbatches, all resources on.

    python scripts/bench_sim.py --json bench.json

Counted are compute ops, transfers (a SEND and its RECV are one) and STEPs. Times are processor time on one core, the
median of several rounds, in which everything takes its turn; other programs on the same processor still slow it down.
Memory is what the program, its costs and the trace of a step hold.
"""

import argparse
import gc
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spipe.hardware import load_hardware
from spipe.lower import lower
from spipe.model import load_model
from spipe.ops import COMPUTE, RECVS, Kind
from spipe.plan import make_plan
from spipe.program import Program
from spipe.schedules import get_schedule
from spipe.sim.cost import CostModel
from spipe.sim.engine import play
from spipe.sim.pricing import op_costs

STEPS = 3
_OTHER = {Kind.FREE, Kind.COMMIT, Kind.VALIDATE, Kind.BARRIER}


def counted(program: Program) -> int:
    """Compute ops, transfers and STEPs of a step."""
    return sum(kind in COMPUTE or (kind not in _OTHER and kind not in RECVS) for kind in program.kind)


def median_s(works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Processor seconds of each of ``works``."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for work, seconds in zip(works, times, strict=True):
            gc.collect()
            begin = time.process_time()
            work()
            seconds.append(time.process_time() - begin)
    return [statistics.median(seconds) for seconds in times]


def held_bytes(lowered: Callable[[], Program], model: CostModel) -> int:
    """Memory of a program, its costs and the trace of a step."""
    gc.collect()
    tracemalloc.start()
    program = lowered()
    costs = op_costs(model, program)
    trace = play(program, costs, 1).trace()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(trace) == len(program)
    return held


def bench(rounds: int) -> dict[str, Any]:
    plan = make_plan(
        load_model("30b"),
        load_hardware("v100-cluster").resized(num_hosts=2),
        schedule="spipe",
        forward_stages=2,
        backward_stages=6,
        global_batch=32,
        microbatch_size=2,
        sequence=1024,
        precision="fp16",
    )
    layout, model = plan.layout.layout(), CostModel.of(plan)
    order = get_schedule("spipe").compute_order(layout, plan.num_microbatches)

    def lowered() -> Program:
        return lower(layout, order, plan.num_microbatches, plan.options)

    program = lowered()
    costs = op_costs(model, program)
    ops = counted(program)
    lower_s, price_s, contended_s, alone_s = median_s(
        (
            lowered,
            lambda: op_costs(model, program),
            lambda: play(program, costs, STEPS),
            lambda: play(program, costs, STEPS, contention=False),
        ),
        rounds,
    )
    held = held_bytes(lowered, model)
    return {
        "ops": ops,
        "all_ops": len(program),
        "ops_per_s": STEPS * ops / contended_s,
        "ops_per_s_without_contention": STEPS * ops / alone_s,
        "lowered_ops_per_s": ops / lower_s,
        "priced_ops_per_s": ops / price_s,
        "bytes_per_op": held / len(program),
        "bytes_per_counted_op": held / ops,
        "rounds": rounds,
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result here, too")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    result = bench(max(1, arguments.rounds))
    for name, value in result.items():
        print(f"{name:32} {value:,.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
