"""The search against the published preset (2:6): gain, certified gap, time, candidates, memory; and its speed.

    python scripts/bench_search.py --json bench.json
    python scripts/bench_search.py --case published --case 'whole 10b' --json bench.json

Global batch 4N sequences of 1024 tokens in microbatches of two on N GPUs, all in use. ``published``: the published
order (barrier, full forward, whole-stage buckets), so that only the cuts are free; ``whole``: everything is;
``calibrated``: everything, on the clusters that were fitted to measured runs, contention included, with a quarter of
the usual effort. ``rates``: how fast one process simulates candidates, and ranks other cuts by replay, by processor
time. Every case has processes of its own. Ends with a table to paste.
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

from spipe.hardware import HardwareSpec, load_hardware
from spipe.model import load_model
from spipe.plan import make_plan
from spipe.sim import search, simulate
from spipe.sim.cuts import Cuts, Retiming
from spipe.sim.judge import Verdict, simulated
from spipe.sim.pricing import op_costs
from spipe.sim.space import make_space

HOSTS = {"10b": 1, "19b": 1, "30b": 2, "40b": 2, "52b": 4, "69b": 4, "88b": 8, "110b": 8}
SIMULATED = {"10b": 40, "110b": 8}  # candidates whose rates are measured
RANKED = {"10b": 2000, "110b": 200}
PUBLISHED_ORDER = {"barrier": True, "step_order": "arrival", "bucket_layers": 0, "weight_slots": 2}
CASES = (
    *(("rates", name, "v100-ideal-host") for name in ("10b", "110b")),
    *(("published", name, "v100-ideal-host") for name in ("10b", "30b", "52b", "110b")),
    *(("whole", name, "v100-ideal-host") for name in HOSTS),
    *(("calibrated", name, cluster) for cluster in ("v100-cluster", "rtx3090-cluster") for name in HOSTS),
)


def job_of(hardware: HardwareSpec) -> dict[str, Any]:
    return {"sequence": 1024, "microbatch_size": 2, "precision": "fp16", "global_batch": 4 * hardware.num_ranks}


def rates(name: str, cluster: str) -> dict[str, Any]:
    """Candidates a minute of processor time: simulated (memory, lowering and engine), and ranked by replay."""
    hardware, model = load_hardware(cluster).resized(num_hosts=HOSTS[name]), load_model(name)
    space = make_space(
        model, hardware, num_ranks=hardware.num_ranks, schedules=["spipe"], contention=False, **job_of(hardware)
    )
    candidates = sorted(space.candidates({}), key=lambda candidate: candidate.key)[: SIMULATED[name]]
    begin = time.process_time()
    verdicts = [simulated(space.job, candidate) for candidate in candidates]
    simulated_s = time.process_time() - begin
    first = next(verdict.candidate for verdict in verdicts if isinstance(verdict, Verdict))
    costs, program = space.job.costs(first), space.job.plan(first).program()
    begin = time.process_time()
    retiming = Retiming(program, op_costs(costs, program), costs)
    near = list(first.freedom.neighbours(Cuts.of(first.layout)))
    near = (near * (RANKED[name] // len(near) + 1))[: RANKED[name]]
    retiming.scores(near)
    ranked_s = time.process_time() - begin
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "name": f"rates {name} {cluster}",
        "seconds": simulated_s + ranked_s,
        "simulated": len(candidates),
        "discarded": len(near),
        "simulated_per_minute": 60 * len(candidates) / simulated_s,
        "ranked_per_minute": 60 * len(near) / ranked_s,
        "ops": sum(candidate.num_ops for candidate in candidates) / len(candidates),
        "peak_bytes": 1024 * usage.ru_maxrss,
    }


def case(kind: str, name: str, cluster: str, workers: int) -> dict[str, Any]:
    hardware, model = load_hardware(cluster).resized(num_hosts=HOSTS[name]), load_model(name)
    contention = cluster != "v100-ideal-host"
    common = job_of(hardware)
    costs = [0.0, *[1.0] * model.num_layers, 0.0]
    preset = simulate(make_plan(model, hardware, published=True, layer_costs=costs, **common), contention=contention)
    fixed: dict[str, Any] = {"effort": 0.25} if kind == "calibrated" else {}
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
            if kind == "rates":
                row = fresh.submit(rates, name, cluster).result()
            else:
                row = fresh.submit(case, kind, name, cluster, arguments.workers).result()
        rows.append(row)
        print(table_row(row), row.get("plan", ""), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps({"cases": rows}, indent=1) + "\n")
    print(f"\n{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, {sum(row['seconds'] for row in rows):.0f} s in all")
    for first, kinds in ((CASE_HEAD, False), (RATE_HEAD, True)):
        chosen = [row for row in rows if row["name"].startswith("rates") == kinds]
        if chosen:
            print("\n" + "\n".join([first, "|---|" + "---:|" * (first.count("|") - 2), *map(table_row, chosen)]))


CASE_HEAD = (
    "| case | gain over the preset | from the bound | seconds | processor seconds | simulated | ranked or discarded | "
    "memory, MiB |"
)
RATE_HEAD = "| case | simulated a minute | ranked a minute | ops of a candidate | memory, MiB |"


def table_row(row: dict[str, Any]) -> str:
    memory = f"{row['peak_bytes'] / 2**20:,.0f}"
    if row["name"].startswith("rates"):
        speeds = f"{row['simulated_per_minute']:,.0f} | {row['ranked_per_minute']:,.0f}"
        return f"| {row['name']} | {speeds} | {row['ops']:,.0f} | {memory} |"
    return (
        f"| {row['name']} | {100 * row['gain']:.1f} % | {100 * row['gap']:.1f} % | {row['seconds']:.0f} | "
        f"{row['cpu_seconds']:.0f} | {row['simulated']} | {row['discarded']:,} | {memory} |"
    )


if __name__ == "__main__":
    main()
