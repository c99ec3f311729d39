"""Recorded stages on a pretended CUDA: what is replayed, in any order of keys, is what plain autograd computes."""

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from spipe.plan import Plan
from spipe.runtime import recorded
from spipe.runtime.job import Job
from spipe.runtime.rank import run_rank
from spipe.runtime.recorded import RecordedStages


class Again:
    """Stands for a graph: runs its body again for each replay."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay


def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Recording does nothing but keep the body; returns what was recorded."""
    made: list[str] = []

    def record(self: RecordedStages, body: Callable[[], Any]) -> Again:
        made.append(body.__qualname__)
        if not body.__qualname__.endswith("back"):  # a recording runs no kernel, but this would add up gradients
            body()

        def replay() -> None:
            with torch.no_grad():
                for output, result in zip(self._outputs, body(), strict=False):
                    output.copy_(result)

        return Again(replay)

    monkeypatch.setattr(RecordedStages, "_record", record)
    return made


def test_replayed_stages_compute_what_autograd_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pretended(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    slots = [torch.randn((4, 4), generator=generator).requires_grad_() for _ in range(2)]
    slabs = [torch.zeros((4, 4)) for _ in slots]
    stages = RecordedStages(torch.empty(3, 4), 2, nullcontext)

    def layer(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight)

    for _ in range(3):
        for slot, (weight, slab) in enumerate(zip(slots, slabs, strict=True)):
            with torch.no_grad():
                weight.copy_(torch.randn((4, 4), generator=generator))  # a slot gets other weights
            x, dy = (torch.randn((3, 4), generator=generator) for _ in range(2))
            with torch.no_grad():
                y, inside = stages.forward(slot, x, lambda x, w=weight: [layer(w, layer(w, x)), layer(w, x)])
            assert torch.equal(y, layer(weight, layer(weight, x)).detach())
            assert torch.equal(inside, layer(weight, x).detach())

            def accumulate(y: torch.Tensor, dy: torch.Tensor, weight: Any = weight, slab: Any = slab) -> None:
                weight.grad = slab
                torch.autograd.backward(y, dy)
                weight.grad = None

            stages.recompute(slot, x, lambda x, w=weight: layer(w, x), accumulate)
            before = slab.clone()
            dx = stages.backward(slot, dy)
            x_leaf, w_leaf = x.clone().requires_grad_(), weight.detach().clone().requires_grad_()
            layer(w_leaf, x_leaf).backward(dy)
            assert x_leaf.grad is not None
            assert w_leaf.grad is not None
            assert torch.equal(dx, x_leaf.grad)
            torch.testing.assert_close(slab, before + w_leaf.grad)
    assert len(made) == 2 * 3


def test_recording_keeps_only_its_own_thread_from_what_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            calls.append(options)

        def capture_end(self) -> None:
            calls.append("end")

        def replay(self) -> None:
            calls.append("replay")

    monkeypatch.setattr(recorded, "cuda", SimpleNamespace(CUDAGraph=Graph))
    stages = RecordedStages(torch.empty(2, 2), 1, nullcontext)
    stages.forward("key", torch.ones(2, 2), lambda x: [x + 1])
    stages.forward("key", torch.ones(2, 2), lambda x: [x + 1])
    assert calls == [{"pool": None, "capture_error_mode": "thread_local"}, "end", "replay", "replay"]

    def failing(x: torch.Tensor) -> list[torch.Tensor]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        stages.forward("other", torch.ones(2, 2), failing)
    assert calls[-1] == "end"  # or nothing could run on the stream any more


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "forward", "backward", "fields"),
    [
        (1, "spipe", 2, 4, {}),
        (1, "spipe", 3, 3, {"precision": "bf16", "gradient_precision": "fp32"}),
        (1, "mobius", 3, 3, {"options": {"stage_input_route": "host"}}),
        (1, "spipe", 4, 6, {"options": {"device_layers": 2, "stage_input_route": "host"}}),
        (1, "spipe", 2, 4, {"options": {"recompute": "late"}}),
        (2, "spipe", 2, 3, {}),
        (2, "1f1b", 2, 2, {}),
    ],
    ids=str,
)
def test_a_run_whose_ops_are_replayed_has_the_same_bits(
    small_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    num_ranks: int, schedule: str, forward: int, backward: int, fields: dict[str, Any],
) -> None:  # fmt: skip
    """On the CPU, whose plans may not say so: every handler of a run, with ranks as threads of this process."""
    made = pretended(monkeypatch)
    plan = small_plan(num_ranks, schedule, forward, backward, 4, **fields)
    found = []
    for records in (False, True):
        output = tmp_path / str(records)
        output.mkdir()
        job = Job(plan.model_copy(update={"cuda_graphs": records}), 4, output, dump_state=output / "state.pt")
        store, failures = HashStore(), []

        def rank(number: int, job: Job = job, store: Any = store, failures: list[Exception] = failures) -> None:
            try:
                run_rank(job, number, store, lambda row: None)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        found.append((json.loads((output / "result.json").read_text())["losses"], torch.load(output / "state.pt")))
    (losses, state), (replayed_losses, replayed_state) = found
    assert replayed_losses == losses
    assert state.keys() == replayed_state.keys()
    assert all(torch.equal(value, replayed_state[name]) for name, value in state.items())
    names = {name.rpartition(".")[2] for name in made}
    assert names == {"body", "again", "back"}
