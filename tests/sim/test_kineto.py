"""Layer times from PyTorch's profiler: a real trace of a CPU, a written one of a GPU, and files that are neither."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.sim.kineto import layer_times, read, with_layers


def test_a_real_trace_of_a_checkpointed_model(tmp_path: Path) -> None:
    """Every block of two steps has a forward, a recompute and a backward, and they are most of the step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(3)]
    head = torch.nn.Linear(256, 1)
    x = torch.randn(2048, 256)

    def block(number: int, y: torch.Tensor) -> torch.Tensor:
        with record_function(f"block {number}"):
            return torch.relu(layers[number](y))

    def step() -> None:
        y = x
        for number in range(len(layers)):
            y = checkpoint(block, number, y, use_reentrant=False)
        with record_function("head"):
            loss = head(y).sum()
        loss.backward()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(2):
            with record_function("training step"):
                step()
    path = tmp_path / "trace.json"
    found.export_chrome_trace(str(path))
    events = read(path)
    times = layer_times(events)
    for name in ("forward", "recompute", "backward"):
        assert len(times["block", name]) == 6, name
        assert min(times["block", name]) > 0
    assert len(times["head", "forward"]) == len(times["head", "backward"]) == 2
    assert ("head", "recompute") not in times
    steps = sum(event.end - event.begin for event in events.ranges if event.name == "training step")
    assert 0.4 * steps < sum(map(sum, times.values())) <= steps

    gzipped = tmp_path / "trace.json.gz"
    gzipped.write_bytes(gzip.compress(path.read_bytes()))
    assert layer_times(read(gzipped)) == times
    with pytest.raises(SpipeError, match=r"no range of the trace is a block .*'training step\*' \(2\)"):
        layer_times(events, {"block": ("nn.Module: *DecoderLayer_*",)})


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"traceEvents": rows}))
    return path


def gpu_rows() -> list[dict[str, Any]]:
    """A block whose kernels run later than they are launched, and overlap: forward 30 us, backward 50 us."""
    rows: list[dict[str, Any]] = []

    def add(category: str, name: str, begin: float, dur: float, thread: int = 1, **arguments: Any) -> None:
        rows.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": begin, "dur": dur,
             "args": arguments}
        )  # fmt: skip

    add("python_function", "nn.Module: LlamaDecoderLayer_0", 0, 10)
    add("python_function", "nn.Module: LlamaDecoderLayer_0.inner Block_1", 1, 2)
    add("cpu_op", "aten::linear", 2, 3, **{"Sequence number": 5})
    add("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=11)
    add("cuda_runtime", "cudaLaunchKernel", 4, 1, correlation=12)
    add("kernel", "gemm", 100, 20, 7, correlation=11)
    add("kernel", "relu", 110, 20, 7, correlation=12)
    add("cuda_runtime", "cudaLaunchKernel", 20, 1, correlation=13)
    add("kernel", "something else", 130, 500, 7, correlation=13)
    step = "autograd::engine::evaluate_function: "
    add("cpu_op", step + "AddmmBackward0", 30, 5, 2, **{"Sequence number": 5})
    add("cuda_runtime", "cudaLaunchKernel", 31, 1, 2, correlation=21)
    add("kernel", "gemm backward", 700, 40, 7, correlation=21)
    add("cpu_op", step + "torch::autograd::AccumulateGrad", 36, 2, 2)
    add("cuda_runtime", "cudaMemsetAsync", 37, 1, 2, correlation=22)
    add("gpu_memset", "Memset", 740, 10, 7, correlation=22)
    add("cpu_op", step + "OtherBackward0", 40, 2, 2, **{"Sequence number": 99})
    add("cuda_runtime", "cudaLaunchKernel", 41, 1, 2, correlation=23)
    add("kernel", "not ours", 760, 90, 7, correlation=23)
    return rows


def test_kernels_belong_to_the_range_that_launched_them(tmp_path: Path) -> None:
    times = layer_times(read(written(tmp_path / "trace.json", gpu_rows())))
    assert times.keys() == {("block", "forward"), ("block", "backward")}
    assert times["block", "forward"] == [pytest.approx(30e-6)]
    assert times["block", "backward"] == [pytest.approx(50e-6)]


def test_the_times_go_into_a_spec(tmp_path: Path) -> None:
    model, start = load_model("llama2-7b"), load_hardware("h200x1")
    times = layer_times(read(written(tmp_path / "trace.json", gpu_rows())))
    spec = with_layers(start, times, model, 2, 2048, "bf16")
    for name, seconds in (("forward", 30e-6), ("recompute", 30e-6), ("backward", 50e-6)):
        entry = spec.find_measured(model, "block", name, 2, 2048, "bf16")  # type: ignore[arg-type]
        assert entry is not None
        assert entry.seconds == pytest.approx(seconds)
    assert spec.find_measured(model, "head", "forward", 2, 2048, "bf16") is None
    assert with_layers(spec, times, model, 2, 2048, "bf16") == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a readable trace"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "na', "it may be cut off"),
        ("{}", "no traceEvents"),
        ('{"traceEvents": []}', "no ops of PyTorch"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "cat": "cpu_op", "ts": "x"}]}', r"traceEvents\[0\] is damaged"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "cat": "kernel", "ts": 1, "dur": -5}]}', r"traceEvents\[0\]"),
        ('{"traceEvents": [], "metadata": {"spipe_trace": 1}}', "is a trace of spipe; use `spipe calibrate`"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(SpipeError, match=message):
        read(tmp_path / "trace.json")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(SpipeError, match="not a readable trace"):
        read(tmp_path / "cut.json.gz")
