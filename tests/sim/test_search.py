"""Search: small spaces whose best plan is known, feasibility, determinism, messages."""

from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import Any

import pytest

from spipe.check import check
from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, MeasuredLayer, load_hardware
from spipe.layer_list import LayerListSpec, LayerSpec
from spipe.layout import Layout, Stage
from spipe.memory import memory
from spipe.model import LayerKind, ModelSpec, PassName, load_model
from spipe.options import Options
from spipe.plan import LayoutSpec, make_plan
from spipe.sim import SearchResult, ledger, search, search_for, simulate
from spipe.sim.cost import CostModel
from spipe.sim.objectives import dollars, dollars_per_hour, dollars_per_token, priced_by
from spipe.sim.search import MIN_RANKED
from spipe.sim.space import FIRST_HELD, HELD_LAYERS
from spipe.tensors import TensorSpec

BLOCKS = ModelSpec(name="blocks", num_layers=24, hidden_size=64, ffn_size=128, num_heads=4, vocab_size=128)


def tiny(**changes: Any) -> SearchResult:
    fields: dict[str, Any] = {"global_batch": 8, "sequence": 64, "max_simulations": 12}
    return search(load_model("tiny"), load_hardware("laptop"), **(fields | changes))


def test_finds_the_systolic_ring_where_communication_is_free() -> None:
    # With N = 4, F = 2, M = 8 and full forward, B = 3F is the best of SPipe's and Mobius' plans: 67 tf.
    result = search(
        BLOCKS, load_hardware("ideal"), global_batch=8, sequence=16, microbatch_size=1, num_ranks=4,
        forward_stages=2, schedules=["spipe", "mobius"], full_forward=True, cuts="balanced",
    )  # fmt: skip
    layout = result.plan.layout.layout()
    assert (len(layout.forward), len(layout.backward)) == (8, 24)
    assert result.simulation.makespan_s == pytest.approx(67 * 3e-3)


def test_is_at_least_as_good_as_every_candidate_and_says_what_it_predicts() -> None:
    result = tiny()
    assert result.plan.predicted is not None
    assert result.plan.predicted["step_s"] == result.candidates[0]["step_s"]
    assert [row["step_s"] for row in result.candidates] == sorted(row["step_s"] for row in result.candidates)
    assert simulate(result.plan).step_s == result.plan.predicted["step_s"]
    for row in result.candidates:
        assert row["bound_s"] <= row["step_s"] * (1 + 1e-9)


def test_the_same_inputs_give_the_same_plan() -> None:
    assert tiny().plan.model_dump_json() == tiny().plan.model_dump_json()


def test_no_bound_is_above_the_simulated_time() -> None:
    result = search(
        BLOCKS, load_hardware("h200x4"), global_batch=8, sequence=128, num_ranks=[1, 2, 4], max_simulations=60
    )
    assert len(result.candidates) > 12
    assert all(row["bound_s"] <= row["step_s"] * (1 + 1e-9) for row in result.candidates)


def test_uses_fewer_ranks_than_offered_and_says_so() -> None:
    # Four ranks on one core cannot beat one.
    crowded = load_hardware("laptop").override({"cpu.cores": 1})
    result = search(load_model("tiny"), crowded, global_batch=4, sequence=64, max_simulations=30)
    assert result.plan.layout.num_ranks == 1
    assert any("1 of the 4 ranks" in note for note in result.notes)


def test_given_choices_are_kept() -> None:
    result = tiny(num_ranks=2, forward_stages=1, backward_stages=[2], microbatch_size=2, schedules=["spipe"], seed=7,
                  options={"weight_slots": 4})  # fmt: skip
    layout = result.plan.layout.layout()
    assert (layout.num_ranks, len(layout.forward), len(layout.backward)) == (2, 2, 4)
    assert (result.plan.microbatch_size, result.plan.seed, result.plan.options.weight_slots) == (2, 7, 4)


def test_threads_are_a_choice_and_shorten_the_step_as_far_as_there_are_cores() -> None:
    one, two = (tiny(num_ranks=2, compute_threads=threads) for threads in (1, [1, 2]))
    assert two.plan.compute_threads == 2
    assert two.simulation.step_s < one.simulation.step_s
    assert two.lower_bound_s <= two.simulation.step_s
    assert tiny(num_ranks=4, compute_threads=[1, 4], cuts="balanced").gap >= 0
    with pytest.raises(SpipeError, match="compute_threads = 2 is for device cpu"):
        search(BLOCKS, load_hardware("h200x4"), global_batch=4, sequence=64, compute_threads=2)


