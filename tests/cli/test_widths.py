"""What is shown fits terminals of 80 columns: no broken words, numbers or names."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from spipe import show
from spipe.cli.planning import show_simulation
from spipe.cli.plotting import KINDS
from spipe.hardware import HARDWARE_NAMES, load_hardware
from spipe.model import MODELS
from spipe.plan import Plan
from spipe.sim import simulate

from .conftest import Command


def console(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), record=True, highlight=False, markup=False)


def printed(what: RenderableType, width: int) -> str:
    to = console(width)
    to.print(what)
    return to.export_text()


def test_models_and_hardware_are_whole_in_80_columns() -> None:
    to = console(80)
    show.models(to, list(MODELS.values()))
    show.hardware_list(to, [load_hardware(name) for name in HARDWARE_NAMES])
    text = to.export_text()
    assert max(map(len, text.splitlines())) <= 80
    words = set(re.findall(r"[^\s│┃]+", text))
    assert {*MODELS, *HARDWARE_NAMES, "blocks", "hidden", "sequence", "parameters", "vocab", "memory"} <= words
    assert {show.size(16 * model.num_parameters()) for model in MODELS.values()} <= set(
        re.findall(r"[\d.]+ [GM]iB", text)
    )


def test_long_texts_break_between_words_first() -> None:
    made = show.table("", ("name", "mostly", "value"), [("rank 0", "weights 1 GiB, gradients 2 GiB", "12.3 GiB")], 2)
    assert printed(made, 120).count("\n") == 5
    narrow = printed(made, 40)
    assert max(map(len, narrow.splitlines())) == 40
    assert "rank 0" in narrow
    assert "12.3 GiB" in narrow
    for word in ("weights", "gradients"):
        assert word in narrow


def test_a_table_without_room_is_still_shown_in_full() -> None:
    made = show.table("", ("name", "value"), [("a-name-of-many-characters", "1234567890")])
    assert max(map(len, printed(made, 16).splitlines())) <= 16
    letters = re.sub(r"[\s│]", "", "".join(line[:9] for line in printed(made, 16).splitlines()[3:-1]))
    assert "a-name" in letters


@pytest.mark.parametrize(("width", "longest"), [(40, 60), (60, 60), (80, 80), (120, 113), (300, 113)])
def test_the_timeline_fits_the_console(plan_file: Path, width: int, longest: int) -> None:
    to = console(width)
    show_simulation(to, simulate(Plan.load(plan_file)))
    lines = [line for line in to.export_text().splitlines() if re.match(r"rank \d (compute  |optimizer) ", line)]
    assert len(lines) == 4
    assert {len(line) for line in lines} == {longest}


def test_kinds_of_figures_are_listed_in_80_columns(command: Command) -> None:
    kinds = command("plot", "--help").out.split("Kinds:", 1)[1].split("Examples:", 1)[0]
    assert all(re.search(rf"^ +{kind} ", kinds, re.MULTILINE) for kind in KINDS)
    assert max(map(len, kinds.splitlines())) <= 80
