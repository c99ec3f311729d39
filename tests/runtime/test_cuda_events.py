"""The CUDA device's events, on a pretended device: every wait is for the right op of the right step."""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spipe.hardware import load_hardware
from spipe.plan import Plan
from spipe.runtime import devices
from spipe.runtime.devices import GPU_LANES, CudaDevice, LookAhead
from spipe.runtime.executor import Executor
from spipe.runtime.hooks import NO_HOOKS
from spipe.runtime.job import Job
from spipe.runtime.region import Region
from spipe.runtime.store import Store

STEPS, TRACED_FROM = 9, 6


class FakeEvent:
    def __init__(self, **_: bool) -> None:
        self.label: tuple[int, int] | None = None
        self.recorded = 0

    def record(self, stream: object) -> None:
        self.recorded += 1
        self.after = set(waited_here())

    def synchronize(self) -> None:
        assert self.recorded, "waited for an event that was never recorded"
        waited_here().append(self.label)

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


class FakeStream:
    def __init__(self, device: object) -> None: ...

    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        raise AssertionError("a thread that waits for a stream keeps a core busy")

    def query(self) -> bool:
        return True


_waits = threading.local()


def waited_here() -> list[Any]:
    if not hasattr(_waits, "labels"):
        _waits.labels = []
    labels: list[Any] = _waits.labels
    return labels


def fake_cuda() -> SimpleNamespace:
    nothing = FakeStream(None)
    return SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=lambda device: None,
        synchronize=lambda device: None,
        get_device_name=lambda index: "pretended",
        mem_get_info=lambda device: (1 << 40, 1 << 40),
        set_per_process_memory_fraction=lambda fraction, device: None,
        set_stream=lambda stream: None,
        current_stream=lambda device: nothing,
        Stream=FakeStream,
        Event=FakeEvent,
    )


class WatchedDevice(CudaDevice):
    """Compares what the device waits for with what the program says."""

    def watch(self, program: Any, rank: int) -> None:
        self.program, self.rank, self.faults = program, rank, []  # type: ignore[var-annotated]

    def prepare(self, op: int, step: int) -> None:
        waited_here().clear()
        super().prepare(op, step)
        self.thread_waits = getattr(self, "thread_waits", 0) + len(waited_here())

    def begin(self, op: int, step: int, traced: bool) -> None:
        in_thread = len(waited_here())
        super().begin(op, step, traced)
        on_stream = self.program.lanes[self.program.lane[op]].name in GPU_LANES
        if len(waited_here()) > in_thread and not on_stream:
            self.faults.append((str(self.program.op(op)), step, "its thread waits inside the op's time"))
        program = self.program
        before = [(d, step) for d in program.dependencies[op]]
        before += [(d, step - 1) for d in program.carried[op] if step]
        expected = {
            (d, when)
            for d, when in before
            if program.rank[d] == self.rank
            and program.lanes[program.lane[d]].name in GPU_LANES
            and program.lane[d] != program.lane[op]
        }
        if set(waited_here()) != expected:
            self.faults.append((str(program.op(op)), step, sorted(waited_here()), sorted(expected)))
        if (step, op) in self._traced and self._traced[step, op][0].after != expected:  # waiting is not part of an op
            self.faults.append((str(program.op(op)), step, "its start is recorded before its waits"))

    def end(self, op: int, step: int, traced: bool) -> None:
        before = self._events[step % 2].get(op)
        if before is not None and not traced and (step - 2, op) not in self._traced:
            before.label = (op, step)  # recorded again, with the same object
        super().end(op, step, traced)
        if op in self._events[step % 2]:
            self._events[step % 2][op].label = (op, step)


