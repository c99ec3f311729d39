"""The differences between running on CPU threads and on a CUDA device, in one place.

A lane is a thread. On the CPU an op is done when its handler returns. On CUDA a GPU lane is a thread and a stream: its
ops are *issued* by the thread, and their flag means "the event that marks the end is recorded". A lane that needs the
op waits for the event: its stream does if it is a GPU lane, its thread if it is a CPU lane. An op that another rank
depends on raises its flag only when it is done.

Events are kept for two steps: an op of step t + 2 is issued only after everything that waits for its event of step t
has been issued, because every op of a step depends on a VALIDATE or on slots of the step before.
"""

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch

from spipe import _native
from spipe.errors import SpipeError
from spipe.memory import memory
from spipe.ops import COMPUTE
from spipe.plan import Plan
from spipe.program import Program
from spipe.runtime.region import Region, Span, bytes_of
from spipe.runtime.store import Store

cuda: Any = torch.cuda  # much of it has no types
GPU_LANES = frozenset({"compute", "h2d", "d2h", "h2d_in", "d2h_in", "p2p", "p2p_in", "device_step"})
_REGISTER_BYTES = 16 << 30
_LAYERS_AHEAD = 10  # with less than a hundred launches each
_SWITCH_S = 1e-4  # how long another thread's Python may keep the one that launches kernels waiting


class Device(Protocol):
    """What executor and handlers need of a device; every method is called in the thread of the lane it is about."""

    device: torch.device
    summary: str

    def open_lane(self, lane: int) -> None:
        """Called once at the start of a lane's thread."""

    def prepare(self, op: int, step: int) -> None:
        """Wait, before the op's time begins, for whatever keeps its thread from going on at once."""

    def begin(self, op: int, step: int, traced: bool) -> None:
        """Make what follows in this lane wait for the op's dependencies (whose flags are raised)."""

    def end(self, op: int, step: int, traced: bool) -> None:
        """Mark the op's end; after this its flag may be raised."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between equal contiguous tensors, in the order of the lane."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The lane is about to read a tensor that the compute lane allocated and drops before the read is done."""

    def finish_lane(self) -> None:
        """Wait for the lane's copies so far."""

    def statistics(self, gradient: torch.Tensor, dtype: str) -> Callable[[], tuple[bool, float]]:
        """Non-finite flag and sum of squares of a gradient on the device, to be asked for after the op is done."""

    def mark_step(self, step: int, traced: bool) -> None:
        """A VALIDATE has ended: tie the device's clock to the host's."""

    def run_dry(self, release: Callable[[], None], timeout_s: float) -> None:
        """After an abort: let what is queued run out, ``release`` being called until it has, or time is up.

        Memory that the device still waits for must not be unmapped.
        """

    def resolve_times(self, store: Store, first_step: int) -> None:
        """Replace the times of traced ops by the device's own."""

    def register(self, region: Region, span: Span) -> str | None:
        """Page-lock a part of the region; what went wrong, if it cannot be."""

    def require_memory(self, items: Mapping[str, int], sharers: int) -> None:
        """Raises SpipeError unless the device has room for what ``sharers`` ranks put on it."""

    def out_of_memory(self, plan: Plan, rank: int, error: BaseException) -> str:
        """What to say when an allocation failed: what the plan gave each item, and what to change."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Ops are recorded inside: what they allocate is never given back, and comes on top of all else."""

    def peak_bytes(self) -> tuple[int, int]:
        """Most memory of its own that the device had in use and reserved; 0 if it has none."""

    def close(self) -> None:
        """Release what the device holds."""


