"""One rank's part of a run, from rendezvous to results. The same code under every launcher."""

import os
import resource
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from spipe import _native
from spipe.errors import SpipeError
from spipe.pause import objects_spared
from spipe.runtime.checkpoint import load_model, load_state, load_weights
from spipe.runtime.devices import make_device, ranks_per_device, start_autograd
from spipe.runtime.evaluation import Evaluation
from spipe.runtime.executor import Executor, Watchdog
from spipe.runtime.failure import AbortedRunError, RunFailedError
from spipe.runtime.handlers import Handlers
from spipe.runtime.huggingface import check_exportable
from spipe.runtime.job import Job
from spipe.runtime.region import Region
from spipe.runtime.rendezvous import KeyValueStore
from spipe.runtime.results import Reporter, evaluation_row, write_results
from spipe.runtime.session import Request, Session
from spipe.runtime.settlement import MasterState, Settlement
from spipe.runtime.store import DEVICE_ITEMS, Store
from spipe.runtime.transports import choose_transport, make_transport

Report = Callable[[dict[str, Any]], None]
_LAUNCHING_CORES = 2  # one for the compute lane, one for the copies and messages


def run_rank(job: Job, rank: int, rendezvous: KeyValueStore, report: Report, stop: Request | None = None) -> None:
    """Run one rank of a job on this host.

    Args:
        job: the same on every rank.
        rank: 0 .. ``job.num_ranks`` - 1.
        rendezvous: a key-value store shared by exactly the ranks of this job.
        report: called on rank 0 with every row of the metrics, and with lines worth showing (key ``message``).
        stop: set it to end the run after the steps in flight, with a checkpoint; only runs that save take notice.

    Raises:
        RunFailedError: with the reason, the same on all ranks.
    """
    store = _open_store(job, rank, rendezvous)
    try:
        _RankRun(job, rank, store, rendezvous, report, stop or threading.Event()).run()
    except (AbortedRunError, _native.AbortedError):
        pass
    except Exception as error:
        reason = str(error) if isinstance(error, SpipeError) else traceback.format_exc(limit=-3)
        store.write_error(rank, f"rank {rank}: {reason}")
        store.flags.abort(store.layout.abort)
    finally:
        store.region.close()
    if store.flags.get(store.layout.abort):
        raise RunFailedError(store.first_error() or "the run was aborted")


def default_optimizer_threads(device: str, num_ranks: int) -> int:
    """A rank's share of the cores; less those of the threads that launch kernels, which must never wait for a core."""
    cores = _native.features()["usable_cores"] // num_ranks
    return max(1, cores - _LAUNCHING_CORES if device == "cuda" and cores > 2 * _LAUNCHING_CORES else cores)


def _open_store(job: Job, rank: int, rendezvous: KeyValueStore) -> Store:
    """The shared region: made by rank 0, opened by the others."""
    layout = job.store_layout()
    if rank:
        address = rendezvous.get("region").decode()
        if address.startswith("error "):
            raise RunFailedError(address.removeprefix("error "))
        return Store(layout, Region.open(address))
    try:
        region = Region.create(layout.num_bytes)
        store = Store(layout, region)
    except Exception as error:
        rendezvous.set("region", f"error rank 0: {error}")
        raise RunFailedError(f"rank 0: {error}") from error
    rendezvous.set("region", region.address())
    return store


def _one_at_a_time(report: Report) -> Report:
    lock = threading.Lock()

    def locked(row: dict[str, Any]) -> None:
        with lock:
            report(row)

    return locked