def test_an_expensive_head_gets_a_stage_of_its_own() -> None:
    model = load_model("tiny").replace(vocab_size=250_000)
    result = search(
        model,
        load_hardware("h200x4"),
        global_batch=16,
        sequence=256,
        schedules=["spipe"],
        num_ranks=4,
        max_simulations=16,
    )
    assert len(result.plan.layout.layout().backward[-1].layers) == 1


def test_host_memory_is_a_constraint() -> None:
    with pytest.raises(SpipeError, match=r"host 0 needs .* short of .* GiB"):
        search(load_model("llama2-70b"), load_hardware("h200x1"), global_batch=4, sequence=512, max_simulations=4,
               forward_stages=[4, 8], backward_stages=[8], schedules=["spipe"], advise=False)  # fmt: skip


def test_device_memory_is_a_constraint() -> None:
    small = load_hardware("h200x1").override({"accelerator.memory_gib": 0.003})
    with pytest.raises(SpipeError, match=r"rank 0 needs .* short of .* MiB"):
        search(load_model("tiny"), small, global_batch=4, sequence=512, max_simulations=4, advise=False)


def test_finer_stages_where_device_memory_is_short() -> None:
    roomy = load_hardware("h200x1")
    tight = roomy.override({"accelerator.memory_gib": 4})
    arguments: dict[str, Any] = {"global_batch": 4, "sequence": 512, "max_simulations": 4, "microbatch_size": 1}
    assert search(load_model("qwen3-1.7b"), roomy, **arguments).simulation.memory.fits
    result = search(load_model("qwen3-1.7b"), tight, **arguments)
    assert result.simulation.memory.fits
    assert any("rank 0 needs" in row["reason"] for row in result.rejected)


def test_progress_is_reported() -> None:
    calls: list[tuple[int, int, float | None]] = []
    tiny(num_ranks=1, progress=lambda done, total, best: calls.append((done, total, best)))
    assert calls[-1][0] == calls[-1][1]
    assert calls[-1][2] is not None


def test_cuts_are_improved_and_the_presets_are_beaten() -> None:
    model, hardware = load_model("10b"), load_hardware("v100x4")
    job: dict[str, Any] = {"global_batch": 8, "sequence": 1024, "microbatch_size": 2, "precision": "fp16"}
    result = search(
        model,
        hardware,
        num_ranks=4,
        schedules=["spipe", "mobius"],
        forward_stages=[2, 3],
        backward_stages=[6, 9],
        max_simulations=4,
        effort=0.2,
        **job,
    )
    assert result.candidates[0]["cuts"] == "improved"
    for schedule, stages in (("spipe", (2, 6)), ("mobius", (2, 2))):
        for published in (False, True):
            preset = make_plan(
                model, hardware, schedule=schedule, forward_stages=stages[0], backward_stages=stages[1],
                published=published, **job,
            )  # fmt: skip
            assert result.simulation.step_s < 0.95 * simulate(preset).step_s
    assert check(result.plan.program()) == []
    assert 0 < result.gap < 1


