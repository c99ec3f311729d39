"""What of the documentation is made by the code: pictures, the command reference, pages that live elsewhere.

python scripts/docs_pages.py            writes docs/generated/, which `mkdocs build` reads and git does not keep

Notebooks become pages with their outputs where `make notebooks` has left them executed, and without outputs elsewhere.
"""

import base64
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import typer

from spipe import plots
from spipe.cli.app import app
from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.plan import make_plan
from spipe.sim import Simulation, simulate
from spipe.timed import TimedStep

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "docs" / "generated"
SYSTEMS = {"GPipe": ("gpipe", 1, 1), "Mobius": ("mobius", 2, 2), "SPipe": ("spipe", 2, 6)}


def simulated(machine: str, schedule: str, forward: int, backward: int, **more: Any) -> Simulation:
    """10 B parameters, 8 microbatches of two sequences on four ranks."""
    return simulate(
        make_plan(
            load_model("10b"),
            load_hardware(machine),
            schedule=schedule,
            num_ranks=4,
            forward_stages=forward,
            backward_stages=backward,
            global_batch=16,
            microbatch_size=2,
            sequence=1024,
            precision="fp16",
            **more,
        )
    )


def timed(name: str, simulation: Simulation) -> TimedStep:
    return TimedStep.of(name, simulation.plan, simulation.trace, simulation.last_step)


def pictures() -> None:
    """The pictures of the concepts page."""
    equal = [0.0, *[1.0] * load_model("10b").num_layers, 0.0]
    for name, (schedule, forward, backward) in SYSTEMS.items():
        ideal = simulated("ideal", schedule, forward, backward, published=True, layer_costs=equal)
        picture(plots.timeline(timed(name, ideal), lanes="compute"), f"ideal-{schedule}")
    real = {name: simulated("v100x4", *stages) for name, stages in SYSTEMS.items()}
    spipe = timed("SPipe", real["SPipe"])
    picture(plots.timeline(spipe, ranks=[0, 1]), "lanes")
    picture(plots.timeline(spipe, ranks=[0], window_s=(0.0, 2.4)), "start")
    picture(plots.memory_over_time(spipe), "memory")
    results = {}
    for name, simulation in real.items():
        bubbles = simulation.bubbles
        results[name] = {
            "busy_s": bubbles.busy_s,
            "bubbles": bubbles.total(),
            "predicted": {"step_s": simulation.step_s},
        }
    picture(plots.idle_time(results), "idle")


def picture(figure: Any, name: str) -> None:
    plots.save(figure, GENERATED / f"{name}.svg")


def commands() -> str:
    """Every command with its help, as the program prints it."""
    group = typer.main.get_command(app)
    pages = ["# Command line\n", "Made from the program itself; `spipe COMMAND --help` prints the same.\n"]
    context = group.make_context("spipe", [], resilient_parsing=True)
    for name in group.list_commands(context):  # type: ignore[attr-defined]
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        with command.make_context(name, [], parent=context, resilient_parsing=True) as mine:
            pages.append(f"## {name}\n\n```text\n{command.get_help(mine).strip()}\n```\n")
    return "\n".join(pages)


def copied(source: str) -> str:
    """A page of the repository for the site: links to files that are not part of it become plain text."""
    text = (ROOT / source).read_text()
    text = re.sub(r"\]\(docs/", "](../", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:|\.\./|#)[^)]+\)", r"\1", text)


def notebook(script: Path) -> str:
    """A notebook as a page; its pictures are written beside the page."""
    cells = jupytext.read(script).cells
    path = ROOT / "build" / "notebooks" / script.with_suffix(".ipynb").name
    executed = jupytext.read(path).cells if path.exists() else []
    is_executed = [cell.source for cell in executed] == [cell.source for cell in cells]
    page = []
    for number, cell in enumerate(executed if is_executed else cells):
        if cell.cell_type == "markdown":
            page.append(cell.source)
            continue
        code = cell.source.removeprefix("%matplotlib inline\n").strip()
        page.append(f"```python\n{code}\n```")
        for part, output in enumerate(cell.get("outputs", [])):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{script.stem}-{number}-{part}.png"
                (GENERATED / "notebooks" / picture).write_bytes(base64.b64decode(data["image/png"]))
                page.append(f"![figure]({picture})")
            elif text := output.get("text") or data.get("text/plain"):
                page.append(f"```text\n{text.rstrip()}\n```")
    if not is_executed:
        page.insert(1, "*Only the code is shown here: `make notebooks`, then `make docs`, adds what it puts out.*")
    return "\n\n".join(page) + "\n"


def main() -> int:
    (GENERATED / "notebooks").mkdir(parents=True, exist_ok=True)
    for script in sorted((ROOT / "notebooks").glob("*.py")):
        (GENERATED / "notebooks" / f"{script.stem}.md").write_text(notebook(script))
    pictures()
    (GENERATED / "commands.md").write_text(commands())
    for source in ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (GENERATED / source.lower()).write_text(copied(source))
    return 0


if __name__ == "__main__":
    sys.exit(main())
