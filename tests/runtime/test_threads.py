"""How many threads a rank's optimizer gets unless the plan says so."""

import pytest

from spipe import _native
from spipe.runtime.rank import default_optimizer_threads


@pytest.mark.parametrize(
    ("cores", "device", "num_ranks", "threads"),
    [
        (16, "cuda", 1, 14),
        (32, "cuda", 2, 14),
        (8, "cuda", 2, 4),
        (4, "cuda", 8, 1),
        (16, "cpu", 1, 16),
        (2, "cpu", 4, 1),
    ],
)
def test_cores_are_shared_out_and_launching_keeps_two(
    monkeypatch: pytest.MonkeyPatch, cores: int, device: str, num_ranks: int, threads: int
) -> None:
    monkeypatch.setattr(_native, "features", lambda: {"usable_cores": cores})
    assert default_optimizer_threads(device, num_ranks) == threads
