"""The benchmark of what surrounds training: what it compares with what, and all of it once."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_extras  # noqa: E402

from spipe.hardware import load_hardware  # noqa: E402
from spipe.model import load_model  # noqa: E402
from spipe.plan import make_plan  # noqa: E402
from spipe.runtime import RunResult  # noqa: E402


class Bench(bench_extras.Bench):
    """The machine gets slower with every run; a checkpoint takes a quarter more, a trace half."""

    def go(self, max_norm: float | None = None, optimizer: str = "async", **more: Any) -> RunResult:
        self.num_runs += 1
        made.append((max_norm, optimizer, more))
        seconds = (1.0 + 0.01 * self.num_runs) * (1.25 if "checkpoint_every" in more else 1.0)
        seconds *= 1.5 if "trace_steps" in more else 1.0
        if "checkpoint_every" in more:
            self.log({"message": "checkpoint of step 20: folder, 3.0 MB, 0.50 s"})
        output = self.folder / str(self.num_runs)
        output.mkdir()
        rows = [json.dumps({"gradient_norm": 1.0 + step}) + "\n" for step in range(self.options.steps)]
        (output / "metrics.jsonl").write_text("".join(rows))
        clipped = [step for step in range(self.options.steps) if max_norm is not None and 1.0 + step > max_norm]
        times = [100.0] * 3 + [seconds] * (self.options.steps - 3)
        return RunResult(output, [], times, seconds, 1.0, [], {"clipped_steps": clipped})


made: list[Any] = []


def test_costs_are_over_runs_around_them(tmp_path: Path) -> None:
    made.clear()
    plan = make_plan(
        load_model("tiny"), load_hardware("laptop"), num_ranks=2, forward_stages=1, backward_stages=1, global_batch=4,
        microbatch_size=2, sequence=16, precision="fp32",
    )  # fmt: skip
    options = Namespace(steps=43, every=20, seconds=0.0, ranks=2)
    report = Bench(plan, options, tmp_path, None).measure()  # type: ignore[arg-type]
    assert report["rounds"] == 2
    cost = {name: value["median"] for name, value in report["cost"].items()}
    assert len(cost) == 8
    assert cost.pop("a checkpoint every 20 steps") == pytest.approx(0.25, abs=0.06)
    assert cost.pop("a trace of all steps") == pytest.approx(0.5, abs=0.06)
    assert max(map(abs, cost.values())) < 0.06  # the drift within a round: the runs around are its mean
    assert [name for name in cost if name.startswith("clipping")] == [
        f"clipping, {share} of steps clipped" for share in ("0%", "7%", "49%", "100%")
    ]
    # Between two runs without extras each round has all kinds, from another one on.
    rounds = made[1:11], made[11:]
    assert all(part[0] == part[-1] == (None, "async", {}) for part in rounds)
    assert rounds[1][1:-1] == [*rounds[0][2:-1], rounds[0][1]]
    text = bench_extras.table(report)
    assert "checkpoints are written at" in text
    assert text.splitlines()[2].split()[:3] == ["step,", "without", "extras"]


@pytest.mark.slow
def test_the_whole_of_it(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "bench_extras.py", "--steps", 10, "--every", 5, "--seconds", 1]
    command += ["--sequence", 16, "--json", tmp_path / "extras.json", "--folder", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "extras.json").read_text())
    assert report["rounds"] == 2
    assert len(report["cost"]) == 8
    assert report["share_of_disk"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["extras.json"]
