"""Advice where nothing fits: it says what is short, and what it names is enough, but nothing smaller of its kind."""

import re
from typing import Any

import pytest

from spipe.hardware import HardwareSpec, load_hardware
from spipe.model import load_model
from spipe.sim import search
from spipe.sim.advice import NoPlanError

Case = tuple[str, HardwareSpec, dict[str, Any]]

SPIPE: dict[str, Any] = {"schedules": ["spipe"]}


def failure(case: Case, **changes: Any) -> NoPlanError:
    model, hardware, arguments = case
    with pytest.raises(NoPlanError) as caught:
        search(load_model(model), hardware, max_simulations=2, **{**arguments, **changes})
    return caught.value


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (
            ("qwen3-1.7b", load_hardware("h200x1").override({"accelerator.memory_gib": 14}),
             {"global_batch": 8, "sequence": 2048, "microbatch_size": 8, "backward_stages": 2, **SPIPE}),
            ["microbatches of", "backward stages", "accelerators with", "sequences of"],
        ),
        (
            ("llama2-70b", load_hardware("h200x1"),
             {"global_batch": 4, "sequence": 512, "microbatch_size": 4, "backward_stages": 8, **SPIPE}),
            ["hosts with", "a model of"],
        ),
        (
            ("llama2-7b", load_hardware("rtx4090x8"),
             {"global_batch": 16, "sequence": 4096, "microbatch_size": 16, "schedules": ["gpipe"], "num_ranks": 2}),
            ["schedule spipe", "accelerators with", "4 hosts", "sequences of"],
        ),
        (
            ("tiny", load_hardware("laptop"), {"global_batch": 4, "sequence": 64, "max_host_bytes": 1e7, **SPIPE}),
            ["a limit of", "a model of"],
        ),
        (("tiny", load_hardware("laptop"), {"global_batch": 4, "sequence": 64, "forward_stages": 5, "num_ranks": 4}),
         ["backward stages"]),
        (
            ("llama2-13b", load_hardware("h200x1"),
             {"global_batch": 1, "sequence": 512, "options": {"device_layers": 0}, "backward_stages": [21], **SPIPE}),
            ["leaving option device_layers = 0 out"],
        ),
        (  # short of memory with one microbatch already, and more so with all
            ("tiny", load_hardware("h200x1"),
             {"global_batch": 64, "sequence": 512, "microbatch_size": 1, "forward_stages": 8, "backward_stages": 8,
              "max_rank_bytes": 6e7, **SPIPE}),
            ["a limit of"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_every_change_that_is_named_makes_a_plan_possible(case: Case, kinds: list[str]) -> None:
    model, hardware, arguments = case
    error = failure(case)
    for kind in kinds:
        assert any(kind in advice.words for advice in error.advice), (kind, str(error))
    for advice in error.advice:
        assert advice.words in str(error)
        changed = {"model": load_model(model), "hardware": hardware, **arguments, **advice.changes}
        found = search(**changed, cuts="balanced", max_simulations=1, effort=0.01)
        assert found.simulation.memory.fits, advice.words
        assert max(found.simulation.memory.rank_bytes) <= changed.get("max_rank_bytes", float("inf"))
        assert max(found.simulation.memory.host_bytes) <= changed.get("max_host_bytes", float("inf"))


def test_less_of_the_memory_that_is_named_is_not_enough() -> None:
    case: Case = ("tiny", load_hardware("laptop"), {"global_batch": 4, "sequence": 64, "num_ranks": 1, **SPIPE})
    (advice,) = (a for a in failure(case, max_host_bytes=1e7).advice if "host memory" in a.words)
    failure(case, max_host_bytes=0.5 * advice.changes["max_host_bytes"])


def test_a_limit_that_was_given_is_what_is_told_to_be_raised() -> None:
    """Also where the nearest plan is one that is short of something else."""
    case: Case = ("llama2-13b", load_hardware("rtx4090x8"), {"global_batch": 8, "sequence": 512, **SPIPE})
    limit = 60 * 2**30
    first = failure(case, max_host_bytes=limit, effort=0.01).advice[0]
    assert "(--max-host-memory) instead of 60.00" in first.words
    assert 80 < first.changes["max_host_bytes"] / 2**30 < 86


def test_fewer_ranks_than_layers() -> None:
    shallow = load_model("tiny").replace(num_layers=1)
    with pytest.raises(NoPlanError, match="8 ranks are more than the 3 layers") as caught:
        search(shallow, load_hardware("rtx4090x8"), global_batch=16, sequence=128, num_ranks=8)
    assert caught.value.advice[0].changes == {"num_ranks": 3}


@pytest.mark.parametrize(
    ("schedule", "stages", "reason"),
    [
        ("mobius", {"forward_stages": 1, "backward_stages": 2}, "mobius needs F = B.*not F = 1 and B = 2"),
        ("spipe", {"forward_stages": 99}, "spipe needs at least as many backward.*not F = 99 and B = any"),
    ],
)
def test_stages_that_a_schedule_does_not_have(schedule: str, stages: dict[str, int], reason: str) -> None:
    case: Case = ("tiny", load_hardware("laptop"), {"global_batch": 4, "sequence": 64, "schedules": [schedule]})
    error = failure(case, **stages)
    assert re.search(reason, str(error))
    assert error.advice


def test_where_nothing_helps_it_says_so() -> None:
    case: Case = ("tiny", load_hardware("laptop"), {"global_batch": 3, "sequence": 64, "schedules": ["gpipe"]})
    error = failure(case, backward_stages=1, forward_stages=1, num_ranks=1, max_rank_bytes=1, max_host_bytes=1)
    assert "short of" in str(error)


def test_without_advice_nothing_else_is_tried() -> None:
    case: Case = ("tiny", load_hardware("laptop"), {"global_batch": 4, "sequence": 64, "max_host_bytes": 1e7, **SPIPE})
    error = failure(case, advise=False)
    assert error.advice == []
    assert "short of" in str(error)
