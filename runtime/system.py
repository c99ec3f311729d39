"""What the machine offers: host memory under its limits, devices."""

import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spipe.errors import SpipeError

_GROUPS = Path("/sys/fs/cgroup")


def available_host_memory(meminfo: Path = Path("/proc/meminfo"), groups: Path = _GROUPS) -> int:
    """Bytes that processes may still take: MemAvailable, or less where a control group (version 1 or 2) limits it."""
    values = {}
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.split()[-1:] == ["kB"]:
            values[name] = int(rest.split()[0]) * 1024
    available = values.get("MemAvailable", values["MemTotal"])
    return min([available, *_group_rooms(groups)])


def own_resident_bytes() -> int:
    """Resident memory of this process that it shares with no other."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * resource.getpagesize()


def _group_rooms(groups: Path) -> Iterator[int]:
    """Room under the limit of this process's group and of every group above it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups if not controllers else groups / "memory"
        names = (
            ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        relative = Path(path.lstrip("/"))
        for folder in (relative, *relative.parents):
            room = _room(root / folder, *names)
            if room is not None:
                yield room


def _room(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit, usage = (folder / limit_name).read_text().strip(), int((folder / usage_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= 1 << 60:
        return None
    return int(limit) - max(usage - int(statistics.get("inactive_file", 0)), 0)


def require_host_memory(items: Mapping[str, int], available_bytes: int) -> None:
    """Raises SpipeError with a table of bytes per item if their sum is more than there is."""
    needed = sum(items.values())
    if needed <= available_bytes:
        return
    rows = "\n".join(f"  {name:<28} {size / 2**30:10.3f} GiB" for name, size in items.items())
    raise SpipeError(
        f"not enough host memory: the run needs {needed / 2**30:.3f} GiB, {available_bytes / 2**30:.3f} GiB are "
        f'available\n{rows}\nUse a smaller model, optimizer = "sync" in the options (no undo data), or say how much '
        "this machine has if it shows less (`spipe run --host-memory-gib`; host_memory_bytes in Python)"
    )


def device_facts() -> dict[str, Any]:
    """What a run can use here: host memory, the limit of page-locking, devices and how they reach each other."""
    import torch

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts: dict[str, Any] = {
        "host memory": f"{available_host_memory() / 2**30:.1f} GiB",
        "memory that may be page-locked": "all" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.1f} MiB",
        "devices": ["cpu"],
    }
    if not torch.cuda.is_available():
        return facts
    count = torch.cuda.device_count()
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        facts["devices"].append(f"cuda:{index} {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    facts["CUDA of torch"] = torch.version.cuda
    facts["NCCL"] = "none"
    if torch.distributed.is_nccl_available():
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    without = [f"{a} to {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if pairs:
        facts["peer access"] = (
            f"not from {', '.join(without)}: use transport host" if without else "between all devices"
        )
    return facts
