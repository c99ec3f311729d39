"""What if: offers, upgrades, prices, what does not fit and why."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from spipe import plots
from spipe.cli.buying import show_rows
from spipe.hardware import HardwareSpec, load_hardware
from spipe.model import load_model
from spipe.sim import search
from spipe.sim.whatif import HOURS_PER_MONTH, UPGRADES, most_helpful, what_if

QUICK: dict[str, Any] = {
    "global_batch": 4, "sequence": 256, "schedules": ["spipe"], "microbatch_size": 1, "cuts": "balanced",
    "effort": 0.05, "max_simulations": 2, "options": {"device_layers": 0},
}  # fmt: skip
NAMES = {upgrade.name: upgrade for upgrade in UPGRADES}


def upgraded(name: str, hardware: HardwareSpec) -> HardwareSpec:
    better = NAMES[name].apply(hardware)
    assert better is not None
    return better


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    card = load_hardware("rtx4090x8").resized(ranks_per_host=2)
    small = card.override({"cpu.usable_memory_gib": 0.01, "cpu.memory_gib": 0.02})
    return what_if([load_model("tiny")], [("host", card), ("small host", small)], **QUICK)


def test_every_offer_has_a_row_and_one_for_each_upgrade(rows: list[dict[str, Any]]) -> None:
    assert [(row["offer"], row["upgrade"]) for row in rows] == [
        (offer, upgrade) for offer in ("host", "small host") for upgrade in ("", *NAMES)
    ]
    assert all(set(row) == set(rows[0]) for row in rows)


def test_what_does_not_fit_says_why_and_what_helps(rows: list[dict[str, Any]]) -> None:
    short = next(row for row in rows if row["offer"] == "small host" and not row["upgrade"])
    assert not short["feasible"]
    assert "short of" in short["reason"]
    assert most_helpful(rows)["tiny", "small host"].startswith("dram: it fits then")


def test_dollars_follow_from_prices_and_speed(rows: list[dict[str, Any]]) -> None:
    price = load_hardware("rtx4090x8").price
    assert price is not None
    assert price.rent_dollars_per_hour is not None
    assert price.purchase_dollars is not None
    base = rows[0]
    hours = 1e9 / base["tokens_per_s"] / 3600
    assert base["rent_dollars_per_billion_tokens"] == pytest.approx(hours * price.rent_dollars_per_hour)
    watts = price.power_watts / 1000 * price.electricity_dollars_per_kwh
    assert base["own_dollars_per_billion_tokens"] == pytest.approx(hours * watts)
    months = price.purchase_dollars / ((price.rent_dollars_per_hour - watts) * HOURS_PER_MONTH)
    assert base["break_even_month"] == pytest.approx(months)
    dram = next(row for row in rows if row["upgrade"] == "dram")
    assert dram["purchase_dollars"] - base["purchase_dollars"] == price.upgrade_dollars["dram"]
    assert next(row for row in rows if row["upgrade"] == "pcie")["purchase_dollars"] is None  # no price of it


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "17"),
        ({"price.rent_dollars_per_hour": 0}, "never"),
        ({"price.power_watts": 1e6}, "never"),
        ({"price.purchase_dollars": None}, "?"),
        ({"price.rent_dollars_per_hour": None}, "?"),
        ({"cpu.memory_gib": 0.01, "accelerator.memory_gib": 0.01}, ""),
    ],
)
def test_break_even_is_a_month_never_unknown_or_of_no_plan(changes: dict[str, Any], shown: str) -> None:
    host = load_hardware("rtx4090x8").resized(ranks_per_host=2).override(changes)
    rows = what_if([load_model("tiny")], [("host", host)], upgrades=(), **QUICK)
    console = Console(record=True, width=140, file=io.StringIO())
    show_rows(console, rows, most_helpful(rows), {"host": host})
    line = next(line for line in console.export_text().splitlines() if "│ host " in line)
    assert line.split("│")[-2].strip() == shown
    assert (rows[0]["break_even_month"] is None) == (shown != "17")


def test_accelerators_that_are_paid_for_and_not_used_are_said() -> None:
    host = load_hardware("rtx4090x8").resized(ranks_per_host=4)
    (row,) = rows = what_if([load_model("tiny")], [("host", host)], upgrades=(), **{**QUICK, "num_ranks": 1})
    assert (row["accelerators_used"], row["accelerators"]) == (1, 4)
    console = Console(record=True, width=140, file=io.StringIO())
    show_rows(console, rows, {}, {"host": host})
    assert "tiny on host uses 1 of 4 accelerators; the whole host is paid for" in console.export_text()


def test_where_no_upgrade_helps_words_say_so(rows: list[dict[str, Any]]) -> None:
    base, better = rows[0], {**rows[0], "upgrade": "dram", "gain": 0.001}
    assert most_helpful([base, better])["tiny", "host"] == "none: no upgrade that was tried gains 0.5 %"
    short = {**base, "feasible": False}
    assert most_helpful([short, {**better, "feasible": False}])["tiny", "host"].endswith("makes it fit")


def test_upgrades_change_what_they_say() -> None:
    host = load_hardware("rtx4090x8")
    assert upgraded("dram", host).cpu.usable_memory_bytes == host.cpu.usable_memory_bytes + host.cpu.memory_bytes
    assert upgraded("cpu", host).cpu.memory_bandwidth_bytes_per_s == 2 * host.cpu.memory_bandwidth_bytes_per_s
    before = host.route(("gpu", 0), ("memory", 0)).bandwidth_bytes_per_s
    assert upgraded("pcie", host).route(("gpu", 0), ("memory", 0)).bandwidth_bytes_per_s == 2 * before
    assert host.route(("gpu", 0), ("gpu", 1)).memory_accesses
    linked = upgraded("nvlink", host).route(("gpu", 0), ("gpu", 1))
    assert linked.bandwidth_bytes_per_s == 100e9
    assert not linked.memory_accesses
    assert NAMES["nvlink"].apply(load_hardware("h200x4")) is None
    assert NAMES["nvlink"].apply(load_hardware("h200x1")) is None


def test_without_prices_dollars_are_unknown() -> None:
    laptop = load_hardware("laptop")
    (row,) = what_if([load_model("tiny")], [("laptop", laptop)], upgrades=(), **{**QUICK, "num_ranks": 1})
    assert row["feasible"]
    dollars = ("purchase_dollars", "rent_dollars_per_billion_tokens", "break_even_month")
    assert all(row[key] is None for key in dollars)
    assert math.isfinite(row["tokens_per_s"])


def test_the_figure_has_a_bar_for_every_offer(rows: list[dict[str, Any]]) -> None:
    speed, cost = plots.what_if(rows).axes
    assert [label.get_text() for label in speed.get_yticklabels()] == ["host", "small host"]
    assert {text.get_text().split()[0] for text in speed.texts} >= {"does"}
    assert len(cost.patches) == 2


@pytest.mark.parametrize(
    ("before", "after", "certain"),
    [((9.0, 11.0), (7.0, 8.0), True), ((9.0, 11.0), (7.0, 9.5), False), (None, None, True)],
)
def test_a_gain_within_the_intervals_is_not_certain(
    rows: list[dict[str, Any]], before: Any, after: Any, certain: bool
) -> None:
    base = {**rows[0], "interval_s": before}
    better = {**rows[1], "upgrade": "cpu", "feasible": True, "gain": 0.2, "interval_s": after}
    words = most_helpful([base, better])["tiny", "host"]
    assert words.startswith("cpu: +20.0 %")
    assert ("not for certain" in words) != certain


def test_an_interrupt_keeps_the_rows_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = iter([search])

    def searched(*arguments: Any, **options: Any) -> Any:
        if (do := next(searches, None)) is None:
            raise KeyboardInterrupt
        return do(*arguments, **options)

    monkeypatch.setattr("spipe.sim.whatif.search", searched)
    said: list[str] = []
    laptop = load_hardware("laptop")
    (row,) = what_if(
        [load_model("tiny")], [("one", laptop), ("two", laptop)], progress=said.append, upgrades=(), **QUICK
    )
    assert row["offer"] == "one"
    assert said[-1].startswith("interrupted: ")
