"""What a run was started with, apart from its configuration: versions, source, machine."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import spipe

ENVIRONMENT_FILE = "environment.jsonl"
"""A line for every time that a run was started in the folder."""
PACKAGES = ("torch", "numpy", "triton", "safetensors", "tokenizers", "mpi4py", "pydantic")

PROCESS_DEFAULTS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # memory that one op frees serves tensors of any size
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # a stream that waits must not hold up one that shares its queue
}
"""Variables that the process of a rank starts with, unless they are set."""


def environment() -> dict[str, Any]:
    """Versions, git commits, command and hardware, ready for JSON."""
    return {
        "command": [sys.executable, *sys.argv],
        "versions": {"spipe": spipe.__version__, "python": platform.python_version(), **_versions()},
        "git": {
            "spipe": git_commit(Path(spipe.__file__).parent),
            "working directory": git_commit(Path.cwd()),
        },
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "gpus": _output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
    }


def _output_of(*command: str | Path) -> list[str]:
    """Lines that a program prints; none if it cannot be run. (PyTorch would take memory of every GPU to answer.)"""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(folder: Path) -> str | None:
    """Commit of the repository that holds a folder, ``+`` behind it if tracked files were changed; None: no
    repository, or no git."""
    commit = _output_of("git", "-C", folder, "rev-parse", "HEAD")
    changes = _output_of("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return commit[0] + "+" * bool(changes) if commit else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