@pytest.mark.parametrize("case", [("spipe", 2, 1, 3, 4), ("1f1b", 2, 2, 2, 4), ("spipe", 1, 2, 4, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"stage_input_route": "host", "barrier": True}, {"device_layers": 4}], ids=str)
def test_every_wait_is_for_the_right_event(
    small_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    monkeypatch.setattr(devices, "cuda", fake_cuda())
    monkeypatch.setattr(devices, "_LAYERS_AHEAD", 1 << 30)  # waits for the lane itself have a test of their own
    schedule, ranks, forward, backward, microbatches = case
    plan = small_plan(ranks, schedule, forward, backward, microbatches, tied=True, options=options)
    plan = plan.model_copy(update={"hardware": load_hardware("h200x2")})
    program = plan.program()
    layout = Job(plan, STEPS, Path("unused"), trace_steps=STEPS - TRACED_FROM).store_layout()
    store = Store(layout, Region.create(layout.num_bytes))
    arrived: dict[tuple[int, int], list[int]] = defaultdict(list)

    def handle(op: int, step: int) -> None:
        time.sleep(random.random() ** 8 * 0.003)
        partner = program.partner[op]
        if partner >= 0:  # a rendezvous: neither side ends before the other has begun
            arrived[min(op, partner), step].append(op)
            while len(arrived[min(op, partner), step]) < 2:
                time.sleep(1e-4)
        collective = next((members for members in program.collectives() if op in members), ())
        if collective:
            arrived[collective[0], step].append(op)
            while len(arrived[collective[0], step]) < len(collective):
                time.sleep(1e-4)

    handlers: Any = SimpleNamespace(by_kind=defaultdict(lambda: handle), settlement=SimpleNamespace(cpu_seconds=0.0))
    executors, watched = [], []
    for rank in range(ranks):
        device = WatchedDevice(program, rank, rank, 1e12)
        device.watch(program, rank)
        watched.append(device)
        executors.append(
            Executor(program, rank, store, device, handlers, steps=STEPS, traced_from=TRACED_FROM, hooks=NO_HOOKS)
        )
    threads = [threading.Thread(target=executor.run) for executor in executors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert store.first_error() == ""
    for device in watched:
        assert device.faults == []
        assert device.thread_waits > 0
        device.resolve_times(store, TRACED_FROM)
    assert torch.from_numpy(store.times[:, :, 1]).gt(0).all()


@pytest.mark.parametrize("sizes", [[1] * 40, [3, 9, 1, 30, 2, 2, 4, 12, 1, 1] * 4])
def test_ops_are_issued_ahead_of_the_device_only_so_far(sizes: list[int]) -> None:
    """Never more than the limit, unless it is one op and the one after it; and never less than one op ahead."""
    ahead, done, sizes_of = LookAhead(10), [], dict(enumerate(sizes))

    class Done:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            done.append(self.number)

    for number, size in sizes_of.items():
        ahead.make_room(size)
        running = [n for n in range(number) if n not in done]
        assert len(running) >= min(number, 1)
        assert sum(sizes_of[n] for n in running) + size <= 10 or len(running) <= 1
        if number and len(done) < number - 1:  # nothing was waited for without need
            assert sum(sizes_of[n] for n in [running[0] - 1, *running] if n >= 0) + size > 10 or running[0] == 0
        ahead.issued(Done(number), size)
    assert done == sorted(done)


def test_after_an_abort_waiting_streams_are_let_go_until_they_have_run_dry(
    small_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that are queued take a released counter back, so that once is not enough."""
    monkeypatch.setattr(devices, "cuda", fake_cuda())
    plan = small_plan(2).model_copy(update={"hardware": load_hardware("h200x2")})
    device = CudaDevice(plan.program(), 0, 0, 1 << 40)
    released: list[float] = []
    stuck = next(iter(device._streams.values()))
    monkeypatch.setattr(stuck, "query", lambda: len(released) >= 3, raising=False)
    device.run_dry(lambda: released.append(0.0), 60.0)
    assert len(released) == 3
    device.run_dry(lambda: released.append(0.0), 60.0)
    assert len(released) == 3
    monkeypatch.setattr(stuck, "query", lambda: False)
    begin = time.monotonic()
    device.run_dry(lambda: None, 0.05)
    assert time.monotonic() - begin < 5

    def failed() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(stuck, "query", failed)
    device.run_dry(lambda: None, 60.0)


def test_threads_wait_for_copies_without_keeping_a_core_busy(
    small_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, bool]] = []

    class Event(FakeEvent):
        def __init__(self, **options: bool) -> None:
            super().__init__(**options)
            made.append(options)

    monkeypatch.setattr(devices, "cuda", SimpleNamespace(**(vars(fake_cuda()) | {"Event": Event})))
    plan = small_plan(1).model_copy(update={"hardware": load_hardware("h200x2")})
    device = CudaDevice(plan.program(), 0, 0, 1 << 40)
    made.clear()
    device.finish_lane()
    device.keep(SimpleNamespace(record_stream=lambda stream: None))  # type: ignore[arg-type]
    assert made == [{"blocking": True}] * 2
