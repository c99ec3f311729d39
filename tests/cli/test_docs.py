"""Documentation that runs: commands and code of the pages work as they stand, or say what they need."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
import pytest
import typer

from spipe.cli.app import app
from spipe.schedules import SCHEDULES

try:
    from typer._click.exceptions import UsageError
except ImportError:  # before typer had a click of its own
    from click.exceptions import UsageError  # type: ignore[no-redef]

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "generated" not in page.parts]
RUN_ELSEWHERE = {"README.md", "docs/train.md"}  # by tests of their own
QUICK = {"docs/howto/schedule.md"}
_COMMAND = r"(?:spipe|python|make|mpirun|srun|sbatch|torchrun|pip) "
_BLOCK = re.compile(r"(?:^<!-- needs: ([^\n]*) -->\n)?^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, code) of the blocks that a reader on a CPU can run, in order."""
    for needs, language, code in _BLOCK.findall(page.read_text()):
        if language in ("sh", "python") and not needs:
            yield language, code


def commands(text: str) -> Iterator[list[str]]:
    """Words of every line that is a `spipe` command, fenced or indented, continued lines joined."""
    for line in re.findall(r"^(?:    )?(spipe .*)$", re.sub(r"\\\n\s*", " ", text), re.MULTILINE):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if words and words[0] == "spipe":
                    yield words[1:]
                words = []
            else:
                words.append(word)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_has_the_options_it_is_given(page: Path) -> None:
    group = typer.main.get_command(app)
    context = group.make_context("spipe", [], resilient_parsing=True)
    for words in commands(page.read_text()):
        command = group.get_command(context, words[0])  # type: ignore[attr-defined]
        assert command is not None, f"{name(page)}: spipe {words[0]}"
        mine = command.context_class(command, info_name=words[0], parent=context)
        mine.resilient_parsing = True
        try:
            command.parse_args(mine, list(words[1:]))
        except UsageError as error:
            pytest.fail(f"{name(page)}: spipe {shlex.join(words)}: {error.message}")


def test_the_check_of_options_finds_a_wrong_one() -> None:
    (words,) = commands("    spipe search --modell tiny\n")
    command = typer.main.get_command(app).get_command(None, words[0])  # type: ignore[attr-defined, arg-type]
    with pytest.raises(UsageError, match="--modell"):
        command.parse_args(command.context_class(command), list(words[1:]))


def test_blocks_that_are_not_run_say_what_they_need() -> None:
    marked = [needs for page in PAGES for needs, *_ in _BLOCK.findall(page.read_text()) if needs]
    assert len(marked) >= 3
    assert set(marked) <= {
        "a network", "GPUs", "Slurm and GPUs", "a trace of your own program", "time", "a clone", "a clone and time",
        "the table of published runs",
    }  # fmt: skip


def unfenced(text: str) -> list[str]:
    """Commands in indented blocks and in fenced blocks of another language: nobody runs them."""
    rest = re.sub(_BLOCK, lambda block: "" if block[2] == "sh" else block[3], text)
    return re.findall(rf"^(?: {{4}})?({_COMMAND}.*)$", rest, re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if name(page) not in RUN_ELSEWHERE], ids=name)
def test_every_command_block_is_run_or_says_what_it_needs(page: Path) -> None:
    assert not unfenced(page.read_text())


def test_the_check_of_blocks_finds_commands_that_are_not_run() -> None:
    assert unfenced("Indented:\n\n    spipe models\n") == ["spipe models"]
    assert unfenced("```text\nmake demo\n```\n") == ["make demo"]
    assert not unfenced("`spipe models`, and:\n\n```sh\nspipe models\n```\n")


def test_make_docs_shows_what_make_notebooks_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = re.findall(r"^NOTEBOOK_FLAGS := --executed (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import docs_pages

    monkeypatch.setattr(docs_pages, "ROOT", tmp_path)
    script = tmp_path / "notebooks" / "n.py"
    for path in (script, tmp_path / folder / "n.ipynb"):
        path.parent.mkdir(parents=True)
    script.write_text("# %% [markdown]\n# # Title\n\n# %%\nprint(6 * 7)\n")
    assert "`make notebooks`" in docs_pages.notebook(script)
    executed = jupytext.read(script)
    executed.cells[1].outputs = [nbformat.v4.new_output("stream", text="42\n")]
    nbformat.write(executed, tmp_path / folder / "n.ipynb")
    page = docs_pages.notebook(script)
    assert "```text\n42\n```" in page
    assert "`make notebooks`" not in page
    script.write_text(script.read_text().replace("7", "8"))  # which has not been executed
    assert "42" not in docs_pages.notebook(script)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if name(page) in QUICK else pytest.mark.slow, id=name(page))
        for page in PAGES
        if name(page) not in RUN_ELSEWHERE and list(blocks(page))
    ],
)
@pytest.mark.timeout(500)
def test_a_page_works_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "spipe").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spipe "$@"\n')
    (tools / "spipe").chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for language, code in blocks(page):
        command = [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, start_new_session=True
        )
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def test_messages_of_the_troubleshooting_page_are_messages_of_the_program() -> None:
    page = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
    source = "".join(path.read_text() for part in ("spipe", "sim", "runtime") for path in (ROOT / part).glob("**/*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts over several lines
    cells = re.findall(r"^\| (`.*?`[^|]*?) \|", page, re.MULTILINE)
    assert len(cells) >= 15
    for cell in cells:
        for message in re.findall(r"`([^`]+)`", cell):
            pattern = re.escape(message)
            if message.startswith("unknown "):  # put together by `spipe.errors.unknown`
                pattern = rf'unknown\("{message.removeprefix("unknown ")}"'
            assert re.search(pattern, source), f"no message holds {message!r}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:", 1)[1]
    linked = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    assert {name(page).removeprefix("docs/") for page in PAGES if name(page).startswith("docs/")} <= linked


def test_every_command_is_in_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    group = typer.main.get_command(app)
    names = set(group.commands)  # type: ignore[attr-defined]
    assert {"profile", "kineto", "tune", "report", "whatif"} <= names
    assert not {command for command in names if f"spipe {command}" not in text}


def test_every_schedule_has_its_usual_name_in_a_page() -> None:
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "docs" / "concepts.md").read_text(), re.MULTILINE)
    for schedule in SCHEDULES.values():
        mine = [row for row in rows if f"`{schedule.name}`" in row]
        assert mine
        assert all(("only simulated" in row) == schedule.simulated_only for row in mine)


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http") and "generated/" not in target:
                assert (page.parent / target).exists(), f"{name(page)}: {target}"