def test_a_preset_that_is_better_than_what_was_found_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of the presets are not among the enumerated ones here."""
    monkeypatch.setattr(import_module("spipe.sim.space"), "STAGES_PER_RANK", (1,))
    monkeypatch.setattr(import_module("spipe.sim.space"), "BACKWARD_PER_FORWARD", (1,))
    result = search(
        load_model("10b"), load_hardware("v100x4"), global_batch=8, sequence=1024, microbatch_size=2, num_ranks=4,
        schedules=["spipe"], precision="fp16", max_simulations=1, effort=0.01, cuts="balanced",
    )  # fmt: skip
    assert any(row["cuts"] == "preset" for row in result.candidates)


def test_any_number_of_processes_finds_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("spipe.sim.ledger"), "WORTH_SENDING_OPS", 0)
    arguments: dict[str, Any] = {
        "global_batch": 4, "sequence": 512, "microbatch_size": 1, "num_ranks": 2, "schedules": ["spipe"],
        "max_simulations": 3, "effort": 0.1,
    }  # fmt: skip
    hardware = load_hardware("v100x4")
    alone = search(BLOCKS, hardware, **arguments)
    for workers in (1, 3):
        with ThreadPoolExecutor(workers) as pool:
            other = search(BLOCKS, hardware, executor=pool, **arguments)
        assert other.plan.text() == alone.plan.text()
        assert other.candidates == alone.candidates
        assert other.counts == alone.counts


def test_an_interrupted_search_returns_the_best_so_far() -> None:
    interrupts = iter([KeyboardInterrupt])

    def interrupt(done: int, total: int, best: float | None) -> None:
        if best is not None and done >= 5 and (now := next(interrupts, None)):
            raise now

    result = tiny(progress=interrupt)
    assert any("interrupted" in note for note in result.notes)
    assert result.plan.predicted is not None
    assert result.simulation.memory.fits


def test_an_interrupt_before_anything_was_found_is_passed_on() -> None:
    def interrupt(done: int, total: int, best: float | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="no plan had been found yet"):
        tiny(progress=interrupt)


class Breaking(Executor):
    """Works in this process; one of its processes is gone when it has been asked so many times."""

    def __init__(self, left: int) -> None:
        self.left = left

    def map(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise BrokenProcessPool
        return map(*arguments)


def test_a_search_whose_worker_is_gone_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WORTH_SENDING_OPS", 0)
    for left in (1, 3):
        result = tiny(executor=Breaking(left))
        assert any("a worker process is gone" in note and "found so far" in note for note in result.notes)
        assert "a worker process is gone" in result.ended
        assert result.simulation.memory.fits
    with pytest.raises(BrokenProcessPool):
        tiny(executor=Breaking(0))


def test_little_effort_is_little_work_also_with_very_many_microbatches() -> None:
    arguments: dict[str, Any] = {"global_batch": 1009, "microbatch_size": 1, "num_ranks": 1, "schedules": ["gpipe"]}
    result = tiny(**arguments, effort=0.001)
    assert result.counts["ranked"] == 0
    assert result.counts["simulated"] <= MIN_RANKED
    assert sum("not varied: effort 0.001" in note for note in result.notes) == 1


def test_an_interrupt_while_intervals_are_found_keeps_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("spipe.sim.search"), "interval_s", interrupt)
    result = tiny()
    assert result.ended == "interrupted"
    assert result.plan.predicted is not None


def test_layers_are_held_as_long_as_that_helps() -> None:
    """The best of all numbers that may be held, though only some are tried."""
    arguments: dict[str, Any] = {
        "global_batch": 8, "sequence": 1024, "microbatch_size": 2, "num_ranks": 4, "schedules": ["spipe"],
        "forward_stages": 4, "backward_stages": 6, "cuts": "balanced", "precision": "fp16", "contention": False,
    }  # fmt: skip
    model, hardware = load_model("10b"), load_hardware("v100x4")
    found = search(model, hardware, **arguments)
    held = found.plan.options.device_layers
    assert held not in (0, *FIRST_HELD)
    options = found.plan.options.model_dump(exclude_defaults=True)
    for other in (number for number in HELD_LAYERS if number != held):
        try:
            plan = found.plan.replace(options=Options(**{**options, "device_layers": other}))
        except SpipeError:
            continue
        simulation = simulate(plan, contention=False)
        assert simulation.step_s >= found.simulation.step_s * (1 - 1e-9) or not simulation.memory.fits
    assert found.counts["simulated"] < 40


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"cross_mapping": True, "schedules": ["spipe"]}, "cross mapping has no effect"),
        ({"full_forward": True, "schedules": ["gpipe"]}, "full forward has no effect: the forward of gpipe"),
        ({"options": {"device_layers": 99}, "hardware": "h200x1"}, "device_layers = 99 is more than the 8 layers"),
    ],
)
def test_what_has_no_effect_is_said(changes: dict[str, Any], note: str) -> None:
    hardware = load_hardware(changes.pop("hardware", "laptop"))
    few: dict[str, Any] = {"global_batch": 2, "sequence": 64, "num_ranks": 1, "effort": 0.01, "cuts": "balanced"}
    result = search(load_model("tiny"), hardware, **few, max_simulations=1, **changes)
    assert any(note in line for line in result.notes)
    without = search(load_model("tiny"), hardware, **few, max_simulations=1)
    assert not any("no effect" in line or "device_layers" in line for line in without.notes)


def test_memory_that_may_be_used_is_what_is_reported_as_usable() -> None:
    limit = 2**30
    memory = tiny(max_rank_bytes=limit, max_host_bytes=2 * limit, cuts="balanced").simulation.memory
    assert (memory.rank_capacity_bytes, memory.host_capacity_bytes) == (limit, 2 * limit)


def rate(model: ModelSpec, hardware: HardwareSpec, **changes: Any) -> float:
    """Tokens per second of the plan found, with small counts."""
    found = search(model, hardware, **{"global_batch": 8, "sequence": 512, "effort": 0.05, **changes})
    return float(found.candidates[0]["tokens_per_s"])


@pytest.mark.parametrize("machine", ["v100x4", "h200x4"])
def test_a_larger_space_has_no_worse_plan(machine: str) -> None:
    model, hardware = load_model("llama2-13b").replace(num_layers=8), load_hardware(machine)
    best = search(model, hardware, global_batch=8, sequence=512, effort=0.05).candidates[0]
    parts: list[dict[str, Any]] = [
        {"schedules": ["spipe"]},
        {"schedules": ["mobius", "1f1b"]},
        {"num_ranks": 4},
        {"num_ranks": 2},
        {"microbatch_size": [1, 2]},
        {"max_rank_bytes": 0.95 * best["rank_bytes"]},
        {"effort": 0.02},
    ]
    for part in parts:
        assert rate(model, hardware, **part) <= 1.01 * best["tokens_per_s"], part


def test_plans_that_host_memory_would_force_are_found_without_its_limit() -> None:
    """The fastest hold most layers on all accelerators, and are not among the fastest before they do."""
    model, hardware = load_model("llama2-13b"), load_hardware("rtx4090x8")
    few: dict[str, Any] = {"schedules": ["spipe"], "effort": 0.02}
    free = rate(model, hardware, **few)
    assert rate(model, hardware, max_host_bytes=100 * 2**30, **few) <= free
    assert free > 3900  # 3,327 if layers are held only once the best are chosen


def test_more_hosts_are_not_slower() -> None:
    hardware = load_hardware("rtx4090x8")
    few: dict[str, Any] = {"schedules": ["spipe"], "effort": 0.05, "microbatch_size": 1, "cuts": "balanced"}
    one, two, four = (rate(load_model("llama2-13b"), hardware.resized(num_hosts=n), **few) for n in (1, 2, 4))
    assert one <= 1.01 * two
    assert two <= 1.01 * four


def test_memory_limits_are_kept() -> None:
    free = tiny(num_ranks=2, max_simulations=48)
    most = max(free.simulation.memory.rank_bytes)
    limited = tiny(num_ranks=2, max_rank_bytes=0.8 * most, max_simulations=48)
    assert max(limited.simulation.memory.rank_bytes) <= 0.8 * most
    assert limited.simulation.step_s >= free.simulation.step_s
    with pytest.raises(SpipeError, match="nothing fits"):
        tiny(num_ranks=2, max_rank_bytes=1000)


@pytest.mark.parametrize(("spread", "some_slower"), [(0.2, False), (0.002, True)])
def test_a_plan_beats_another_only_if_their_intervals_say_so(spread: float, some_slower: bool) -> None:
    model, laptop = load_model("tiny"), load_hardware("laptop")
    costs = CostModel(model, laptop, "fp32", 64, 1)
    kinds: tuple[tuple[LayerKind, PassName], ...] = (
        ("block", "forward"),
        ("block", "recompute"),
        ("block", "backward"),
    )
    measured = tuple(
        MeasuredLayer(
            layer_kind=kind, pass_name=name, microbatch_size=1, sequence=64, dtype="fp32",
            **MeasuredLayer.shape_of(model, kind), seconds=costs.layer_s(kind, name),
            spread_s=spread * costs.layer_s(kind, name),
        )
        for kind, name in kinds
    )  # fmt: skip
    result = search(
        model, laptop.replace(measured=measured), global_batch=8, sequence=64, microbatch_size=1, max_simulations=6
    )
    assert result.interval_s is not None
    low, high = result.interval_s
    assert low < result.simulation.step_s < high
    rows = [row for row in result.candidates if "interval_s" in row]
    assert rows[0]["interval_s"] == result.interval_s
    assert all(row["slower"] == (high < row["interval_s"][0]) for row in rows)
    assert any(row["slower"] for row in rows) == some_slower
    alike = sum(not row["slower"] for row in rows[1:])
    assert any(f"{alike} of the {len(rows) - 1} next best" in note for note in result.notes) == (alike > 0)


def test_without_spreads_there_are_no_intervals() -> None:
    result = tiny(max_simulations=1, cuts="balanced", num_ranks=1)
    assert result.interval_s is None
    assert not any("interval_s" in row for row in result.candidates)


def test_the_front_has_no_row_that_another_beats() -> None:
    result = tiny()
    keys = ("step_s", "rank_bytes", "host_bytes")
    for row in result.front:
        assert not any(
            other is not row and all(other[k] <= row[k] for k in keys) and any(other[k] < row[k] for k in keys)
            for other in result.candidates
        )
    assert min(row["step_s"] for row in result.front) == result.simulation.step_s


@pytest.mark.parametrize("objective", ["sequence", "layers"])
def test_the_largest_that_fits(objective: str) -> None:
    small = load_hardware("h200x1").override({"accelerator.memory_gib": 0.082, "cpu.usable_memory_gib": 0.04})
    arguments: dict[str, Any] = {
        "global_batch": 2, "sequence": 512, "max_simulations": 2, "cuts": "balanced", "schedules": ["spipe"],
        "microbatch_size": 1, "effort": 0.1,
    }  # fmt: skip
    model = load_model("tiny").replace(max_sequence=None)
    found = search_for(objective, model, small, **arguments)
    assert found.simulation.memory.fits
    plan = found.plan
    beyond = {"sequence": plan.sequence + 256} if objective == "sequence" else {"sequence": plan.sequence}
    deeper = plan.model if objective == "sequence" else plan.model.replace(num_layers=plan.model.num_layers + 1)
    with pytest.raises(SpipeError, match="nothing fits"):
        search(deeper, small, **{**arguments, **beyond})


@pytest.mark.parametrize("objective", ["sequence", "layers"])
def test_the_largest_is_found_by_memory_and_searched_once(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def searched(model: Any, hardware: Any, **arguments: Any) -> SearchResult:
        asked.append({"model": model, **arguments})
        return search(model, hardware, **arguments)

    monkeypatch.setattr("spipe.sim.objectives.search", searched)
    found = search_for(
        objective, load_model("tiny"), load_hardware("laptop"), global_batch=2, sequence=64, microbatch_size=1,
        num_ranks=2, schedules=["gpipe"], effort=0.05, cuts="balanced", max_simulations=1,
    )  # fmt: skip
    assert len(asked) == 1
    assert "nothing larger was tried" in found.notes[-1]


@pytest.mark.parametrize(("objective", "constraints"), [("dollars", {}), ("memory", {"min_tokens_per_s": 1.0})])
def test_what_ends_one_search_of_an_objective_ends_all(
    objective: str, constraints: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = iter([search])

    def searched(model: Any, hardware: Any, **arguments: Any) -> SearchResult:
        if (do := next(searches, None)) is None:
            raise KeyboardInterrupt
        return do(model, hardware, **arguments)

    monkeypatch.setattr("spipe.sim.objectives.search", searched)
    found = search_for(
        objective, BLOCKS, load_hardware("rtx4090-cluster").resized(num_hosts=2, ranks_per_host=1), global_batch=2,
        sequence=512, microbatch_size=1, schedules=["spipe"], effort=0.1, cuts="balanced", max_simulations=1,
        **constraints,
    )  # fmt: skip
    assert found.ended == "interrupted"
    assert found.notes[-1] == "interrupted: this is the best plan found so far"


def test_smallest_accelerators_that_are_fast_enough() -> None:
    arguments: dict[str, Any] = {"global_batch": 8, "sequence": 64, "max_simulations": 6, "cuts": "balanced"}
    laptop, model = load_hardware("laptop"), load_model("tiny")
    free = search(model, laptop, **arguments)
    lean = search_for("memory", model, laptop, min_tokens_per_s=0.5 * free.simulation.tokens_per_s, **arguments)
    assert lean.simulation.tokens_per_s >= 0.5 * free.simulation.tokens_per_s
    assert max(lean.simulation.memory.rank_bytes) <= max(free.simulation.memory.rank_bytes)


def test_fewest_dollars_uses_fewer_hosts_where_more_do_not_pay() -> None:
    cluster = load_hardware("rtx4090-cluster").resized(num_hosts=2, ranks_per_host=1)
    arguments: dict[str, Any] = {
        "global_batch": 4, "sequence": 512, "max_simulations": 3, "cuts": "balanced", "schedules": ["spipe"],
        "effort": 0.1, "microbatch_size": 1,
    }  # fmt: skip
    model = BLOCKS
    result = search_for("dollars", model, cluster, **arguments)
    costs = [dollars_per_token(search(model, cluster.resized(num_hosts=hosts), **arguments)) for hosts in (1, 2)]
    assert dollars_per_token(result) == min(costs)
    costs_of_it = dollars(result)
    assert costs_of_it["dollars_per_billion_tokens"] == pytest.approx(1e9 * min(costs))
    assert costs_of_it["dollars_per_hour"] == dollars_per_hour(cluster, costs_of_it["hosts"])
    assert costs_of_it["priced_by"] == "rent"


def test_what_is_not_rented_out_is_priced_by_what_it_costs_to_own() -> None:
    host = load_hardware("rtx4090x8")
    assert host.price is not None
    owned = host.replace(price=host.price.replace(rent_dollars_per_hour=None, purchase_dollars=35040.0))
    assert dollars_per_hour(owned) == pytest.approx(1 + host.price.power_dollars_per_hour)
    assert "purchase over 4 years, and power" in priced_by(owned)
    with pytest.raises(SpipeError, match=r"--max-dollars.*one host.*purchase over 4 years.*cheaper hardware"):
        search_for("time", BLOCKS, owned, max_dollars_per_hour=0.1, global_batch=1, sequence=64)


@pytest.mark.parametrize(
    ("objective", "constraints", "message"),
    [
        ("tim", {}, "objective 'tim'.*time"),
        ("memory", {}, r"needs min_tokens_per_s \(--min-speed\)"),
        ("time", {"max_dollars_per_hour": 0}, "max_dollars_per_hour = 0"),
        ("time", {"max_dollars_per_hour": 1}, "laptop has no price"),
        ("time", {"min_tokens_per_s": 1e12}, "no plan for laptop can reach more"),
        ("time", {"min_tokens_per_s": "bound"}, "the best plan for laptop reaches"),
        ("dollars", {}, "laptop has no price"),
    ],
)
def test_objectives_and_constraints_that_cannot_be_met(
    objective: str, constraints: dict[str, Any], message: str
) -> None:
    if constraints.get("min_tokens_per_s") == "bound":
        found = search(load_model("tiny"), load_hardware("laptop"), global_batch=4, sequence=64, max_simulations=1,
                       cuts="balanced", num_ranks=1)  # fmt: skip
        constraints = {"min_tokens_per_s": 0.9999 * 4 * 64 / found.lower_bound_s}
    with pytest.raises(SpipeError, match=message):
        search_for(
            objective, load_model("tiny"), load_hardware("laptop"), global_batch=4, sequence=64, max_simulations=1,
            cuts="balanced", num_ranks=1, **constraints,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuts": "all ways"}, "cuts 'all ways'"),
        ({"effort": 0}, "effort = 0"),
        ({"max_rank_bytes": -1}, "max_rank_bytes = -1"),
        ({"max_simulations": 0}, "max_simulations = 0"),
        ({"global_batch": 0}, "global_batch = 0"),
        ({"microbatch_size": 3}, "does not divide into microbatches of 3"),
        ({"num_ranks": 9}, "num_ranks = 9, but laptop has 4"),
        ({"schedules": ["spip"]}, "spipe"),
        ({"precision": "fp8"}, "dtype 'fp8'"),
        ({"schedules": []}, "schedules = .. should name one"),
        ({"compute_threads": 5}, "compute_threads = 5, but a host of laptop has 4 cores"),
        ({"compute_threads": 0}, "compute_threads = 0"),
        ({"compute_threads": []}, "compute_threads = .. should be whole numbers"),
        ({"forward_stages": 5, "num_ranks": 4}, "cannot cut"),
        ({"sequence": 100_000}, "sequence = 100000"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpipeError, match=message):
        tiny(**changes)


def test_an_unknown_option_is_the_callers_mistake_and_named() -> None:
    with pytest.raises(SpipeError, match="weight_slot"):
        tiny(options={"weight_slot": 3})


def test_attention_and_feed_forward_of_a_listed_block_may_be_in_different_stages() -> None:
    shapes = {"Attention": 4 * 64 * 64, "FeedForward": 3 * 64 * 160}
    layers = tuple(
        LayerSpec(
            name=name, parameters={"weight": (size,)}, output=(16, 64), forward_flops=32.0 * size, saved_elements=4096
        )
        for _ in range(3)
        for name, size in shapes.items()
    )
    tensor = TensorSpec(shape=(16, 64), dtype="float")
    model = LayerListSpec(layers=layers, input=tensor, target=tensor, sequence=16)
    found = search(model, load_hardware("h200x4"), global_batch=8, sequence=16, num_ranks=4, precision="fp32",
                   schedules=["spipe"], max_simulations=4, effort=0.1)  # fmt: skip
    layout = found.plan.layout.layout()
    assert any(stage.first % 2 for stage in (*layout.forward, *layout.backward))
    assert check(found.plan.program()) == []


def test_stages_are_recorded_where_issuing_is_known_to_cost_something() -> None:
    def recorded(hardware: HardwareSpec, model: ModelSpec = BLOCKS, **fields: Any) -> bool:
        given: dict[str, Any] = {"global_batch": 8, "sequence": 128, "num_ranks": 1, "effort": 0.2}
        return search(model, hardware, **(given | fields)).plan.cuda_graphs

    plain = load_hardware("h200x1")
    issue_s = {"forward": 1e-3, "recompute": 1e-3, "backward": 2e-3}
    profiled = plain.replace(accelerator=plain.accelerator.replace(layer_issue_s=issue_s))
    assert not recorded(plain)
    assert recorded(plain, cuda_graphs=True)
    assert recorded(profiled)
    assert not recorded(profiled, cuda_graphs=False)
    assert not recorded(profiled, dropout=0.1)
    assert not recorded(profiled, compile_layers=True)
    with pytest.raises(SpipeError, match="cuda_graphs = true is for built-in layers without dropout"):
        recorded(profiled, dropout=0.1, cuda_graphs=True)


def test_nothing_is_recorded_where_there_is_no_room_for_it() -> None:
    hardware = load_hardware("h200x1")
    issue_s = {"forward": 1e-3, "recompute": 1e-3, "backward": 2e-3}
    hardware = hardware.replace(accelerator=hardware.accelerator.replace(layer_issue_s=issue_s))
    fields: dict[str, Any] = {
        "global_batch": 4, "sequence": 512, "microbatch_size": 4, "forward_stages": 24, "backward_stages": 24,
        "schedules": ["mobius"], "options": {"device_layers": 0}, "cuts": "balanced", "effort": 0.2,
    }  # fmt: skip
    needs = []
    for recorded in (False, True):
        plan = search(BLOCKS, hardware, cuda_graphs=recorded, **fields).plan
        needs.append(memory(plan).rank_bytes[0])
    assert needs[0] < needs[1]
    between = sum(needs) / 2
    assert not search(BLOCKS, hardware, max_rank_bytes=between, **fields).plan.cuda_graphs
    assert search(BLOCKS, hardware, max_rank_bytes=1.01 * needs[1], **fields).plan.cuda_graphs


@pytest.mark.parametrize(("room_gib", "gain"), [(9.0, -0.001), (20.0, 0.05)])
def test_one_rank_gives_its_memory_to_the_top_stage_as_long_as_that_helps(room_gib: float, gain: float) -> None:
    """No forward is needed of what the top stage recomputes, but held layers need memory, too. No plan with a stage per
    block, any top and any few layers held is better, though only some are tried."""
    model = ModelSpec(name="deep", num_layers=8, hidden_size=4096, ffn_size=11008, num_heads=32, vocab_size=32000)
    arguments: dict[str, Any] = {
        "global_batch": 16, "sequence": 2048, "microbatch_size": 2, "precision": "bf16",
        "max_rank_bytes": room_gib * 2**30,
    }  # fmt: skip
    found = search(model, load_hardware("h200x1"), **arguments)
    balanced = search(model, load_hardware("h200x1"), cuts="balanced", **arguments)
    assert found.simulation.step_s < (1 - gain) * balanced.simulation.step_s
    layers = model.num_total_layers
    options = found.plan.options.model_dump(exclude_defaults=True) | {"stage_input_route": "host"}
    for width in range(1, layers):
        below = tuple(Stage(layer, layer + 1, 0) for layer in range(layers - width))
        layout = Layout(layers, 1, below, (*below, Stage(layers - width, layers, 0)))
        for held in (0, 1, 2, 3):
            other = found.plan.replace(
                layout=LayoutSpec.of(layout), options=Options(**{**options, "device_layers": held})
            )
            if max(memory(other).rank_bytes) <= arguments["max_rank_bytes"]:
                assert simulate(other).step_s > 0.99 * found.simulation.step_s
