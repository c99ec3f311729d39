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
from spipe.memory import memory
from spipe.runtime.checkpoint import load_model, load_state
from spipe.runtime.data import Feed
from spipe.runtime.devices import make_device, ranks_per_device, start_autograd
from spipe.runtime.evaluation import Evaluation
from spipe.runtime.executor import Executor, Watchdog
from spipe.runtime.failure import AbortedRunError, RunFailedError
from spipe.runtime.handlers import Handlers
from spipe.runtime.job import Job
from spipe.runtime.region import Region
from spipe.runtime.rendezvous import KeyValueStore
from spipe.runtime.results import Reporter, evaluation_row, write_results
from spipe.runtime.session import Request, Session
from spipe.runtime.settlement import MasterState, Settlement
from spipe.runtime.store import Store
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
        _run(job, rank, store, rendezvous, _one_at_a_time(report), stop or threading.Event())
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


def _run(job: Job, rank: int, store: Store, rendezvous: KeyValueStore, report: Report, stop: Request) -> None:
    began = time.monotonic()
    ready_s: dict[str, float] = {}

    def done(phase: str) -> None:
        ready_s[phase] = time.monotonic() - began - sum(ready_s.values())

    plan, program, num_ranks = job.plan, job.plan.program(), job.num_ranks
    kind = plan.hardware.device
    device, sharers = make_device(plan, rank), ranks_per_device(plan)
    start_autograd(device.device)
    device.require_memory(memory(plan).ranks[rank], sharers)
    name = choose_transport(job.transport, kind, num_ranks, sharers > 1)
    threads = plan.optimizer_threads or default_optimizer_threads(kind, num_ranks)
    done("device")
    store.region.advise_huge_pages()
    masters = MasterState(plan, rank, store, device.device)
    session = Session(job, program, rank, store, masters, stop, report)
    settlement = Settlement(plan, program, rank, store, masters, threads, job.hooks, session)
    share = store.layout.data_span.num_bytes // num_ranks
    store.region.populate(store.layout.data_span.offset + rank * share, share, threads)
    done("pages")
    if job.resume:
        load_state(job.resume, plan.model, masters, store)
    elif job.model_folder:
        load_model(job.model_folder, plan.model, masters, store)
    else:
        masters.initialize(plan, store, threads)
    pids = _exchange_pids(rank, num_ranks, rendezvous)
    settlement.meet("phase", 0)  # every weight is in place, and all of the region has its pages
    done("weights")
    if rank == 0 and kind == "cuda":
        report({"message": f"page-locking {store.layout.data_span.num_bytes / 2**30:.1f} GiB of host memory"})
    problem = device.register(store.region, store.layout.data_span)
    if problem:
        report({"message": f"rank {rank}: {problem}"})
    done("page-locking")
    transport = make_transport(
        name, program, rank, store, device, rendezvous, job.timeout_s,
        lambda message: report({"message": f"rank {rank}: {message}"}),
    )  # fmt: skip
    corpus, validation = job.corpora()
    feed = Feed(plan, corpus, job.start.sequences)
    handlers = Handlers(plan, program, rank, store, device, transport, settlement, feed, job.hooks)
    if validation is not None and job.evaluate_every:
        evaluation = Evaluation(plan, rank, store, device.device, validation, handlers.rotary)
        if kind == "cuda":
            session.finish_copies = lambda: torch.cuda.synchronize(device.device)
        session.evaluate = lambda step: evaluation.run(evaluation_row(job, step))
    device.finish_lane()
    executor = Executor(
        program, rank, store, device, handlers,
        steps=job.num_steps, traced_from=job.traced_from, hooks=job.hooks, continues=session.continues,
    )  # fmt: skip
    settlement.meet("phase", 1)
    done("buffers and connections")
    store.step_ends[0, rank] = time.monotonic()
    reporter = Reporter(job, store, settlement, report) if rank == 0 else None
    with Watchdog(program, rank, store, job.num_steps, job.timeout_s, pids):
        try:
            executor.run()
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
    device.resolve_times(store, job.traced_from)
    used, reserved = device.peak_bytes()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    store.peaks[rank] = used + transport.device_bytes, resident, reserved + transport.device_bytes
    if job.dump_state:
        _dump_part(job, rank, store, masters)
    settlement.meet("phase", 2)
    if rank == 0:
        about = {
            "device": device.summary,
            "transport": transport.name,
            "optimizer_threads": threads,
            "rollback": settlement.rollback_kind,
            "startup_s": ready_s,
        }
        write_results(job, store, settlement, about)
        if job.dump_state:
            _merge_dump(job)
    settlement.meet("phase", 3)
    transport.close()
    device.close()


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
        state[f"weight.{parameter.label}"] = store.weights[parameter.first :][: parameter.count].view(parameter.shape)
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
