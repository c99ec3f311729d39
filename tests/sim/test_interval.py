"""Intervals cover the true step as often as they say, and are as wide as what is known poorly makes them."""

import math
import random
from typing import Any

import pytest

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, MeasuredLayer, load_hardware, standard_error
from spipe.model import LAYER_KINDS, PASS_FACTOR, ModelSpec
from spipe.plan import Plan, make_plan
from spipe.sim import simulate
from spipe.sim.cost import CostModel
from spipe.sim.fitting import Samples
from spipe.sim.interval import Interval, interval

SMALL = ModelSpec(name="small", num_layers=4, hidden_size=256, ffn_size=704, num_heads=4, vocab_size=1024)
GPU = load_hardware("h200x2")


def plan_of(num_ranks: int = 1, batch: int = 2, **fields: Any) -> Plan:
    shape = {"forward_stages": 1, "backward_stages": 2, "global_batch": batch, "microbatch_size": 1, "sequence": 512}
    return make_plan(SMALL, GPU, num_ranks=num_ranks, **{**shape, **fields})  # type: ignore[arg-type]


def measured(truth: HardwareSpec, plan: Plan, generator: random.Random, noise: float, count: int) -> HardwareSpec:
    """What somebody knows of ``truth`` who has measured everything ``count`` times."""

    def samples(value: float) -> Samples:
        return Samples.of([value * math.exp(generator.gauss(0, noise)) for _ in range(count)])

    costs = CostModel.of(plan, truth)
    entries = []
    for kind in LAYER_KINDS:
        for name in PASS_FACTOR:
            found = samples(costs.layer_s(kind, name))
            entries.append(
                MeasuredLayer(
                    layer_kind=kind, pass_name=name, microbatch_size=plan.microbatch_size, sequence=plan.sequence,
                    dtype=plan.precision, seconds=found.median, spread_s=found.spread, num_samples=count,
                    **MeasuredLayer.shape_of(plan.model, kind),
                )
            )  # fmt: skip
    adam, width = (samples(x) for x in (truth.cpu.adam_parameters_per_s, truth.links[0].bandwidth_bytes_per_s))
    link = truth.links[0].replace(bandwidth_bytes_per_s=width.median, both_directions_bytes_per_s=None)
    names = {"cpu.adam_parameters_per_s": adam, "links[0].bandwidth_bytes_per_s": width}
    return truth.replace(
        measured=tuple(entries),
        cpu=truth.cpu.replace(adam_parameters_per_s=adam.median),
        links=(link, *truth.links[1:]),
        uncertainty={path: standard_error(found.spread, count) / found.median for path, found in names.items()},
    )


def coverage(plan: Plan, repeats: int, draws: int) -> float:
    truth = GPU.replace(links=tuple(link.replace(both_directions_bytes_per_s=None) for link in GPU.links))
    true_s = simulate(plan, hardware=truth).step_s
    generator, inside = random.Random(1), 0
    for repeat in range(repeats):
        known = measured(truth, plan, generator, noise=0.1, count=25)
        found = interval(simulate(plan, hardware=known), draws=draws, seed=repeat)
        assert found is not None
        inside += found.low_s <= true_s <= found.high_s
    return inside / repeats


def test_nine_of_ten_intervals_cover_the_true_step() -> None:
    assert 0.8 <= coverage(plan_of(), repeats=100, draws=60) <= 0.97


TWO_RANKS: list[dict[str, Any]] = [
    {},
    {"schedule": "1f1b", "batch": 6, "backward_stages": 1},
    {"options": {"barrier": True}},
]


@pytest.mark.slow
@pytest.mark.parametrize("fields", TWO_RANKS, ids=str)
def test_coverage_of_pipelines_of_two_ranks(fields: dict[str, Any]) -> None:
    assert 0.8 <= coverage(plan_of(2, **{"batch": 4, **fields}), repeats=200, draws=200) <= 0.97


def found_for(hardware: HardwareSpec, plan: Plan, **options: Any) -> Interval:
    found = interval(simulate(plan, hardware=hardware), **options)
    assert found is not None
    return found


def test_fewer_samples_and_unfitted_plans_make_wider_intervals() -> None:
    plan = plan_of()
    few, many = (found_for(measured(GPU, plan, random.Random(0), 0.1, count), plan) for count in (9, 400))
    assert few.high_s - few.low_s > 3 * (many.high_s - many.low_s)
    assert list(few.parts.values()) == sorted(few.parts.values(), reverse=True)
    doubtful = found_for(GPU.replace(prediction_error=0.05), plan)
    step_s = simulate(plan).step_s
    assert doubtful.low_s == pytest.approx(step_s * math.exp(-0.05 * 1.645), rel=0.02)
    assert doubtful.high_s == pytest.approx(step_s * math.exp(0.05 * 1.645), rel=0.02)
    assert doubtful.parts == {"runs against predictions": 0.05}


def test_where_nothing_is_known_there_is_no_interval() -> None:
    plan = plan_of()
    assert interval(simulate(plan)) is None
    with pytest.raises(SpipeError, match=r"level = 1\.0 should be between"):
        interval(simulate(plan), level=1.0)


def test_the_same_seed_gives_the_same_interval_and_a_higher_level_a_wider_one() -> None:
    plan = plan_of()
    known = measured(GPU, plan, random.Random(0), 0.1, 20)
    assert found_for(known, plan) == found_for(known, plan)
    assert found_for(known, plan, level=0.5).high_s < found_for(known, plan).high_s


@pytest.mark.parametrize(
    ("path", "message"),
    [("links[9].bandwidth_bytes_per_s", r"links\[9\]: there are 2"), ("cpu.adam_rate", "unknown field 'adam_rate'")],
)
def test_uncertainty_of_what_is_not_there_is_refused(path: str, message: str) -> None:
    with pytest.raises(SpipeError, match=message):
        interval(simulate(plan_of(), hardware=GPU.replace(uncertainty={path: 0.1})))


def test_every_kind_of_value_may_be_uncertain() -> None:
    plan = plan_of()
    overheads = {"FORWARD": 1e-3}
    known = GPU.replace(
        measured_op_overhead_s=overheads,
        uncertainty={
            "measured_op_overhead_s.FORWARD": 0.5, "accelerator.peak_flops": 0.05, "cpu.page_lock_bytes_per_s": 0.1,
            "links[0].bandwidth_bytes_per_s": 0.05,
        },
    )  # fmt: skip
    parts = found_for(known, plan).parts
    assert {"measured_op_overhead_s.FORWARD", "accelerator.peak_flops"} <= parts.keys()
    assert "cpu.page_lock_bytes_per_s" not in parts
