"""Objectives other than time: dollars, memory, length and depth. All ask ``search`` and compare what it finds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from spipe.errors import SpipeError, unknown
from spipe.hardware import HardwareSpec
from spipe.model import ModelSpec
from spipe.sim.search import search
from spipe.sim.search_result import ENDINGS, SearchResult, why_ended
from spipe.sim.shortage import some_plan_fits
from spipe.sim.space import make_space

OBJECTIVES = ("time", "dollars", "memory", "sequence", "layers")
_SEQUENCE_STEP = 256
_YEARS = 4  # over which a purchase is paid off
_LONGEST = 2**20  # tokens, where the model sets no limit
_DEEPEST = 8  # times the model's own depth
_TRIES = 64  # candidates whose memory is accounted for, to find that a size does not fit
_HOW_TO_SEARCH = ("cuts", "executor", "progress", "max_simulations", "effort", "advise")  # no choices of the space


def search_for(
    objective: str,
    model: ModelSpec,
    hardware: HardwareSpec,
    *,
    min_tokens_per_s: float | None = None,
    max_dollars_per_hour: float | None = None,
    **arguments: Any,
) -> SearchResult:
    """The best plan by an objective.

    Args:
        objective: ``time``: the shortest step. ``dollars``: the fewest dollars per token, over numbers of hosts.
            ``memory``: the smallest accelerators that still reach ``min_tokens_per_s``. ``sequence``, ``layers``: the
            longest sequence (a multiple of 256 tokens), the deepest model of this width (up to 8 times as deep as it
            is), that fits: found by memory alone, then searched.
        min_tokens_per_s, max_dollars_per_hour: what a plan has to reach, and may cost by the hardware's prices.
        arguments: of ``search``.

    Raises:
        SpipeError: naming the unknown objective, the missing price, or the constraint that nothing meets.
    """
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    for name, value in (("min_tokens_per_s", min_tokens_per_s), ("max_dollars_per_hour", max_dollars_per_hour)):
        if value is not None and not value > 0:
            raise SpipeError(f"{name} = {value!r} should be more than 0")
    if objective == "memory" and min_tokens_per_s is None:
        raise SpipeError("objective memory needs min_tokens_per_s (--min-speed): the speed that has to be reached")

    def run(**changes: Any) -> SearchResult:
        merged = {"model": model, "hardware": hardware, **arguments, **changes}
        return search(merged.pop("model"), merged.pop("hardware"), **merged)

    if max_dollars_per_hour is not None:
        hosts = min(hardware.num_hosts, int(max_dollars_per_hour // dollars_per_hour(hardware)))
        if hosts < 1:
            raise SpipeError(
                f"max_dollars_per_hour (--max-dollars) = {max_dollars_per_hour:g}: one host of {hardware.name} costs "
                f"{dollars_per_hour(hardware):.2f} an hour ({priced_by(hardware)}); allow as much, take cheaper "
                "hardware, or put your own prices into its file"
            )
        hardware = hardware.resized(num_hosts=hosts)
    if min_tokens_per_s is not None and objective not in ("sequence", "layers"):
        _refuse_the_impossible(min_tokens_per_s, model, hardware, arguments)
    if objective in ("sequence", "layers"):
        changed, limit = _growth(objective, model)

        def fits(number: int) -> bool:
            wanted = {"model": model, "hardware": hardware, **space_arguments(arguments)}
            return some_plan_fits({**wanted, **changed(number)}, tries=_TRIES)

        largest = _largest(fits, limit)
        result = run(**changed(largest or 1))
        if largest == limit:
            what = "the model's longest sequence" if objective == "sequence" else f"{_DEEPEST} times the model's depth"
            result = _noted(result, f"{what} fits; nothing larger was tried")
    elif objective == "dollars":
        result = _fewest_dollars(run, hardware)
    else:
        result = run()
    speed = result.simulation.tokens_per_s
    if min_tokens_per_s is not None and speed < min_tokens_per_s:
        raise SpipeError(
            f"min_tokens_per_s (--min-speed) = {min_tokens_per_s:g}: the best plan for {hardware.name} reaches "
            f"{speed:.6g}, {min_tokens_per_s / speed:.2f} times less; use more or faster accelerators, or a "
            "smaller model"
        )
    if objective == "memory":
        assert min_tokens_per_s is not None
        result = _least_memory(run, result, min_tokens_per_s)
    return result


def _refuse_the_impossible(
    min_tokens_per_s: float, model: ModelSpec, hardware: HardwareSpec, arguments: dict[str, Any]
) -> None:
    """Raises SpipeError if no plan can be as fast, before anything is searched."""
    bound_s, limit = make_space(model, hardware, **space_arguments(arguments)).least_step_s()
    most = arguments["global_batch"] * arguments["sequence"] / bound_s
    if min_tokens_per_s > most:
        raise SpipeError(
            f"min_tokens_per_s (--min-speed) = {min_tokens_per_s:g}: no plan for {hardware.name} can reach more "
            f"than {most:.6g} ({limit}); use more or faster accelerators, or a smaller model"
        )


def space_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of ``search`` that say what is searched, not how."""
    return {name: value for name, value in arguments.items() if name not in _HOW_TO_SEARCH}


