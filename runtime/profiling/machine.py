"""Facts about this machine: cores, memory, NUMA domains, devices, and how they are connected."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from spipe import _native
from spipe.runtime.system import available_host_memory

_SYSTEM = Path("/sys")


def facts(device: str, system: Path = _SYSTEM) -> dict[str, Any]:
    """All that needs no measuring; what the system does not tell is left out."""
    features = _native.features()
    found: dict[str, Any] = {
        "device": device,
        "host": platform.node(),
        "cpu": cpu_name(),
        "cores": int(features["usable_cores"]),
        "numa_domains": numa_domains(system),
        "instruction_set": features["instruction_set"],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "available_bytes": available_host_memory(),
        "torch": torch.__version__,
        "gpus": [],
    }
    if device == "cuda":
        found["gpus"] = [_gpu(index, system) for index in range(torch.cuda.device_count())]
        found["peer_access"] = [
            [a, b]
            for a in range(len(found["gpus"]))
            for b in range(len(found["gpus"]))
            if a != b and torch.cuda.can_device_access_peer(a, b)
        ]
        found["topology"] = _nvidia_smi("topo", "-m")
    return found


def load() -> dict[str, float]:
    """How busy the machine is: runnable processes over the last minute for each usable core."""
    return {"per_core": os.getloadavg()[0] / max(int(_native.features()["usable_cores"]), 1)}


def cpu_name(information: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or the architecture's where there is none."""
    try:
        lines = information.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or "unknown processor"


def numa_domains(system: Path = _SYSTEM) -> list[dict[str, Any]]:
    """NUMA domains with the cores of each, as the system writes them."""
    domains = []
    for folder in sorted((system / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores = _text(folder / "cpulist")
        if cores:
            domains.append({"number": int(folder.name[4:]), "cores": cores})
    return domains


def _gpu(index: int, system: Path) -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties(index)
    found = {"name": properties.name, "memory_bytes": int(properties.total_memory)}
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if all(isinstance(part, int) for part in parts):
        domain, bus, slot = parts
        folder = system / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{slot:02x}.0"
        for name in ("numa_node", "max_link_speed", "max_link_width"):
            if (text := _text(folder / name)) is not None:
                found[name] = text
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _nvidia_smi(*arguments: str) -> str:
    """What the tool prints; nothing where it is missing, fails or hangs."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
