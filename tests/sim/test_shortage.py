"""What is known to be short of memory without lowering is short of it; what is known to need much needs it."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spipe.hardware import load_hardware
from spipe.layer_list import LayerListSpec, LayerSpec
from spipe.memory import memory
from spipe.model import load_model
from spipe.sim import search
from spipe.sim.advice import NoPlanError
from spipe.sim.judge import fitting
from spipe.sim.shortage import LeastMemory
from spipe.sim.space import make_space
from spipe.tensors import TensorSpec

TINY = load_model("tiny")
SPACES = [
    make_space(model, load_hardware(hardware), global_batch=4, sequence=64, schedules=schedules, **more)
    for model, hardware, schedules, more in (
        (TINY, "h200x4", ["spipe", "mobius", "1f1b"], {}),
        (TINY, "laptop", ["spipe", "gpipe"], {"num_ranks": [1, 2, 3]}),
        (TINY, "v100x4", ["roundpipe", "pipeoffload"], {"num_ranks": [2, 4]}),
        (TINY.replace(tied_embeddings=True), "h200x4", ["spipe"], {}),
        (TINY, "h200x4", ["spipe"], {"options": {"bucket_layers": 0}, "gradient_precision": "fp32"}),
    )
]


@st.composite
def small_memories(draw: st.DrawFn) -> tuple[Any, Any]:
    """A job with memory limits near what one of its candidates needs, and that candidate."""
    space = draw(st.sampled_from(SPACES))
    candidate = draw(st.sampled_from(space.candidates({})))
    report = memory(space.job.plan(candidate))
    factors = st.floats(0.3, 1.1)
    job = replace(
        space.job,
        max_rank_bytes=draw(factors) * max(report.rank_bytes),
        max_host_bytes=draw(factors) * max(report.host_bytes),
    )
    return job, candidate


@given(small_memories())
@settings(max_examples=20, deadline=None)
def test_what_fits_may_fit(case: tuple[Any, Any]) -> None:
    job, candidate = case
    least = LeastMemory(job)
    _, report = fitting(job, candidate)
    if report.fits:
        assert least.may_fit(candidate)
    bytes_of_ranks = least.rank_bytes(candidate.layout, candidate.microbatch_size)
    assert all(a <= b for a, b in zip(bytes_of_ranks, memory(job.plan(candidate)).rank_bytes, strict=True))


@pytest.mark.parametrize("limits", [{"max_rank_bytes": 2**20}, {"max_host_bytes": 2**22}])
def test_little_is_lowered_where_nothing_fits(limits: dict[str, float]) -> None:
    with pytest.raises(NoPlanError, match="short of") as caught:
        search(load_model("tiny"), load_hardware("h200x4"), global_batch=8, sequence=256, **limits)
    assert any("limit" in advice.words for advice in caught.value.advice)


def _layers(number: int) -> LayerListSpec:
    layer = LayerSpec(
        name="Linear", parameters={"weight": (64, 64)}, output=(16, 64), forward_flops=1e6, saved_elements=2048
    )
    tensor = TensorSpec(shape=(16, 64), dtype="float")
    return LayerListSpec(layers=(layer,) * number, input=tensor, target=tensor, sequence=16)


@pytest.mark.parametrize("number", [1, 8])
def test_lists_of_layers_that_do_not_fit_are_told_so(number: int) -> None:
    arguments: dict[str, Any] = {"global_batch": 4, "sequence": 16, "num_ranks": 1, "precision": "fp32"}
    search(_layers(number), load_hardware("h200x1"), **arguments)
    with pytest.raises(NoPlanError, match="short of"):
        search(_layers(number), load_hardware("h200x1"), max_host_bytes=2**14, **arguments)