def dollars_per_hour(hardware: HardwareSpec, num_hosts: int = 1) -> float:
    """What hosts cost by the hour; see ``priced_by``. Raises SpipeError where the hardware has no price."""
    price = hardware.price
    if price is None or (price.rent_dollars_per_hour is None and price.purchase_dollars is None):
        raise SpipeError(f"{hardware.name} has no price: add a [price] section with rent_dollars_per_hour to its file")
    if price.rent_dollars_per_hour is not None:
        return num_hosts * price.rent_dollars_per_hour
    assert price.purchase_dollars is not None
    return num_hosts * (price.purchase_dollars / (_YEARS * 365 * 24) + price.power_dollars_per_hour)


def priced_by(hardware: HardwareSpec) -> str:
    """What ``dollars_per_hour`` goes by: the rent, or, where there is none, what owning costs."""
    if hardware.price is not None and hardware.price.rent_dollars_per_hour is not None:
        return "rent"
    return f"no rent is known: purchase over {_YEARS} years, and power"


def used_hosts(result: SearchResult) -> int:
    """How many hosts a plan needs."""
    return result.plan.hardware.host_of(result.plan.layout.num_ranks - 1) + 1


def dollars_per_token(result: SearchResult) -> float:
    """Dollars per token trained, on the hosts that the plan uses."""
    return dollars_per_hour(result.plan.hardware, used_hosts(result)) / 3600 / result.simulation.tokens_per_s


def dollars(result: SearchResult) -> dict[str, Any]:
    """What training by a plan costs: ``dollars_per_hour``, ``dollars_per_billion_tokens``, and what they go by."""
    hardware = result.plan.hardware
    return {
        "dollars_per_hour": dollars_per_hour(hardware, used_hosts(result)),
        "dollars_per_billion_tokens": 1e9 * dollars_per_token(result),
        "priced_by": priced_by(hardware),
        "hosts": used_hosts(result),
    }


def _fewest_dollars(run: Callable[..., SearchResult], hardware: HardwareSpec) -> SearchResult:
    """A host costs the same however many of its ranks work: all ranks of one host, of two, of four.."""
    dollars_per_hour(hardware)
    hosts, found = [hardware.num_hosts], []
    while hosts[-1] > 1:
        hosts.append(hosts[-1] // 2)
    failure: SpipeError | None = None
    why = ""
    for count in hosts:
        if why:
            break
        try:
            found.append(run(hardware=hardware.resized(num_hosts=count)))
            why = found[-1].ended
        except SpipeError as error:
            failure = error
        except ENDINGS as error:
            if not found:
                raise
            why = why_ended(error)
    if not found:
        assert failure is not None
        raise failure
    return _so_far(min(found, key=dollars_per_token), why)


def _least_memory(run: Callable[..., SearchResult], result: SearchResult, speed: float) -> SearchResult:
    """Halve the distance between a capacity that is enough and one that is not, down to 2 per cent."""
    enough = max(result.simulation.memory.rank_bytes)
    short = 0
    while enough - short > 0.02 * enough and not result.ended:
        tried = (enough + short) // 2
        try:
            other = run(max_rank_bytes=tried, advise=False)
        except SpipeError:
            short = tried
            continue
        except ENDINGS as error:
            return _so_far(result, why_ended(error))
        if other.simulation.tokens_per_s >= speed:
            result, enough = other, max(other.simulation.memory.rank_bytes)
        elif other.ended:
            return _so_far(result, other.ended)
        else:
            short = tried
    return result


def _growth(objective: str, model: ModelSpec) -> tuple[Callable[[int], dict[str, Any]], int]:
    """What a number changes in a search, and the largest number that is tried."""
    if objective == "sequence":
        limit = max(1, (model.max_sequence or _LONGEST) // _SEQUENCE_STEP)
        return lambda number: {"sequence": number * _SEQUENCE_STEP}, limit

    def deeper(number: int) -> dict[str, Any]:
        return {"model": model.replace(num_layers=number, name=f"{model.name}-{number}-layers")}

    return deeper, _DEEPEST * model.num_layers


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that fits, by doubling, then by halving the distance; 0 if none does."""
    best, over = 0, limit + 1
    for number in dict.fromkeys([*(2**power for power in range(limit.bit_length())), limit]):
        if fits(number):
            best = number
        elif best:
            over = number
            break
    while best and best < over - 1:
        middle = (best + over) // 2
        best, over = (middle, over) if fits(middle) else (best, middle)
    return best


def _noted(result: SearchResult, note: str) -> SearchResult:
    return replace(result, notes=(*result.notes, note))


def _so_far(result: SearchResult, why: str) -> SearchResult:
    """A result beside which no others were searched, for this reason; unchanged if there is none."""
    if result.ended or not why:
        return result
    return replace(_noted(result, f"{why}: this is the best plan found so far"), ended=why)
