"""Rank processes that a test session starts once, and small plans for them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from spipe.hardware import load_hardware
from spipe.model import ModelSpec
from spipe.plan import Plan, make_plan
from spipe.runtime import RankProcesses, RunResult, run

SMALL = ModelSpec(name="small", num_layers=6, hidden_size=32, ffn_size=80, num_heads=4, num_kv_heads=2, vocab_size=256)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[], RankProcesses]]:
    pool: list[RankProcesses] = []

    def usable() -> RankProcesses:
        if not pool or not pool[-1].usable:
            pool.append(RankProcesses(4))
        return pool[-1]

    yield usable
    for processes in pool:
        processes.close()


@pytest.fixture
def run_plan(rank_pool: Callable[[], RankProcesses], tmp_path: Path) -> Callable[..., RunResult]:
    """Runs a plan in the session's processes; the state after the last step is in ``state.pt`` of the run."""

    def start(plan: Plan, steps: int = 10, output: Path | None = None, **options: Any) -> RunResult:
        output = output or tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        options = {"timeout_s": 30.0, "dump_state": output / "state.pt", **options}
        return run(plan, steps=steps, output=output, ranks=rank_pool(), **options)

    return start


@pytest.fixture
def small_plan() -> Callable[..., Plan]:
    """``small_plan(ranks, schedule, forward, backward, microbatches, ...)``."""

    def make(
        num_ranks: int = 2,
        schedule: str = "spipe",
        forward: int = 1,
        backward: int = 2,
        microbatches: int = 4,
        model: ModelSpec = SMALL,
        tied: bool = False,
        split: bool = False,
        **fields: Any,
    ) -> Plan:
        fields = {"precision": "fp32", "sequence": 32, "microbatch_size": 2, **fields}
        return make_plan(
            model.replace(tied_embeddings=tied or model.tied_embeddings, split_blocks=split or model.split_blocks),
            fields.pop("hardware", None) or load_hardware("laptop"),
            schedule=schedule,
            num_ranks=num_ranks,
            forward_stages=forward,
            backward_stages=backward,
            global_batch=microbatches * fields["microbatch_size"],
            **fields,
        )

    return make