class CpuDevice:
    """Ranks that compute on CPU threads."""

    def __init__(self, compute_threads: int) -> None:
        self.device = torch.device("cpu")
        self.compute_threads = compute_threads
        self.summary = f"cpu, {compute_threads} compute thread{'s' * (compute_threads > 1)} a rank"

    def open_lane(self, lane: int) -> None:
        # Launchers export OMP_NUM_THREADS; the number is part of the plan because it changes bits.
        torch.set_num_threads(self.compute_threads)

    def prepare(self, op: int, step: int) -> None: ...

    def begin(self, op: int, step: int, traced: bool) -> None: ...

    def end(self, op: int, step: int, traced: bool) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        _native.copy(target.data_ptr(), source.data_ptr(), bytes_of(target))

    def keep(self, tensor: torch.Tensor) -> None: ...

    def finish_lane(self) -> None: ...

    def statistics(self, gradient: torch.Tensor, dtype: str) -> Callable[[], tuple[bool, float]]:
        result = _native.gradient_statistics(None, gradient.data_ptr(), dtype, gradient.numel())
        return lambda: result

    def mark_step(self, step: int, traced: bool) -> None: ...

    def run_dry(self, release: Callable[[], None], timeout_s: float) -> None: ...

    def resolve_times(self, store: Store, first_step: int) -> None: ...

    def register(self, region: Region, span: Span) -> str | None:
        return None

    def require_memory(self, items: Mapping[str, int], sharers: int) -> None: ...  # counted as host memory

    def out_of_memory(self, plan: Plan, rank: int, error: BaseException) -> str:
        return f"out of memory: {error}"

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def peak_bytes(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None: ...


class LookAhead:
    """How far ops are issued ahead of the device.

    The driver's queue holds about a thousand launches. Whoever finds it full waits inside the driver, with its locks
    and perhaps with Python's: nothing else of the process goes on then, and if the device waits for a rank that is
    gone, this never ends. So the lane waits for an earlier op instead, where it holds nothing.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._issued: deque[tuple[Any, int]] = deque()
        self._total = 0

    def make_room(self, size: int) -> None:
        """Wait until an op of this size can be issued. One op at least stays ahead, so that the device never waits."""
        while len(self._issued) > 1 and self._total + size > self.limit:
            event, old = self._issued.popleft()
            event.synchronize()
            self._total -= old

    def issued(self, event: Any, size: int) -> None:
        """An op was issued; the event marks its end."""
        self._issued.append((event, size))
        self._total += size


class CudaDevice:
    """Ranks that compute on a CUDA device: a stream per GPU lane."""

    def __init__(self, program: Program, rank: int, index: int, memory_bytes: float) -> None:
        require_device("cuda")
        if index >= cuda.device_count():
            raise SpipeError(f"rank {rank} should use CUDA device {index}, but there are {cuda.device_count()}")
        self.device = torch.device("cuda", index)
        cuda.set_device(self.device)
        cuda.synchronize(self.device)  # makes the context before any thread does
        self.summary = f"cuda:{index}, {cuda.get_device_name(index)}"
        total = cuda.mem_get_info(self.device)[1]
        self.memory_bytes = min(memory_bytes, total)
        if memory_bytes < 0.99 * total:  # the plan is for a smaller device: hold it to that
            cuda.set_per_process_memory_fraction(memory_bytes / total, self.device)
            self.summary += f", limited to {memory_bytes / 2**30:.1f} GiB"
        self._streams = {
            lane: cuda.Stream(self.device)
            for lane in {program.lane[i] for i in program.of_rank(rank)}
            if program.lanes[lane].name in GPU_LANES
        }
        self._lane_of = program.lane
        self._layers = {
            i: len(program.layers(program.stage[i])) for i in program.of_rank(rank) if program.kind[i] in COMPUTE
        }
        self._ahead = LookAhead(_LAYERS_AHEAD)
        self._events: list[dict[int, Any]] = [{}, {}]
        self._traced: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._waits = self._find_waits(program, rank)
        self._settled = self._find_settled(program, rank)
        self._clock: dict[int, tuple[Any, float]] = {}
        self._registered: list[int] = []
        self._peak = self._recorded = 0
        self.mark_step(-1, True)

    def _find_waits(self, program: Program, rank: int) -> dict[int, list[tuple[int, int]]]:
        """Per op of this rank: (op, 0 or 1 steps back) on the rank's other GPU lanes that it depends on."""
        waits = {}
        for i in program.of_rank(rank):
            before = [(d, 0) for d in program.dependencies[i]] + [(d, 1) for d in program.carried[i]]
            waits[i] = [
                (d, back)
                for d, back in before
                if program.rank[d] == rank and program.lane[d] in self._streams and program.lane[d] != program.lane[i]
            ]
        return waits

    def _find_settled(self, program: Program, rank: int) -> set[int]:
        """Ops on GPU lanes of this rank that an op of another rank depends on."""
        return {
            d
            for i in range(len(program))
            if program.rank[i] != rank
            for d in (*program.dependencies[i], *program.carried[i])
            if program.rank[d] == rank and program.lane[d] in self._streams
        }

    def open_lane(self, lane: int) -> None:
        cuda.set_device(self.device)
        if lane in self._streams:
            cuda.set_stream(self._streams[lane])

    def prepare(self, op: int, step: int) -> None:
        if op in self._layers:
            self._ahead.make_room(self._layers[op])
        if self._lane_of[op] not in self._streams:  # what was issued for it may not have run yet
            for event in self._awaited(op, step):
                event.synchronize()

    def _awaited(self, op: int, step: int) -> Iterator[Any]:
        for dependency, back in self._waits[op]:
            if step >= back:
                yield self._events[(step - back) % 2][dependency]

    def begin(self, op: int, step: int, traced: bool) -> None:
        stream = self._streams.get(self._lane_of[op])
        if stream is None:
            return
        for event in self._awaited(op, step):
            stream.wait_event(event)
        if traced:
            pair = (
                cuda.Event(enable_timing=True, blocking=True),
                cuda.Event(enable_timing=True, blocking=True),
            )
            pair[0].record(stream)
            self._traced[step, op] = pair

    def end(self, op: int, step: int, traced: bool) -> None:
        stream = self._streams.get(self._lane_of[op])
        if stream is None:
            return
        events = self._events[step % 2]
        if traced:
            event = events[op] = self._traced[step, op][1]
        else:
            if op not in events or (step - 2, op) in self._traced:
                events[op] = cuda.Event(blocking=True)
            event = events[op]
        event.record(stream)
        if op in self._layers:
            self._ahead.issued(event, self._layers[op])
        if op in self._settled:
            event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        host = source if source.device.type == "cpu" else target
        first, stop, size = host.data_ptr(), host.data_ptr() + bytes_of(host), host.element_size()
        # A copy must not reach from one page-locked piece into the next.
        cuts = [0, *((cut - first) // size for cut in self._registered if first < cut < stop), host.numel()]
        if len(cuts) > 2:
            target, source = target.view(-1), source.view(-1)
            for begin, end in pairwise(cuts):
                target[begin:end].copy_(source[begin:end], non_blocking=True)
        else:
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor) -> None:
        # Waiting for the producer here bounds how far the compute lane issues ahead of its messages, and so how many
        # dropped tensors the allocator has to hold back.
        self.finish_lane()
        tensor.record_stream(cuda.current_stream(self.device))

    def finish_lane(self) -> None:
        # By an event, because a thread that waits for a stream keeps a core busy, which the optimizer has a use for.
        event = cuda.Event(blocking=True)
        event.record(cuda.current_stream(self.device))
        event.synchronize()

    def statistics(self, gradient: torch.Tensor, dtype: str) -> Callable[[], tuple[bool, float]]:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        result = torch.empty((), dtype=torch.float32, pin_memory=True)
        result.copy_(norm, non_blocking=True)

        def ask() -> tuple[bool, float]:
            value = float(result)
            return not abs(value) < float("inf"), value * value

        return ask

    def mark_step(self, step: int, traced: bool) -> None:
        if traced:
            event = cuda.Event(enable_timing=True, blocking=True)
            event.record(cuda.current_stream(self.device))
            event.synchronize()
            self._clock[step] = event, time.monotonic()

    def run_dry(self, release: Callable[[], None], timeout_s: float) -> None:
        give_up = time.monotonic() + timeout_s
        with contextlib.suppress(RuntimeError):  # a device that has failed has nothing queued
            while time.monotonic() < give_up and not all(stream.query() for stream in self._streams.values()):
                release()
                time.sleep(0.001)

    def resolve_times(self, store: Store, first_step: int) -> None:
        cuda.synchronize(self.device)
        for (step, op), (start, end) in self._traced.items():
            reference, host_s = self._clock.get(step, self._clock[-1])
            row = store.times[step - first_step, op]
            row[2] = row[1] - row[0]  # as the host saw it: the time that it took to issue the op, events included
            row[0] = host_s + reference.elapsed_time(start) * 1e-3
            row[1] = row[0] + start.elapsed_time(end) * 1e-3

    def register(self, region: Region, span: Span) -> str | None:
        runtime = cuda.cudart()
        cuda.set_device(self.device)
        first, stop = region.pointer(span), region.pointer(span) + span.num_bytes
        for pointer in range(first, stop, _REGISTER_BYTES):
            code = runtime.cudaHostRegister(pointer, min(_REGISTER_BYTES, stop - pointer), 0)
            if int(code) != 0:
                self.close()
                with contextlib.suppress(RuntimeError):  # the failed call must not surface in a later one
                    torch.zeros(1, device=self.device)
                return (
                    f"page-locking {span.num_bytes / 2**30:.2f} GiB failed (CUDA error {int(code)}); copies go through "
                    "pageable memory and are slower; raise the memlock limit (ulimit -l)"
                )
            self._registered.append(pointer)
        return None

    def require_memory(self, items: Mapping[str, int], sharers: int) -> None:
        free, total = cuda.mem_get_info(self.device)
        free = min(free, self.memory_bytes)
        needed = sum(items.values()) * sharers
        if needed > free:
            rows = "\n".join(f"  {name:<28} {size / 2**30:10.3f} GiB" for name, size in items.items())
            raise SpipeError(
                f"{self.summary}: {sharers} rank{'s' * (sharers > 1)} need {needed / 2**30:.3f} GiB of device memory, "
                f"{free / 2**30:.3f} of {total / 2**30:.3f} GiB are free\n{rows}\n"
                "Use a smaller microbatch, finer stages or more ranks"
            )

    def out_of_memory(self, plan: Plan, rank: int, error: BaseException) -> str:
        items = memory(plan).ranks[rank]
        arena = "activations and temporaries"
        planned, in_use = sum(items.values()), int(cuda.memory_allocated(self.device))
        fixed = planned - items[arena]
        return (
            f"{self.summary} is out of memory: {in_use / 2**30:.3f} GiB are in use, of which the plan gives "
            f"{fixed / 2**30:.3f} GiB to buffers and {items[arena] / 2**30:.3f} GiB to {arena!r}, "
            f"{planned / 2**30:.3f} GiB in all; {max(in_use - fixed, 0) / 2**30:.3f} GiB of the latter were taken when "
            f"the allocation failed ({str(error).splitlines()[0]}). Use a smaller microbatch, finer backward stages, "
            "stage_input_route = host, fewer device_layers, or a larger --gpu-memory-limit"
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._peak = max(self._peak, int(cuda.max_memory_allocated(self.device)))
        before = int(cuda.memory_allocated(self.device))
        cuda.reset_peak_memory_stats(self.device)
        yield
        self._recorded = max(self._recorded, int(cuda.max_memory_allocated(self.device)) - before)
        cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> tuple[int, int]:
        in_use = max(self._peak, int(cuda.max_memory_allocated(self.device)))
        return in_use + self._recorded, int(cuda.max_memory_reserved(self.device))

    def close(self) -> None:
        runtime = cuda.cudart()
        for pointer in self._registered:
            runtime.cudaHostUnregister(pointer)
        self._registered.clear()


def start_autograd(device: torch.device) -> None:
    """Autograd's thread for the device gets its CUDA context now; matrix libraries warn if they need it first."""
    if device.type != "cpu":
        (torch.zeros(1, device=device, requires_grad=True) * 2).sum().backward()  # type: ignore[no-untyped-call]  # torch's


def set_deterministic(wanted: bool) -> None:
    """Only kernels that give the same bits every time, or (again) whichever are fastest; before CUDA's first use."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def require_device(kind: str) -> None:
    """Raises SpipeError if this machine has no such device."""
    if kind == "cuda" and not cuda.is_available():
        raise SpipeError(
            "the plan's hardware has device cuda, but PyTorch finds no CUDA device here (`spipe doctor` shows what is "
            "found); run it where there are GPUs, or make a plan for a cpu machine (`spipe search --hardware laptop`)"
        )


def make_device(plan: Plan, rank: int) -> Device:
    """The device of a rank. Ranks beyond the number of CUDA devices share them, round-robin."""
    if plan.hardware.device == "cpu":
        return CpuDevice(plan.compute_threads)
    set_deterministic(plan.deterministic)
    sys.setswitchinterval(_SWITCH_S)
    index = rank % max(cuda.device_count(), 1)
    return CudaDevice(plan.program(), rank, index, plan.hardware.accelerator.memory_bytes)


def ranks_per_device(plan: Plan) -> int:
    """The most ranks that share a device of this host."""
    if plan.hardware.device == "cpu":
        return 1
    num_devices: int = max(cuda.device_count(), 1)
    return -(-plan.layout.num_ranks // num_devices)
