"""The README's examples work as they stand."""

import re
import shlex
from pathlib import Path

import pytest

from .conftest import Command

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.timeout(300)
def test_commands_of_the_readme(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^    (spipe .*)$", README, re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        result = command(*words)
        assert result.code == 0, f"{line}\n{result.err}"
    assert {"plan.json", "simulated.json", "run", "hardware.toml"} <= {path.name for path in tmp_path.iterdir()}


def test_python_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert re.match(r"\d+\.\d+ s \{'fill': ", capsys.readouterr().out)


def test_targets_of_the_readme() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in re.findall(r"^    make (\S+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
