"""The simulator's benchmark: what it is held to whatever the speed of the machine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_sim


def test_lowering_is_about_as_fast_as_the_engine_and_memory_is_bounded() -> None:
    result = bench_sim.bench(rounds=3)
    assert result["lowered_ops_per_s"] >= 0.7 * result["ops_per_s"]  # 1.4 on an idle machine; others may be at work
    assert result["bytes_per_counted_op"] <= 600
    assert 0.6 < result["ops"] / result["all_ops"] < 0.8  # one of two for a message, nothing for FREE and COMMIT
