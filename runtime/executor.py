"""The executor: one thread per lane of a rank, running the lane's part of the program step after step.

An op waits for its dependencies of this step and of the one before (``carried``), runs its handler and raises its flag
to step + 1. Flags lie in memory that all ranks of the host share, so a dependency on another rank is waited for like
any other. Lanes are never synchronised otherwise: there is no end of a step, only its VALIDATE.
"""

import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, takewhile
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray

from spipe._native import AbortedError, Flags
from spipe.errors import SpipeError
from spipe.ops import Kind
from spipe.program import Program
from spipe.runtime.devices import Device
from spipe.runtime.failure import AbortedRunError
from spipe.runtime.handlers import Handlers
from spipe.runtime.hooks import NO_HOOKS, TestHooks
from spipe.runtime.store import NOTES, Store

_SCAN_S = 0.05
_REMOTE_SCAN_S = 0.001
_ABORT_S = 5.0


@dataclass(frozen=True)
class _Wait:
    """Flags an op waits for: it may start in step t once flag ``indices[i]`` is at least ``offsets[i] + t``."""

    indices: NDArray[np.int64]
    offsets: NDArray[np.int64]
    pairs: tuple[tuple[int, int], ...]


class Executor:
    """Runs one rank's ops for a number of steps."""

    def __init__(
        self, program: Program, rank: int, store: Store, device: Device, handlers: Handlers, *,
        steps: int, traced_from: int, hooks: TestHooks, continues: Callable[[int, int], bool] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.rank, self.store, self.flags = program, rank, store, store.flags
        self.device, self.handlers, self.hooks = device, handlers, hooks
        self.traced_from = traced_from
        self.continues = continues or (lambda lane, step: step < steps)
        """Whether a lane is to run a step; asked before it, and may wait."""
        self.lanes: dict[int, list[int]] = {}
        for i in program.of_rank(rank):
            self.lanes.setdefault(program.lane[i], []).append(i)
        self.waits = {i: self._wait_of(i) for i in program.of_rank(rank)}
        self.bells = {lane: threading.Event() for lane in self.lanes if program.lanes[lane].discipline == "deadline"}
        self.rings = self._find_rings()
        self.finished = 0
        self._lock = threading.Lock()

    def _wait_of(self, i: int) -> _Wait:
        """Dependencies of an op; earlier ops of its own in-order lane need no flag."""
        program, lane = self.program, self.program.lane[i]
        in_order = program.lanes[lane].discipline == "in order"
        pairs = [(d, 1) for d in program.dependencies[i] if not (in_order and self._mine(d, lane))]
        pairs += [(d, 0) for d in program.carried[i] if not (in_order and self._mine(d, lane))]
        indices, offsets = (
            np.array(column, dtype=np.int64) for column in (zip(*pairs, strict=True) if pairs else ([], []))
        )
        return _Wait(indices, offsets, tuple(pairs))

    def _mine(self, i: int, lane: int) -> bool:
        return self.program.lane[i] == lane and self.program.rank[i] == self.rank

    def _find_rings(self) -> dict[int, list[threading.Event]]:
        """Per op: the bells of the lanes that choose among ready ops and have one that waits for it."""
        rings: dict[int, list[threading.Event]] = {}
        for lane, bell in self.bells.items():
            for i in self.lanes[lane]:
                for dependency, _ in self.waits[i].pairs:
                    if bell not in rings.setdefault(dependency, []):
                        rings[dependency].append(bell)
        return rings

    def run(self) -> None:
        """Run all steps. Raises AbortedRunError if this or another rank had to stop; the reason is in the store."""
        threads = [
            threading.Thread(target=self._lane, args=(lane,), name=f"lane {self.program.lanes[lane]}", daemon=True)
            for lane in self.lanes
        ]
        for thread in threads:
            thread.start()
        give_up = inf
        while running := [thread for thread in threads if thread.is_alive()]:
            aborted = self.flags.get(self.store.layout.abort)
            running[0].join(0.05 if aborted else 0.5)
            if aborted:
                # Again and again: what is let go on a device can be followed by another wait.
                self.handlers.transport.release()
                give_up = min(give_up, time.monotonic() + _ABORT_S)
                if time.monotonic() > give_up:
                    break  # a lane that does not come back (a blocked socket) ends with the process
        if self.flags.get(self.store.layout.abort):
            self.device.run_dry(self.handlers.transport.release, _ABORT_S)
            raise AbortedRunError

    def _lane(self, lane: int) -> None:
        current = [self.lanes[lane][0], 0]
        try:
            self.device.open_lane(lane)
            in_order = self.program.lanes[lane].discipline == "in order"
            for step in takewhile(lambda step: self.continues(lane, step), count()):
                (self._in_order if in_order else self._by_deadline)(lane, step, current)
            self.device.finish_lane()
        except AbortedError:
            pass
        except BaseException as error:
            self.fail(lane, current, error)

    def fail(self, lane: int, current: list[int], error: BaseException) -> None:
        """Tell all ranks why the run cannot go on."""
        op, step = current
        reason = f"{type(error).__name__}: {error}" if not isinstance(error, SpipeError) else str(error)
        if isinstance(error, torch.OutOfMemoryError):
            reason = self.device.out_of_memory(self.handlers.plan, self.rank, error)
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.store.write_error(
            self.rank,
            f"rank {self.rank}, lane {self.program.lanes[lane]}, {self.program.op(op)} of step {step}: {reason} "
            f"({os.path.basename(where.filename)}:{where.lineno})",
        )
        self.flags.abort(self.store.layout.abort)

    def _in_order(self, lane: int, step: int, current: list[int]) -> None:
        abort = self.store.layout.abort
        for op in self.lanes[lane]:
            current[:] = op, step
            wait = self.waits[op]
            if wait.pairs:
                self.flags.wait_many(wait.indices, wait.offsets + step, inf, abort)
            self._perform(op, step)

    def _by_deadline(self, lane: int, step: int, current: list[int]) -> None:
        """Of the ops whose dependencies are done, the one with the smallest priority."""
        waiting = sorted(self.lanes[lane], key=lambda op: (self.program.priority[op], op))
        bell = self.bells[lane]
        remote = any(self.program.rank[d] != self.rank for op in waiting for d, _ in self.waits[op].pairs)
        while waiting:
            bell.clear()
            ready = next((op for op in waiting if self._is_ready(op, step)), -1)
            if ready < 0:
                if self.flags.get(self.store.layout.abort):
                    raise AbortedError
                bell.wait(_REMOTE_SCAN_S if remote else _SCAN_S)
                continue
            waiting.remove(ready)
            current[:] = ready, step
            self._perform(ready, step)

    def _is_ready(self, op: int, step: int) -> bool:
        get = self.flags.get
        return all(get(d) >= offset + step for d, offset in self.waits[op].pairs)

    def _perform(self, op: int, step: int) -> None:
        if self.flags.get(self.store.layout.abort):
            raise AbortedError
        if self.hooks != NO_HOOKS:
            self._apply_hooks(op, step)
        traced = step >= self.traced_from
        kind = self.program.kind[op]
        self.device.prepare(op, step)
        start, cpu = time.monotonic(), time.thread_time()
        self.device.begin(op, step, traced)
        note = self.handlers.by_kind[kind](op, step)
        self.device.end(op, step, traced)
        end = time.monotonic()
        if kind == Kind.VALIDATE:
            self.store.step_ends[step + 1, self.rank] = end
            self.device.mark_step(step, traced)
        if traced:
            cpu_s = self.handlers.settlement.cpu_seconds if kind == Kind.STEP else time.thread_time() - cpu
            self.store.times[step - self.traced_from, op] = start, end, cpu_s, NOTES.index(note or "")
        self.flags.set(op, step + 1)
        for bell in self.rings.get(op, ()):
            bell.set()

    def _apply_hooks(self, op: int, step: int) -> None:
        hooks = self.hooks
        if hooks.delay_s:
            time.sleep(hooks.delay(random.Random(op * 7919 + step)))
        if hooks.kill == (self.rank, step):
            os.kill(os.getpid(), signal.SIGKILL)
        if hooks.fail == (self.rank, step, str(self.program.op(op))):
            raise RuntimeError("a failure that a test asked for")
        if hooks.hang == (self.rank, step, str(self.program.op(op))):
            while not self.flags.get(self.store.layout.abort):
                time.sleep(0.01)
            raise AbortedError


def pending_ops(program: Program, flags: Flags) -> list[str]:
    """Per rank and lane, the op that has not been done: what a hang is about."""
    done = [flags.get(i) for i in range(len(program))]
    lanes: dict[tuple[int, int], list[int]] = {}
    for i in range(len(program)):
        lanes.setdefault((program.rank[i], program.lane[i]), []).append(i)
    lines = []
    for (rank, lane), ops in sorted(lanes.items()):
        step = min(done[i] for i in ops)
        op = next(i for i in ops if done[i] == step)
        unmet = [d for d in program.dependencies[op] if done[d] <= step]
        unmet += [d for d in program.carried[op] if done[d] < step]
        why = f"waits for {program.op(unmet[0])} of rank {program.rank[unmet[0]]}" if unmet else "has all it needs"
        lines.append(f"rank {rank}, {program.lanes[lane]}: {program.op(op)} of step {step} {why}")
    return lines


class Watchdog:
    """Ends a run in which no op of any rank has completed for ``timeout_s``, or whose peer process is gone."""

    def __init__(
        self, program: Program, rank: int, store: Store, steps: int, timeout_s: float, pids: list[int]
    ) -> None:
        self.program, self.rank, self.store, self.steps = program, rank, store, steps
        # Rank 0 speaks first; the others only if it does not.
        self.timeout_s = timeout_s + 5.0 * min(rank, 1)
        self.pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        program, flags = self.program, self.store.flags
        last, since = -1, time.monotonic()
        while not self._stop.wait(min(0.5, self.timeout_s / 4)):
            done = sum(flags.get(i) for i in range(len(program)))
            now = time.monotonic()
            if done != last:
                last, since = done, now
            reason = self._dead_peer()
            if not reason and now - since > self.timeout_s:
                lanes = "\n  ".join(pending_ops(program, flags))
                reason = f"no op of any rank completed for {self.timeout_s:.0f} s; every lane's pending op:\n  {lanes}"
            if reason:
                self.store.write_error(self.rank, reason)
                flags.abort(self.store.layout.abort)
                return

    def _dead_peer(self) -> str:
        for peer, pid in enumerate(self.pids):
            if peer != self.rank and pid and not _is_alive(pid) and not self._has_finished(peer):
                return f"rank {peer} (process {pid}) has ended before its work was done"
        return ""

    def _has_finished(self, rank: int) -> bool:
        own = self.program.of_rank(rank)
        return all(self.store.flags.get(i) >= self.steps for i in own)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
