"""Commands that show what there is: models, hardware, this machine."""

from typing import Annotated, Any

import typer

from spipe.cli.common import Force, JsonFile, Output
from spipe.cli.names import hardware_names, model_names


def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", autocompletion=model_names, help="A name, config.json, folder or .toml."),
    ] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """List the built-in models, or show one.

    \b
    Examples:
      spipe models
      spipe models llama3-8b
      spipe models path/to/config.json
    """
    from spipe import show
    from spipe.model import MODELS, load_model

    output = Output(json_file, force)
    chosen = list(MODELS.values()) if name is None else [load_model(name)]
    data = {"models": [model.model_dump(mode="json") | {"num_parameters": model.num_parameters()} for model in chosen]}
    output.show(data, lambda console: show.models(console, chosen))


def hardware(
    name: Annotated[
        str | None, typer.Argument(metavar="[HARDWARE]", autocompletion=hardware_names, help="A name or a .toml file.")
    ] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """List the built-in hardware, or show one in full.

    \b
    Examples:
      spipe hardware
      spipe hardware v100-cluster
      spipe hardware laptop --json -
    """
    from spipe import show
    from spipe.hardware import HARDWARE_NAMES, load_hardware

    output = Output(json_file, force)
    if name is None:
        listed = [load_hardware(each) for each in HARDWARE_NAMES]
        rows = [
            {
                "name": each.name,
                "device": each.device,
                "num_hosts": each.num_hosts,
                "ranks_per_host": each.ranks_per_host,
                "accelerator": each.accelerator.name,
                "memory_bytes": each.accelerator.memory_bytes,
                "host_usable_memory_bytes": each.cpu.usable_memory_bytes,
                "note": each.note,
            }
            for each in listed
        ]
        output.show({"hardware": rows}, lambda console: show.hardware_list(console, listed))
    else:
        spec = load_hardware(name)
        output.show({"hardware": spec.model_dump(mode="json")}, lambda console: show.hardware(console, spec))


def doctor(json_file: JsonFile = None, force: Force = False) -> None:
    """Show what this machine offers: versions, cores, native code, devices.

    \b
    Example:
      spipe doctor
    """
    import os
    import platform
    import shutil
    import sys
    from importlib import metadata

    from spipe import __version__, show

    output = Output(json_file, force)
    facts: dict[str, Any] = {
        "spipe": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    for package in (
        "torch",
        "triton",
        "simpy",
        "numpy",
        "pandas",
        "matplotlib",
        "pydantic",
        "typer",
        "rich",
        "mpi4py",
        "tokenizers",
        "transformers",
        "tensorboard",
    ):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    facts["mpirun"] = shutil.which("mpirun", path=path) or "not found"
    try:
        from spipe import _native

        features = _native.features()
        facts["native instruction set"] = features["instruction_set"]
        facts["native usable cores"] = features["usable_cores"]
    except ImportError as error:
        facts["native code"] = f"not built ({error}); install the package, or build it with cmake"
    try:
        from spipe.runtime.system import device_facts

        facts |= device_facts()
    except ImportError as error:
        facts["devices"] = f"unknown: torch cannot be imported ({error})"
    output.show({"doctor": facts}, lambda console: show.facts(console, facts))


COMMANDS = (models, hardware, doctor)
