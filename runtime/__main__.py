"""One rank of a run under a launcher: ``torchrun --nproc-per-node N -m spipe.runtime PLAN --steps K -o RUNDIR``.

``mpirun -n N python -m spipe.runtime ...`` does the same (mpi4py is used to start, and for nothing else). Without a
launcher all ranks are started here, as ``spipe run`` does.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spipe.errors import SpipeError
from spipe.plan import Plan

EXIT_USER, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


@dataclass(frozen=True)
class World:
    """This process among those that the launcher started."""

    rank: int
    size: int
    rendezvous: Any


def main(arguments: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Run this process's rank; returns the exit code: 0, 1 for a failed run, 2 for bad input. Rank 0 speaks."""
    options = _parse(arguments)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        world = _join(environment)
    except SpipeError as error:
        print(f"spipe: {error}", file=sys.stderr)
        return EXIT_USER
    if world is None:
        return _run_locally(options)
    return _run_rank(options, world)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spipe.runtime", description="Run one rank of a plan.")
    parser.add_argument("plan", type=Path, help="plan.json")
    parser.add_argument("--steps", required=True, help="training steps, those before a checkpoint included")
    parser.add_argument(
        "--data", type=Path, help="file (its bytes) or folder (its text files); default: Python's documentation"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="new run directory")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for text; default: bytes")
    parser.add_argument("--token-bytes", help="bytes of a token in a .bin file, 2 or 4; default: by the vocabulary")
    parser.add_argument("--validation-fraction", default=0.0, help="part of the data that is for evaluation only")
    parser.add_argument("--evaluate-every", help="steps between evaluations")
    parser.add_argument("--checkpoint-every", help="steps between checkpoints; then signals save and end the run, too")
    parser.add_argument("--keep", help="newest checkpoints that are kept; default: all")
    parser.add_argument("--resume", help="checkpoint or run directory to go on from; auto: the output's newest, if any")
    parser.add_argument("--from", dest="model_folder", type=Path, help="Hugging Face model folder to start from")
    parser.add_argument("--force", action="store_true", help="replace a run that is in the output directory")
    parser.add_argument("--transport", default="auto", help="auto, host, peer, gloo or nccl")
    parser.add_argument("--timeout-s", default=600.0, help="give up if nothing completes for so long")
    parser.add_argument("--trace-steps", default=25, help="last steps that go into the trace")
    parser.add_argument("--host-memory-bytes", help="memory of this host, if it shows less than it has")
    parser.add_argument("--dump-state", type=Path, help="file for weights, masters and moments after the last step")
    return parser.parse_args(arguments)


def _whole(name: str, value: str | int, minimum: int = 1) -> int:
    """Numbers are read where only one rank speaks, not while parsing."""
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise SpipeError(f"--{name} {value} is not a whole number of at least {minimum}")
    return number


