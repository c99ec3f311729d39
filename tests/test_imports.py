"""Who may import whom, and what a light import must not load."""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Part -> parts it may import. The command line and the demo load sim and runtime inside functions only (see below).
ALLOWED = {
    "core": {"core"},
    "sim": {"core", "sim"},
    "runtime": {"core", "runtime"},
    "command line": {"core", "command line", "sim", "runtime"},
}
HEAVY = {"torch", "simpy", "pandas", "matplotlib", "scipy", "mpi4py"}


def part_of(module: str) -> str:
    """The part that a module of the package belongs to."""
    name = module.split(".")[1] if "." in module else ""
    if name in ("sim", "runtime"):
        return name
    command_line = ("cli", "demo", "show", "show_measured", "tune", "plots", "report", "__main__")
    return "command line" if name in command_line else "core"


def source_files() -> list[Path]:
    return [
        *sorted((ROOT / "spipe").glob("*.py")),
        *(file for part in ("cli", "lower", "plots", "report") for file in (ROOT / "spipe" / part).glob("*.py")),
        *sorted((ROOT / "sim").rglob("*.py")),
        *sorted((ROOT / "runtime").rglob("*.py")),
    ]


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "spipe" else ("spipe", *parts))


def imports(node: ast.AST, *, at_module_level: bool) -> Iterator[str]:
    """Modules that the code below ``node`` imports, outside ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if at_module_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            assert child.level == 0, f"relative import of {module}"
            yield from (f"{module}.{alias.name}" for alias in child.names)
        else:
            yield from imports(child, at_module_level=at_module_level)


@pytest.mark.parametrize("file", source_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_part_imports_only_what_it_may(file: Path) -> None:
    tree, name = ast.parse(file.read_text()), module_name(file)
    part = part_of(name)
    for imported in imports(tree, at_module_level=False):
        if imported.split(".")[0] == "spipe":
            assert part_of(imported) in ALLOWED[part], f"{name} ({part}) imports {imported}"


@pytest.mark.parametrize(
    "file",
    [file for file in source_files() if part_of(module_name(file)) in ("core", "command line")],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_core_and_command_line_load_heavy_parts_on_demand_only(file: Path) -> None:
    name = module_name(file)
    for imported in imports(ast.parse(file.read_text()), at_module_level=True):
        assert imported.split(".")[0] not in HEAVY, f"{name} imports {imported} at once"
        assert part_of(imported) not in ("sim", "runtime") or not imported.startswith("spipe."), (
            f"{name} imports {imported} at once"
        )


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


def test_importing_the_core_loads_nothing_heavy() -> None:
    loaded = modules_after("import spipe.plan, spipe.check, spipe.memory, spipe.metrics, spipe.trace")
    assert not loaded & HEAVY


def test_importing_the_command_line_loads_no_specs_and_nothing_heavy() -> None:
    loaded = modules_after("import spipe.cli")
    assert not loaded & {*HEAVY, "numpy", "pydantic", "spipe.plan", "spipe.sim", "spipe.runtime"}


@pytest.mark.parametrize("part", ["sim", "runtime"])
def test_parts_are_subpackages(part: str) -> None:
    file = import_module(f"spipe.{part}").__file__
    assert file is not None
    assert Path(file).resolve() == ROOT / part / "__init__.py", "tests have to run the code of this checkout"


@pytest.mark.parametrize("part", ["sim", "runtime"])
def test_parts_refuse_to_be_top_level_packages(part: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {part}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0
    assert f"import this package as spipe.{part}" in done.stderr


@pytest.mark.slow
def test_a_wheel_holds_the_linked_parts_and_the_native_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("sim", "runtime"):
        expected = {f"spipe/{part}/{file.name}" for file in (ROOT / part).glob("*.py")}
        assert expected <= set(names)
    assert sum(name.startswith("spipe/_native.") and name.endswith(".so") for name in names) == 1
    assert not [name for name in names if name.split("/")[0] in ("sim", "runtime")]


@pytest.mark.parametrize("file", sorted((ROOT / "sim").glob("*.py")), ids=lambda file: file.name)
def test_predictions_know_nothing_of_the_machine_that_makes_them(file: Path) -> None:
    """Neither a clock nor the machine's load can change a prediction: nothing in ``sim`` can ask for them."""
    asked = {imported.split(".")[0] for imported in imports(ast.parse(file.read_text()), at_module_level=False)}
    assert not asked & {"time", "datetime", "psutil", "platform", "resource"}
