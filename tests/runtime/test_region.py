"""Shared memory between processes, and the check of host memory."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spipe.errors import SpipeError
from spipe.runtime import region as region_module
from spipe.runtime.region import Region, RegionPlan, Span
from spipe.runtime.system import _room, available_host_memory, require_host_memory


def test_another_process_opens_the_region() -> None:
    region = Region.create(1 << 20)
    view = region.tensor(Span(4096, 8), torch.int64)
    view[0] = 42
    code = (
        "import sys, torch; from spipe.runtime.region import Region, Span; r = Region.open(sys.argv[1]);"
        "t = r.tensor(Span(4096, 8), torch.int64); assert t[0] == 42; t[0] = 43"
    )
    subprocess.run([sys.executable, "-c", code, region.address()], check=True)
    assert view[0] == 43
    region.close()


def test_the_descriptor_travels_where_proc_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region.create(8192)
    address = region.address()
    real_open = os.open

    def refuse(path: str, *rest: int) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(path)
        return real_open(path, *rest)

    monkeypatch.setattr(region_module.os, "open", refuse)
    other = Region.open(address)
    region.tensor(Span(0, 4), torch.int32)[0] = 7
    assert other.tensor(Span(0, 4), torch.int32)[0] == 7
    other.close()
    region.close()
    with pytest.raises(SpipeError, match="neither through /proc nor through the socket"):
        Region.open(address)


def test_the_region_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    region = Region.create(4096)
    assert os.stat(region.descriptor).st_mode & 0o777 == 0o600
    region.address()
    region.close()
    del region
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_parts_are_aligned() -> None:
    plan = RegionPlan()
    assert [plan.add(5).offset, plan.add(64).offset, plan.add(1, 4096).offset] == [0, 64, 4096]


def test_too_little_memory_is_a_table() -> None:
    require_host_memory({"weights": 10, "gradients": 20}, 30)
    with pytest.raises(SpipeError) as caught:
        require_host_memory({"weights": 3 << 30, "gradients": 1 << 30}, 2 << 30)
    message = str(caught.value)
    assert "the run needs 4.000 GiB, 2.000 GiB are available" in message
    assert "weights" in message
    assert "3.000 GiB" in message


def test_available_memory_under_limits(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable:  600 kB\nHugePages_Total: 0\n")
    assert available_host_memory(meminfo, tmp_path) == 600 * 1024
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("200000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert _room(tmp_path, "memory.max", "memory.current") == 350000
    (tmp_path / "memory.max").write_text("max\n")
    assert _room(tmp_path, "memory.max", "memory.current") is None
    assert available_host_memory() > 0
