"""What is shipped: an sdist that installs, with everything the package needs beside its code."""

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: object, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=clean, cwd="/")
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sdist_installs_and_works(tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "-o", tmp_path / "sdist", ROOT)
    (archive,) = (tmp_path / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert not [name for name in names if name.startswith("build/") or name.endswith(".so")]
    assert {"LICENSE", "CITATION.cff", "CHANGELOG.md", "docs/index.md"} <= names
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    # Dependencies are those of the interpreter that runs the tests; an editable install of it must not be seen.
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, archive)
    python = folder / "bin" / "python"
    where = run(python, "-c", "import spipe; print(spipe.__file__)").strip()
    assert Path(where).is_relative_to(folder)
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    search = ["search", "--model", "tiny", "--hardware", "laptop", "--global-batch", 4, "--sequence", 32]
    run(python, "-m", "spipe", *search, "--schedule", "spipe", "--effort", 0.05, "-o", plan)
    run(python, "-m", "spipe", "run", plan, "--steps", 4, "-o", tmp_path / "run")
    run(python, "-m", "spipe", "report", tmp_path / "run", "-o", page)
    assert "spipeTimeline" in page.read_text()


def test_wheels_are_configured_for_every_python_that_is_supported() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheels = configuration["tool"]["cibuildwheel"]["build"]
    assert [name.split("-")[0] for name in wheels] == ["cp311", "cp312", "cp313"]
    assert configuration["project"]["requires-python"] == ">=3.11"


def test_the_citation_is_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
