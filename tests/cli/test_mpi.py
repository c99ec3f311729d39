"""A search in MPI's processes: the same plan and table as in one process, errors with the same exit status."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MPIRUN = str(Path(sys.executable).with_name("mpirun"))
SEARCH = [
    "search", "--model", "10b", "--hardware", "v100x4", "--global-batch", "16", "--sequence", "1024",
    "--microbatch-size", "2", "--schedule", "spipe", "--forward-stages", "2", "--backward-stages", "4",
    "--effort", "0.3",
]  # fmt: skip


def mpi(processes: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    launch = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", str(processes)]
    command = [*launch, sys.executable, "-m", "mpi4py.futures", "-m", "spipe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(MPIRUN) is None, reason="needs mpirun, as the mpi extra has it"),
]


@pytest.mark.parametrize("processes", [2, 3])
def test_mpi_finds_the_same_plan_as_one_process(processes: int, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    one = [sys.executable, "-m", "spipe", *SEARCH, "--workers", "1", "--json", str(alone)]
    subprocess.run(one, check=True, capture_output=True, timeout=300)
    result = mpi(processes, *SEARCH, "--json", str(together))
    assert result.returncode == 0, result.stderr
    assert f"working in {processes - 1} MPI processes" in result.stderr
    assert together.read_bytes() == alone.read_bytes()


def test_errors_end_all_processes_with_their_status() -> None:
    result = mpi(3, *SEARCH, "--model", "nope")
    assert result.returncode == 2
    assert "unknown model 'nope'" in result.stderr