class _RankRun:
    """One rank's parts, made one after the other, each with what it needs; then training, then results."""

    def __init__(
        self, job: Job, rank: int, store: Store, rendezvous: KeyValueStore, report: Report, stop: Request
    ) -> None:
        self.job, self.rank, self.store, self.rendezvous, self.stop = job, rank, store, rendezvous, stop
        self.plan, self.program, self.kind = job.plan, job.plan.program(), job.plan.hardware.device
        self.report = _one_at_a_time(report)
        self.threads = self.plan.optimizer_threads or default_optimizer_threads(self.kind, job.num_ranks)
        self.ready_s: dict[str, float] = {}
        """Seconds of every part of the start."""

    def run(self) -> None:
        parts = {
            "device": self.make_device,
            "pages": self.make_optimizer,
            "weights": self.fill_weights,
            "page-locking": self.lock_pages,
            "buffers and connections": self.connect,
        }
        for name, make in parts.items():
            began = time.monotonic()
            make()
            self.ready_s[name] = time.monotonic() - began
        self.train()
        self.finish()

    def make_device(self) -> None:
        sharers = ranks_per_device(self.plan)
        self.device = make_device(self.plan, self.rank)
        start_autograd(self.device.device)
        self.device.require_memory(self.job.memory().ranks[self.rank], sharers)
        self.transport_name = choose_transport(self.job.transport, self.kind, self.job.num_ranks, sharers > 1)

    def make_optimizer(self) -> None:
        """Masters, moments and undo memory, and this rank's share of the region's pages, made by the threads that
        will work on them."""
        store, span, num_ranks = self.store, self.store.layout.data_span, self.job.num_ranks
        store.region.advise_huge_pages()
        self.masters = MasterState(self.plan, self.rank, store, self.device.device)
        self.session = Session(self.job, self.program, self.rank, store, self.masters, self.stop, self.report)
        self.settlement = Settlement(
            self.plan, self.program, self.rank, store, self.masters, self.threads, self.job.hooks, self.session
        )
        share = span.num_bytes // num_ranks
        store.region.populate(span.offset + self.rank * share, share, self.threads)

    def fill_weights(self) -> None:
        job, masters, store = self.job, self.masters, self.store
        if job.checkpoint and self.rank == 0:
            for change in job.checkpoint.changes(self.plan, job.data_name):
                self.report({"message": change})
        if job.resume:
            load_state(job.resume, self.plan.model, masters, store)
        elif job.modules:
            load_weights(job.initial_file, masters, store)
        elif job.model_folder:
            load_model(job.model_folder, check_exportable(self.plan.model), masters, store)
        else:
            masters.initialize(self.plan, store, self.threads)
        self.pids = _exchange_pids(self.rank, job.num_ranks, self.rendezvous)
        self.settlement.meet("phase", 0)  # every weight is in place, and all of the region has its pages

    def lock_pages(self) -> None:
        span = self.store.layout.data_span
        if self.rank == 0 and self.kind == "cuda":
            self.report({"message": f"page-locking {span.num_bytes / 2**30:.1f} GiB of host memory"})
        problem = self.device.register(self.store.region, span)
        if problem:
            self.say(problem)

    def connect(self) -> None:
        job, plan, program, rank, store, device = (
            self.job, self.plan, self.program, self.rank, self.store, self.device
        )  # fmt: skip
        self.transport = make_transport(
            self.transport_name, program, rank, store, device, self.rendezvous, job.timeout_s, self.say
        )
        feed, validation = job.feeds()
        network = job.network(device.device)
        self.handlers = Handlers(
            plan, program, rank, store, device, self.transport, self.settlement, feed, network, job.hooks
        )
        if validation is not None and job.evaluate_every:
            evaluation = Evaluation(plan, rank, store, device.device, validation, network)
            if self.kind == "cuda":
                self.session.finish_copies = lambda: torch.cuda.synchronize(device.device)
            self.session.evaluate = lambda step: evaluation.run(evaluation_row(job, step))
        device.finish_lane()
        self.executor = Executor(
            program, rank, store, device, self.handlers,
            steps=job.num_steps, traced_from=job.traced_from, hooks=job.hooks, continues=self.session.continues,
        )  # fmt: skip
        self.settlement.meet("phase", 1)

    def train(self) -> None:
        job, store, session = self.job, self.store, self.session
        store.step_ends[0, self.rank] = time.monotonic()
        reporter = Reporter(job, store, self.settlement, self.report) if self.rank == 0 else None
        watchdog = Watchdog(self.program, self.rank, store, job.num_steps, job.timeout_s, self.pids)
        with objects_spared(), watchdog:
            try:
                self.executor.run()
                if session.evaluates_after(session.last - 1):
                    session.take_part(session.last)
            except BaseException:  # an interrupt, say: the other lanes and ranks must not train on
                store.flags.abort(store.layout.abort)
                raise
            finally:
                if reporter:
                    reporter.join()
        if session.saver is not None:
            session.saver.finish()

    def finish(self) -> None:
        job, rank, store, device = self.job, self.rank, self.store, self.device
        device.resolve_times(store, job.traced_from)
        used, reserved = device.peak_bytes()
        messages = self.transport.device_bytes
        store.items[rank] = [self.handlers.buffers.table_of_bytes()[name] for name in DEVICE_ITEMS]
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        store.peaks[rank] = used + messages, resident, reserved + messages
        if job.dump_state:
            _dump_part(job, rank, store, self.masters)
        self.settlement.meet("phase", 2)
        if rank == 0:
            about = {
                "device": device.summary,
                "transport": self.transport.name,
                "optimizer_threads": self.threads,
                "rollback": self.settlement.rollback_kind,
                "startup_s": self.ready_s,
            }
            write_results(job, store, self.settlement, about)
            if job.dump_state:
                _merge_dump(job)
        self.settlement.meet("phase", 3)
        self.transport.close()
        device.close()

    def say(self, message: str) -> None:
        self.report({"message": f"rank {self.rank}: {message}"})


def _exchange_pids(rank: int, num_ranks: int, rendezvous: KeyValueStore) -> list[int]:
    """Process numbers of all ranks; 0 for one whose number means nothing here (another PID namespace)."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    rendezvous.set(f"pid{rank}", f"{os.getpid()} {space}")
    pids = []
    for peer in range(num_ranks):
        pid, _, peer_space = rendezvous.get(f"pid{peer}").decode().partition(" ")
        pids.append(int(pid) if peer_space == space else 0)
    return pids


def _dump_part(job: Job, rank: int, store: Store, masters: MasterState) -> None:
    assert job.dump_state is not None
    state = {}
    for parameter in masters.parameters:
        master, first_moment, second_moment = masters.of(parameter)
        state[f"weight.{parameter.label}"] = store.weight(parameter).view(parameter.shape)
        state[f"master.{parameter.label}"] = master
        state[f"first_moment.{parameter.label}"] = first_moment
        state[f"second_moment.{parameter.label}"] = second_moment
    torch.save({key: value.cpu().clone() for key, value in state.items()}, f"{job.dump_state}.rank{rank}")


def _merge_dump(job: Job) -> None:
    assert job.dump_state is not None
    state: dict[str, torch.Tensor] = {}
    for rank in range(job.num_ranks):
        part = f"{job.dump_state}.rank{rank}"
        state |= torch.load(part)
        os.remove(part)
    torch.save(state, job.dump_state)
