"""Execute notebooks kept as jupytext scripts, and refresh the .ipynb beside each, without outputs.

python scripts/execute_notebooks.py notebooks/*.py             execute; fails where a cell fails
python scripts/execute_notebooks.py --executed out notebooks/*.py   also keep them with outputs
python scripts/execute_notebooks.py --check notebooks/*.py     also fail if an .ipynb is not what its script gives
"""

import argparse
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient


def stripped(script: Path) -> str:
    """The notebook of a script as .ipynb text: no outputs, no ids that change from run to run."""
    notebook = jupytext.read(script)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
    return str(nbformat.writes(notebook)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="fail if an .ipynb differs from its script")
    parser.add_argument("--executed", type=Path, help="folder for executed notebooks, with outputs")
    arguments = parser.parse_args()
    stale = []
    for script in arguments.scripts:
        target = script.with_suffix(".ipynb")
        text = stripped(script)
        if not target.exists() or target.read_text() != text:
            stale.append(target)
            if not arguments.check:
                target.write_text(text)
        begin = time.perf_counter()
        notebook = jupytext.read(script)
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
        print(f"{script}: executed in {time.perf_counter() - begin:.1f} s")
        if arguments.executed:
            arguments.executed.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, arguments.executed / target.name)
    if arguments.check and stale:
        print(f"not up to date: {', '.join(map(str, stale))}; run `make notebooks` and commit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
