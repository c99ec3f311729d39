"""The search against the published preset (2:6): gain, time, candidates, certified gap, memory.

    python scripts/bench_search.py --json bench.json
    python scripts/bench_search.py --case published --case 'whole 10b' --json bench.json

Global batch 4N sequences of 1024 tokens in microbatches of two on N GPUs, all in use. ``published``: the published
order (barrier, full forward, whole-stage buckets), so that only the cuts are free; ``whole``: everything is;
``calibrated``: everything, on the clusters that were fitted to measured runs, contention included. Every case has
processes of its own.
"""

import argparse
import json
import multiprocessing
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.plan import make_plan
from spipe.sim import search, simulate

HOSTS = {"10b": 1, "19b": 1, "30b": 2, "40b": 2, "52b": 4, "69b": 4, "88b": 8, "110b": 8}
PUBLISHED_ORDER = {"barrier": True, "step_order": "arrival", "bucket_layers": 0, "weight_slots": 2}
CASES = (
    *(("published", name, "v100-ideal-host") for name in ("10b", "30b", "52b", "110b")),
    *(("whole", name, "v100-ideal-host") for name in HOSTS),
    *(("calibrated", name, cluster) for cluster in ("v100-cluster", "rtx3090-cluster") for name in HOSTS),
)


def case(kind: str, name: str, cluster: str, workers: int) -> dict[str, Any]:
    hardware, model = load_hardware(cluster).resized(num_hosts=HOSTS[name]), load_model(name)
    contention = cluster != "v100-ideal-host"
    common: dict[str, Any] = {"sequence": 1024, "microbatch_size": 2, "precision": "fp16"}
    common["global_batch"] = 4 * hardware.num_ranks
    costs = [0.0, *[1.0] * model.num_layers, 0.0]
    preset = simulate(make_plan(model, hardware, published=True, layer_costs=costs, **common), contention=contention)
    fixed: dict[str, Any] = {}
    if kind == "published":
        fixed = {"schedules": ["spipe"], "full_forward": True, "options": PUBLISHED_ORDER}
    begin = time.perf_counter()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        executor = pool if workers > 1 else None
        found = search(
            model, hardware, num_ranks=hardware.num_ranks, contention=contention, executor=executor, **common, **fixed
        )
        seconds = time.perf_counter() - begin
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    row = found.candidates[0]
    return {
        "name": f"{kind} {name} {cluster}",
        "seconds": seconds,
        "cpu_seconds": sum(x.ru_utime + x.ru_stime for x in usage),
        "workers": workers,
        "load": os.getloadavg()[0],
        "simulated": found.counts["simulated"],
        "discarded": found.counts["discarded"] + found.counts["ranked"],
        "plan_step_s": found.simulation.step_s,
        "preset_step_s": preset.step_s,
        "gain": preset.step_s / found.simulation.step_s - 1,
        "lower_bound_s": found.lower_bound_s,
        "limit": found.limit,
        "gap": found.gap,
        "plan": {key: row[key] for key in ("schedule", "forward_stages", "backward_stages", "options", "cuts")},
        "peak_bytes": 1024 * (usage[0].ru_maxrss + (workers if executor else 0) * usage[1].ru_maxrss),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, after every case")
    parser.add_argument("--case", action="append", metavar="TEXT", help="only cases whose name begins so; repeatable")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind, name, cluster in CASES:
        if arguments.case and not any(f"{kind} {name} {cluster}".startswith(text) for text in arguments.case):
            continue
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            row = fresh.submit(case, kind, name, cluster, arguments.workers).result()
        rows.append(row)
        print(
            f"{row['name']:32} gain {100 * row['gain']:5.1f} %  gap {100 * row['gap']:5.1f} %  "
            f"{row['seconds']:6.1f} s (cpu {row['cpu_seconds']:.1f} s)  simulated {row['simulated']}, ranked or "
            f"discarded {row['discarded']}  {row['peak_bytes'] / 2**20:.0f} MiB  {row['plan']}",
            flush=True,
        )
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
