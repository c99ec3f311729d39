"""The whole loop in one command."""

from pathlib import Path
from typing import Annotated

import typer

from spipe.cli.common import Force, JsonFile, Output, progress


def demo(
    folder: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="New folder; default: demo-1, demo-2, ...")
    ] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """The whole loop on two CPU ranks of this machine: search, train, calibrate, predict, check.

    Takes about three minutes. Everything it makes is kept in a new folder.

    \b
    Examples:
      spipe demo
      spipe demo -o my-demo --json demo.json
    """
    output = Output(json_file, force, folder=folder)

    from spipe import demo as demonstration
    from spipe.show import console

    result = demonstration.run(folder, console(stderr=output.to_stdout), progress)
    output.write(result)


COMMANDS = (demo,)
