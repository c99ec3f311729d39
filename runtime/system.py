"""What the machine offers: host memory under its limits."""

from collections.abc import Iterator, Mapping
from pathlib import Path

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