def _seconds(name: str, value: str | float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise SpipeError(f"--{name} {value} is not a positive number of seconds")
    return number


def _fraction(name: str, value: str | float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise SpipeError(f"--{name} {value} is not a number of at least 0 and below 1")
    return number


def _numbers(options: argparse.Namespace) -> dict[str, Any]:
    memory = options.host_memory_bytes
    counts = ("token_bytes", "evaluate_every", "checkpoint_every", "keep")
    given = {name: getattr(options, name) for name in counts}
    return {
        **{name: None if v is None else _whole(name.replace("_", "-"), v) for name, v in given.items()},
        "validation_fraction": _fraction("validation-fraction", options.validation_fraction),
        "steps": _whole("steps", options.steps),
        "trace_steps": _whole("trace-steps", options.trace_steps),
        "timeout_s": _seconds("timeout-s", options.timeout_s),
        "host_memory_bytes": None if memory is None else _whole("host-memory-bytes", memory),
    }


def _join(environment: Mapping[str, str]) -> World | None:
    """The world of torchrun's or mpirun's making; None if there is no launcher.

    Raises SpipeError for ranks on several hosts.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        _require_one_host(size, int(environment.get("LOCAL_WORLD_SIZE", size)), rank)
        return World(rank, size, _store_of_torchrun(environment, rank))
    if any(name in environment for name in _MPI):
        from mpi4py import MPI

        from spipe.runtime.rendezvous import connect, serve

        everyone = MPI.COMM_WORLD
        rank, size = everyone.Get_rank(), everyone.Get_size()
        _require_one_host(size, everyone.Split_type(MPI.COMM_TYPE_SHARED).Get_size(), rank)
        store = serve() if rank == 0 else None
        port = everyone.bcast(store.port if store else None, root=0)
        return World(rank, size, store or connect("127.0.0.1", port))
    return None


def _store_of_torchrun(environment: Mapping[str, str], rank: int) -> Any:
    from spipe.runtime.rendezvous import connect, prefixed, serve

    host, port = environment.get("MASTER_ADDR", "127.0.0.1"), int(environment.get("MASTER_PORT", "29500"))
    served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else rank 0 has to
    store = serve(port) if rank == 0 and not served else connect(host, port)
    return prefixed(store, f"spipe{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}")


def _require_one_host(size: int, local_size: int, rank: int) -> None:
    if local_size != size:
        message = f"{size} ranks were started, {local_size} of them on this host; a run's ranks share one host's memory"
        if rank:
            raise SystemExit(EXIT_USER)
        raise SpipeError(message)


def _job(options: argparse.Namespace, plan: Plan) -> Any:
    from spipe.runtime.job import Job
    from spipe.runtime.training import resolve_resume, starts_over

    return Job(
        plan=plan,
        output=options.output,
        data=options.data,
        tokenizer=options.tokenizer,
        resume=resolve_resume(options.resume, options.output),
        model_folder=options.model_folder,
        overwrite=options.force or starts_over(options.resume, options.output),
        transport=options.transport,
        dump_state=options.dump_state,
        **_numbers(options),
    )


def _run_rank(options: argparse.Namespace, world: World) -> int:
    from spipe.runtime.failure import RunFailedError
    from spipe.runtime.launch import StopSignals
    from spipe.runtime.rank import run_rank
    from spipe.runtime.training import prepare

    if world.rank == 0:
        try:
            job = _job(options, Plan.load(options.plan))
            if job.num_ranks != world.size:
                raise SpipeError(
                    f"{options.plan} is for {job.num_ranks} ranks, but {world.size} were started; start as many "
                    "processes as the plan has ranks"
                )
            prepare(job)
        except SpipeError as error:
            print(f"spipe: {error}", file=sys.stderr, flush=True)
            world.rendezvous.set("checked", "bad")
            for rank in range(1, world.size):  # the store has to outlive their reading
                world.rendezvous.get(f"heard{rank}")
            return EXIT_USER
        world.rendezvous.set("checked", "good")
    else:
        checked = world.rendezvous.get("checked")
        world.rendezvous.set(f"heard{world.rank}", "")
        if checked != b"good":
            return EXIT_USER
        job = _job(options, Plan.load(options.plan))
    try:
        with StopSignals(job.saves) as stop:
            run_rank(job, world.rank, world.rendezvous, _report, stop)
    except RunFailedError as error:
        if world.rank == 0:
            print(f"spipe: {error}", file=sys.stderr)
        _leave(EXIT_FAILED)
    return 0


def _leave(code: int) -> None:
    """End after a failure: lanes may be blocked in calls that nothing else ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(row: dict[str, Any]) -> None:
    if "message" in row:
        print(row["message"], flush=True)
        return
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
    print(f"step {row['step']}: loss {loss}, {row['step_s']:.3f} s, {row['tokens_per_s']:.0f} tokens/s", flush=True)


def _run_locally(options: argparse.Namespace) -> int:
    from spipe.runtime.failure import RunFailedError
    from spipe.runtime.training import run

    try:
        run(
            Plan.load(options.plan),
            output=options.output,
            data=options.data,
            tokenizer=options.tokenizer,
            resume=options.resume,
            model_folder=options.model_folder,
            overwrite=options.force,
            transport=options.transport,
            dump_state=options.dump_state,
            **_numbers(options),
            log=_report,
        )
    except SpipeError as error:
        print(f"spipe: {error}", file=sys.stderr)
        return EXIT_USER
    except RunFailedError as error:
        print(f"spipe: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("spipe: interrupted", file=sys.stderr)
        _leave(EXIT_INTERRUPTED)
