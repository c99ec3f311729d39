"""What if: the best plan of models on machines one could have, what it costs, and which upgrade helps most."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.model import ModelSpec
from spipe.sim.search import search
from spipe.sim.search_result import ENDINGS, Range, SearchResult, beats, why_ended
from spipe.topology import Link, parse_node

HOURS_PER_MONTH = 730.0
_NVLINK_BYTES_PER_S = 100e9
_LEAST_GAIN = 0.005

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Upgrade:
    """A purchase for every host.

    Attributes:
        name: key in ``Price.upgrade_dollars``.
        summary: in words.
        apply: the hardware with it; None where it is there already.
    """

    name: str
    summary: str
    apply: Callable[[HardwareSpec], HardwareSpec | None]


def _more_dram(hardware: HardwareSpec) -> HardwareSpec:
    cpu = hardware.cpu
    more = cpu.memory_bytes
    return hardware.replace(
        cpu=cpu.replace(memory_bytes=cpu.memory_bytes + more, usable_memory_bytes=cpu.usable_memory_bytes + more)
    )


def _second_cpu(hardware: HardwareSpec) -> HardwareSpec:
    cpu = hardware.cpu
    return hardware.replace(
        cpu=cpu.replace(
            num_domains=2 * cpu.num_domains,
            cores=2 * cpu.cores,
            memory_bandwidth_bytes_per_s=2 * cpu.memory_bandwidth_bytes_per_s,
            adam_parameters_per_s=2 * cpu.adam_parameters_per_s,
        )
    )


def _is_pcie(link: Link) -> bool:
    kinds = {parse_node(link.a)[0], parse_node(link.b)[0]}
    return "gpu" in kinds and not kinds & {"nvswitch", "network", "nic"}


def _next_pcie(hardware: HardwareSpec) -> HardwareSpec:
    def doubled(link: Link) -> Link:
        both = link.both_directions_bytes_per_s
        return link.replace(
            bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s,
            both_directions_bytes_per_s=None if both is None else 2 * both,
        )

    return hardware.replace(links=tuple(doubled(link) if _is_pcie(link) else link for link in hardware.links))


def _nvlink(hardware: HardwareSpec) -> HardwareSpec | None:
    if hardware.ranks_per_host == 1 or any("nvswitch" in link.a + link.b for link in hardware.links):
        return None
    link = Link(a="gpu*", b="nvswitch0", bandwidth_bytes_per_s=_NVLINK_BYTES_PER_S, latency_s=1e-5)
    return hardware.replace(links=(*hardware.links, link), peer_to_peer=True)


UPGRADES: tuple[Upgrade, ...] = (
    Upgrade("dram", "twice the DRAM, as fast as before", _more_dram),
    Upgrade("cpu", "a second CPU: twice the cores, memory bandwidth and Adam", _second_cpu),
    Upgrade("pcie", "the next PCIe generation: twice the bandwidth of every accelerator's link", _next_pcie),
    Upgrade("nvlink", "NVLink between the accelerators of a host, 100 GB/s each way", _nvlink),
)


def what_if(
    models: Sequence[ModelSpec],
    offers: Sequence[tuple[str, HardwareSpec]],
    *,
    upgrades: Sequence[Upgrade] = UPGRADES,
    progress: Progress = lambda text: None,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """One row for every model, offer and upgrade of it.

    Args:
        offers: (label, hardware), prices included where dollars are wanted.
        upgrades: tried one at a time on every offer; their rows follow the offer's own.
        progress: told what comes next.
        arguments: of ``search``, the same for all.

    What ends a search (``spipe.sim.search.search``) ends all: the rows so far are returned, if there are any.

    Returns:
        Rows with ``model``, ``offer``, ``upgrade`` (empty for the offer as it is), ``feasible``, ``reason`` (why not),
        ``step_s``, ``tokens_per_s``, ``gap`` (to the lower bound), ``interval_s`` (as in ``SearchResult``), ``limit``,
        ``plan``, ``accelerators`` and ``hosts`` of the offer and ``accelerators_used`` by the plan, ``rank_bytes`` and
        ``host_bytes`` (of the fullest accelerator and host), ``gain`` over the offer as it is, ``upgrade_dollars``,
        ``purchase_dollars``, ``rent_dollars_per_billion_tokens``, ``own_dollars_per_billion_tokens`` (electricity
        alone), ``break_even_month`` (when buying has cost less than renting; None where it never does, as electricity
        alone costs as much as rent). What is not known is None.
    """
    rows: list[dict[str, Any]] = []
    why = ""
    try:
        for row in _rows(models, offers, upgrades, progress, arguments):
            why = row.pop("ended")
            rows.append(row)
            if why:
                break
    except ENDINGS as error:
        if not rows:
            raise
        why = why_ended(error)
    if why:
        progress(f"{why}: the last plan is the best found so far, and what would have come next is left out")
    return rows


def _rows(
    models: Sequence[ModelSpec],
    offers: Sequence[tuple[str, HardwareSpec]],
    upgrades: Sequence[Upgrade],
    progress: Progress,
    arguments: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    for model in models:
        for label, hardware in offers:
            progress(f"{model.name} on {label}")
            base = _row(model, label, "", hardware, arguments)
            yield base
            for upgrade in upgrades:
                better = upgrade.apply(hardware)
                if better is None:
                    continue
                progress(f"{model.name} on {label} with {upgrade.name}")
                row = _row(model, label, upgrade.name, better, arguments)
                if base["feasible"] and row["feasible"]:
                    row["gain"] = row["tokens_per_s"] / base["tokens_per_s"] - 1
                yield row


def most_helpful(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """(model, offer) -> in words, which upgrade helps most: what makes it possible at all, else what gains most."""
    result = {}
    for base in (row for row in rows if not row["upgrade"]):
        key = base["model"], base["offer"]
        mine = [row for row in rows if (row["model"], row["offer"]) == key and row["upgrade"] and row["feasible"]]
        if not mine:
            result[key] = (
                "none that can be tried" if base["feasible"] else "none: no upgrade that was tried makes it fit"
            )
        elif not base["feasible"]:
            best = max(mine, key=lambda row: row["tokens_per_s"])
            result[key] = f"{best['upgrade']}: it fits then, with {best['tokens_per_s']:.0f} tokens/s"
        else:
            best = max(mine, key=lambda row: row["gain"])
            if best["gain"] < _LEAST_GAIN:
                result[key] = f"none: no upgrade that was tried gains {100 * _LEAST_GAIN:g} %"
                continue
            result[key] = f"{best['upgrade']}: {100 * best['gain']:+.1f} %"
            if not _certain(best["interval_s"], base["interval_s"]):
                result[key] += ", not for certain: the intervals of the step times meet"
    return result


def _certain(better: Range | None, worse: Range | None) -> bool:
    """Whether a gain is more than what was measured leaves open; without spreads nothing says that it is not."""
    return better is None or worse is None or beats(better, worse)


def _row(
    model: ModelSpec, label: str, upgrade: str, hardware: HardwareSpec, arguments: dict[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model.name, "offer": label, "upgrade": upgrade, "hosts": hardware.num_hosts}
    row["ended"] = ""
    row |= {"accelerators": hardware.num_ranks, "accelerators_used": None, "feasible": False, "reason": ""}
    row |= dict.fromkeys(("step_s", "tokens_per_s"))
    row |= dict.fromkeys(("gap", "interval_s", "limit", "plan", "rank_bytes", "host_bytes", "gain", "upgrade_dollars"))
    row |= _prices(hardware, upgrade)
    row |= dict.fromkeys(("rent_dollars_per_billion_tokens", "own_dollars_per_billion_tokens"))
    try:
        found = search(model, hardware, **{"advise": not upgrade, **arguments})
    except SpipeError as error:
        return row | {"reason": str(error), "break_even_month": None}
    speed = found.simulation.tokens_per_s
    row |= {"feasible": True, "step_s": found.simulation.step_s, "tokens_per_s": speed, "gap": found.gap}
    row["interval_s"] = found.interval_s
    row["accelerators_used"] = len(found.plan.layout.layout().ranks_used)
    row |= {"limit": found.limit, "plan": _words(found), "ended": found.ended}
    memory = found.simulation.memory
    row |= {"rank_bytes": max(memory.rank_bytes), "host_bytes": max(memory.host_bytes)}
    price = hardware.price
    if price is not None:
        per_hour = hardware.num_hosts / 3600 / speed * 1e9
        row["own_dollars_per_billion_tokens"] = price.power_dollars_per_hour * per_hour
        if price.rent_dollars_per_hour is not None:
            row["rent_dollars_per_billion_tokens"] = price.rent_dollars_per_hour * per_hour
    return row


def _prices(hardware: HardwareSpec, upgrade: str) -> dict[str, float | None]:
    """Purchase of all hosts, with the upgrade where its price is known, and when it has paid off against rent."""
    price, hosts = hardware.price, hardware.num_hosts
    row: dict[str, float | None] = dict.fromkeys(("purchase_dollars", "upgrade_dollars", "break_even_month"))
    if price is None:
        return row
    extra = price.upgrade_dollars.get(upgrade) if upgrade else 0.0
    row["upgrade_dollars"] = extra * hosts if extra is not None else None
    if price.purchase_dollars is not None and extra is not None:
        row["purchase_dollars"] = hosts * (price.purchase_dollars + extra)
        saved = (price.rent_dollars_per_hour or 0.0) - price.power_dollars_per_hour
        if saved > 0:
            row["break_even_month"] = (price.purchase_dollars + extra) / saved / HOURS_PER_MONTH
    return row


def _words(found: SearchResult) -> str:
    plan = found.plan
    layout = plan.layout
    options = plan.options.model_dump(exclude_defaults=True)
    extra = ", ".join(f"{name}={value}" for name, value in options.items())
    words = (
        f"{plan.schedule} on {layout.num_ranks}, {len(layout.forward)}:{len(layout.backward)} stages, "
        f"{plan.num_microbatches} x {plan.microbatch_size}"
    )
    return f"{words}, {extra}" if extra else words
