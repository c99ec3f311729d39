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
from spipe.runtime.environment import PROCESS_DEFAULTS
from spipe.train_config import TrainConfig
from spipe.train_options import TRAIN_OPTIONS

EXIT_USER, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130
_CODES = {"bad": EXIT_USER, "done": 0}  # what rank 0 found before the run, where there is none
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
    os.environ.update(PROCESS_DEFAULTS | dict(os.environ))
    try:
        world = _join(environment)
    except SpipeError as error:
        print(f"spipe: {error}", file=sys.stderr)
        return EXIT_USER
    if world is None:
        return _run_locally(options)
    return _run_rank(options, world)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    """Texts as they came: they are read where only one rank speaks."""
    parser = argparse.ArgumentParser(prog="python -m spipe.runtime", description="Run one rank of a plan.")
    parser.add_argument("plan", nargs="?", help="plan.json")
    parser.add_argument("--config", type=Path, metavar="TOML", help="options from a file, by the names they have here")
    for option in TRAIN_OPTIONS:
        names = [name for name in (option.short, option.spelling) if name]
        if option.kind == "flag":
            action = argparse.BooleanOptionalAction
            parser.add_argument(*names, dest=option.name, action=action, default=None, help=option.help)
        else:
            parser.add_argument(*names, dest=option.name, metavar=option.metavar, help=option.help)
    parser.add_argument("--force", action="store_true", help="replace a run that is in the output directory")
    parser.add_argument("--dump-state", type=Path, help="file for weights, masters and moments after the last step")
    return parser.parse_args(arguments)


def _config(options: argparse.Namespace) -> TrainConfig:
    values: dict[str, Any] = {"plan": options.plan}
    for option in TRAIN_OPTIONS:
        text = getattr(options, option.name)
        try:
            values[option.name] = None if text is None else option.parse(text)
        except ValueError as error:
            raise SpipeError(f"{option.spelling} {error}") from None
    config = TrainConfig.load(options.config, values)
    if config.tensorboard or config.wandb:
        raise SpipeError("tensorboard and wandb are written by `spipe run`; leave them out under a launcher")
    return config


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


def _job(options: argparse.Namespace) -> tuple[Any, TrainConfig]:
    from spipe.runtime.training import job_of

    config = _config(options)
    plan = config.apply(_load_plan(config))
    return job_of(plan, **config.run_arguments(), overwrite=options.force, dump_state=options.dump_state), config


def _load_plan(config: TrainConfig) -> Plan:
    path = Path(config.plan)
    return Plan.load(path / "plan.json" if path.is_dir() else path)


def _run_rank(options: argparse.Namespace, world: World) -> int:
    from spipe.runtime.failure import RunFailedError
    from spipe.runtime.launch import StopSignals
    from spipe.runtime.rank import run_rank
    from spipe.runtime.training import is_done, prepare

    if world.rank == 0:
        try:
            job, config = _job(options)
            if job.num_ranks != world.size:
                raise SpipeError(
                    f"{config.plan} is for {job.num_ranks} ranks, but {world.size} were started; start as many "
                    "processes as the plan has ranks"
                )
            if is_done(config.resume, job):
                return _end_all(world, "done", f"{job.output} has made its {job.start.step} steps: nothing to do")
            prepare(job, config.files())
        except SpipeError as error:
            return _end_all(world, "bad", str(error))
        world.rendezvous.set("checked", "good")
    else:
        checked = world.rendezvous.get("checked").decode()
        world.rendezvous.set(f"heard{world.rank}", "")
        if checked != "good":
            return _CODES[checked]
        job, _ = _job(options)
    try:
        with StopSignals(job.saves) as stop:
            run_rank(job, world.rank, world.rendezvous, _report, stop)
    except RunFailedError as error:
        if world.rank == 0:
            print(f"spipe: {error}", file=sys.stderr)
        _leave(EXIT_FAILED)
    return 0


def _end_all(world: World, checked: str, message: str) -> int:
    """Rank 0: what all ranks end with, before the run."""
    print(f"spipe: {message}", file=sys.stderr, flush=True)
    world.rendezvous.set("checked", checked)
    for rank in range(1, world.size):  # the store has to outlive their reading
        world.rendezvous.get(f"heard{rank}")
    return _CODES[checked]


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
    from spipe.runtime.training import execute, is_done

    try:
        job, config = _job(options)
        if is_done(config.resume, job):
            print(f"spipe: {job.output} has made its {job.start.step} steps: nothing to do", file=sys.stderr)
            return 0
        execute(job, files=config.files(), log=_report)
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
