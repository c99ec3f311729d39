"""Advice where no plan fits: what is short, by how much, and which single changes make a plan possible.

Every change that is named was tried: with it there is a plan whose memory fits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spipe.errors import SpipeError
from spipe.memory import MemoryReport, size_words
from spipe.model import ModelSpec
from spipe.schedules import SCHEDULES, get_schedule
from spipe.sim.candidates import Candidate
from spipe.sim.judge import account
from spipe.sim.ledger import Ledger
from spipe.sim.shortage import some_plan_fits
from spipe.sim.space import STAGES_PER_RANK, Space

MOST_HOSTS = 64
_HUNDREDTH = 2**30 / 100  # of a GiB

Nearest = tuple[Candidate, MemoryReport]


@dataclass(frozen=True)
class Advice:
    """A change that makes a plan possible.

    Attributes:
        words: for people.
        changes: arguments of ``search`` that differ.
    """

    words: str
    changes: dict[str, Any]


class NoPlanError(SpipeError):
    """Nothing fits.

    Attributes:
        advice: single changes, each of which makes a plan possible.
    """

    def __init__(self, message: str, advice: list[Advice]) -> None:
        super().__init__(message)
        self.advice = advice


def no_plan(
    arguments: dict[str, Any], space: Space, ledger: Ledger, refused: dict[str, int], advise: bool
) -> NoPlanError:
    """The error of a search that found nothing: what was wanted, what is short, what to change.

    Args:
        arguments: of ``spipe.sim.space.make_space``.
        refused: what could not be laid out, counted by reason.
        advise: whether to look for changes.
    """
    job = space.job
    nearest = ledger.nearest
    if nearest is not None:  # perhaps it was refused for what one microbatch needs already
        nearest = nearest[0], account(job, nearest[0], nearest[0].num_microbatches)
    wanted = f"no plan for {job.model.name} on {job.hardware.name} (global batch {space.global_batch}, sequence "
    wanted += f"{job.sequence})"
    if nearest is None:
        reasons = list(dict.fromkeys([*refused, *(row["reason"] for row in ledger.rejected)]))
        problem = "; ".join(reasons[:3] or _no_stages(space))
    else:
        candidate, report = nearest
        problem = (
            f"nothing fits. Nearest is {candidate.schedule} on {candidate.num_ranks} ranks with "
            f"F={candidate.forward_stages}, B={candidate.backward_stages} and microbatches of "
            f"{candidate.microbatch_size}: {'; '.join(report.problems[:2])}; {', '.join(_shortages(report))}"
        )
    head = f"{wanted}: {problem}"
    if not advise:
        return NoPlanError(head, [])
    advice = list(_advice(arguments, space, nearest))
    possible = "makes it fit" if nearest is not None else "makes a plan possible"
    if not advice:
        other = "use a smaller model" if nearest is not None else "leave more choices to the search"
        return NoPlanError(f"{head}. No single change that was tried {possible}; {other}", advice)
    return NoPlanError(f"{head}. Any one of these {possible}: {'; '.join(each.words for each in advice)}", advice)


def _no_stages(space: Space) -> Iterator[str]:
    """Why there are no numbers of stages to try, for every schedule."""
    chosen = (space.forward_stages, space.backward_stages)
    forward, backward = ("any" if given is None else " or ".join(map(str, given)) for given in chosen)
    for name in space.schedules:
        rule = "at least as many backward as forward stages" if get_schedule(name).decoupled else "F = B"
        yield f"{name} needs {rule}, at most one a layer, not F = {forward} and B = {backward} stages a rank"


def _shortages(report: MemoryReport) -> list[str]:
    found = []
    for place, totals, capacity in (
        ("rank", report.rank_bytes, report.rank_capacity_bytes),
        ("host", report.host_bytes, report.host_capacity_bytes),
    ):
        most = max(totals)
        if most > capacity:
            found.append(f"{place} {totals.index(most)} is short of {size_words(most - capacity)}")
    return found


def _advice(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    """Of every kind of change the smallest that is enough."""
    kinds = [_higher_limits, _smaller_microbatches, _finer_stages, _more_ranks, _fewer_options, _other_schedules]
    if nearest is not None:
        kinds += [_more_memory, _more_hosts, _shorter_sequences, _fewer_layers]
    else:
        kinds.insert(0, _fewer_ranks)
    for kind in kinds:
        changes = kind(arguments, space, nearest)
        if kind in _EVER_MORE and (listed := list(changes)):
            changes = iter(listed if _makes_it_fit(arguments, listed[-1].changes, nearest) else [])
        for advice in changes:
            if _makes_it_fit(arguments, advice.changes, nearest):
                yield advice
                if kind not in (_fewer_options, _higher_limits):
                    break


def _makes_it_fit(arguments: dict[str, Any], changes: dict[str, Any], nearest: Nearest | None) -> bool:
    elsewhere = {"hardware", "max_rank_bytes", "max_host_bytes"} & changes.keys()
    return some_plan_fits({**arguments, **changes}, [nearest[0]] if nearest is not None and elsewhere else [])


# Kinds of changes, the smallest first


def _higher_limits(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    """Of the limits that were given, how much would do, to a hundredth of it."""
    hardware = space.job.hardware
    for name, option, what, most in (
        ("max_rank_bytes", "--max-gpu-memory", "accelerator", hardware.accelerator.usable_memory_bytes),
        ("max_host_bytes", "--max-host-memory", "host", hardware.cpu.usable_memory_bytes),
    ):
        given = arguments.get(name)
        if given is None or given >= most or not _makes_it_fit(arguments, {name: most}, nearest):
            continue
        short, enough = given, most
        while enough - short > max(_HUNDREDTH, enough / 100):
            tried = (short + enough) / 2
            short, enough = (short, tried) if _makes_it_fit(arguments, {name: tried}, nearest) else (tried, enough)
        enough = min(_rounded_up(enough), most)
        yield Advice(
            f"a limit of {_gib(enough)} GiB of {what} memory ({option}) instead of {_gib(given)}", {name: enough}
        )


def _fewer_ranks(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    for ranks in range(min(space.num_ranks) - 1, 0, -1):
        yield Advice(f"{ranks} rank{'s' * (ranks > 1)}", {"num_ranks": ranks})


def _smaller_microbatches(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    for size in range(min(space.microbatch_sizes) - 1, 0, -1):
        if space.global_batch % size == 0:
            yield Advice(f"microbatches of {size}", {"microbatch_size": size})


def _finer_stages(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    """Fewer layers a stage; where the given stages cannot be laid out at all, other ones."""
    if space.forward_stages is None and space.backward_stages is None:
        return
    given = max([*(space.forward_stages or ()), *(space.backward_stages or ())])
    numbers = [n for n in STAGES_PER_RANK if n > given] if nearest else [n for n in STAGES_PER_RANK[::-1] if n < given]
    for number in numbers:
        changes = {"forward_stages": None, "backward_stages": number}
        yield Advice(f"{number} backward stages a rank and any number of forward stages", changes)


def _more_ranks(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    ranks, offered = max(space.num_ranks), space.job.hardware.num_ranks
    while ranks < offered:
        ranks = min(2 * ranks, offered)
        yield Advice(f"{ranks} ranks, which {space.job.hardware.name} has", {"num_ranks": ranks})


def _fewer_options(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    options = space.job.options
    for name, value in options.items():
        others = {other: options[other] for other in options if other != name}
        yield Advice(f"leaving option {name} = {value} out", {"options": others})


def _other_schedules(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    for name, system in SCHEDULES.items():
        if name not in space.schedules and not system.simulated_only:
            yield Advice(f"schedule {name}", {"schedules": [name]})


def _more_memory(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    """What the nearest plan needs, of accelerators, of hosts, or of both; as a higher limit if there is as much.

    One higher limit alone is for ``_higher_limits``.
    """
    assert nearest is not None
    report, hardware = nearest[1], space.job.hardware
    changes: dict[str, Any] = {}
    words = []
    rank, host = _rounded_up(max(report.rank_bytes)), _rounded_up(max(report.host_bytes))
    if rank > report.rank_capacity_bytes:
        if rank <= hardware.accelerator.usable_memory_bytes:
            changes["max_rank_bytes"] = rank
            words.append(f"a limit of {_gib(rank)} GiB of accelerator memory")
        else:
            accelerator = hardware.accelerator
            memory_bytes = rank / accelerator.usable_fraction * (1 + 1e-12)
            hardware = hardware.replace(accelerator=accelerator.replace(memory_bytes=memory_bytes))
            words.append(f"accelerators with {_gib(rank)} GiB usable")
    if host > report.host_capacity_bytes:
        cpu = hardware.cpu
        if host <= cpu.usable_memory_bytes:
            changes["max_host_bytes"] = host
            words.append(f"a limit of {_gib(host)} GiB of host memory")
        else:
            memory_bytes = cpu.memory_bytes + host - cpu.usable_memory_bytes
            hardware = hardware.replace(cpu=cpu.replace(memory_bytes=memory_bytes, usable_memory_bytes=host))
            words.append(f"hosts with {_gib(host)} GiB of usable memory")
    if hardware is not space.job.hardware:
        changes["hardware"] = hardware
    for name, capacity in (("max_rank_bytes", rank), ("max_host_bytes", host)):
        if "hardware" in changes and name not in changes and arguments.get(name) is not None:
            changes[name] = max(arguments[name], capacity)
    if "hardware" in changes or len(changes) > 1:
        yield Advice(" and ".join(words), changes)


def _more_hosts(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    hardware = space.job.hardware
    hosts = hardware.num_hosts
    while hosts < MOST_HOSTS:
        hosts = min(2 * hosts, MOST_HOSTS)
        try:
            more = hardware.resized(num_hosts=hosts)
        except SpipeError:
            return  # hosts that no network connects
        yield Advice(f"{hosts} hosts", {"hardware": more, "num_ranks": None})


def _shorter_sequences(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    sequence = space.job.sequence
    while sequence > 1:
        sequence //= 2
        yield Advice(f"sequences of {sequence} tokens", {"sequence": sequence})


def _fewer_layers(arguments: dict[str, Any], space: Space, nearest: Nearest | None) -> Iterator[Advice]:
    model = space.job.model
    if not isinstance(model, ModelSpec):
        return
    for eighths in range(7, 0, -1):
        layers = model.num_layers * eighths // 8
        if layers:
            smaller = model.replace(num_layers=layers, name=f"{model.name}-{layers}-layers")
            yield Advice(f"a model of {layers} instead of {model.num_layers} blocks", {"model": smaller})


_EVER_MORE = (_shorter_sequences, _fewer_layers)  # where the last change is not enough, none is


def _rounded_up(num_bytes: float) -> float:
    return math.ceil(num_bytes / _HUNDREDTH) * _HUNDREDTH


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"
