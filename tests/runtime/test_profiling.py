"""Profiling: every part gives samples, on this machine's CPU and on pretended GPUs; what fails becomes a note."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spipe.errors import SpipeError
from spipe.model import ModelSpec
from spipe.plan import make_plan
from spipe.profile import Profile
from spipe.runtime import profiling
from spipe.runtime.job import Job
from spipe.runtime.profiling import copies, layers, machine, process, repeat
from spipe.sim.profiled import hardware_of

SMALL = ModelSpec(name="small", num_layers=2, hidden_size=32, ffn_size=80, num_heads=4, num_kv_heads=2, vocab_size=64)


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling.host, "num_parameters", lambda: 1 << 16)
    monkeypatch.setattr(repeat, "_BRIEF_S", 1e-4)
    monkeypatch.setattr(profiling, "process_bytes", lambda device: 3e8)


def test_this_machine_is_measured_and_becomes_a_spec() -> None:
    seen: list[tuple[int, int, str]] = []
    shapes = profiling.shapes_of([SMALL], [1, 2], [16], ["fp32"])
    found = profiling.profile(shapes, device="cpu", effort=0.02, progress=lambda *step: seen.append(step))
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    assert {total for _, total, _ in seen} == {seen[-1][0]}
    assert found.notes == []
    assert {sample.what for sample in found.samples} == {"triad", "adam", "copy", "issue", "matmul", "layer"}
    for sample in found.samples:
        assert len(sample.seconds) >= repeat.LEAST
        assert min(sample.seconds) > 0
    passes = {(s.about["layer_kind"], s.about["pass_name"], s.about["microbatch_size"]) for s in found.find("layer")}
    assert len(passes) == 3 * 3 * 2
    spec = hardware_of(found, "here")
    assert spec.find_measured(SMALL, "block", "backward", 2, 16, "fp32") is not None
    assert spec.cpu.cores == profiling.host.cores()
    assert spec.cpu.process_bytes == 3e8
    plan = make_plan(SMALL, spec, num_ranks=1, global_batch=1, microbatch_size=1, sequence=8, precision="fp32",
                     forward_stages=1, backward_stages=2)  # fmt: skip
    assert Job(plan, 1, Path("unused")).table_of_bytes()["PyTorch processes"] == 3e8


@pytest.mark.slow
def test_a_process_of_a_rank_is_measured() -> None:
    assert 50e6 < process.process_bytes("cpu") < 2e9
    with pytest.raises(RuntimeError, match="a process of its own failed"):
        process.process_bytes("tpu")


def test_a_part_that_fails_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(device: str) -> int:
        raise RuntimeError("it failed")

    monkeypatch.setattr(profiling, "process_bytes", no_process)

    def fail() -> list[profiling.Sample]:
        raise RuntimeError("no memory\nand more")

    good = profiling.Sample("issue", {}, (1.0,))
    tasks = [("memory bandwidth of the host", fail), ("host issue", lambda: [good])]
    monkeypatch.setattr(profiling, "_tasks", lambda *_: tasks)
    found = profiling.profile(profiling.shapes_of([SMALL], [1], [8], ["fp32"]), device="cpu", effort=0.01)
    assert found.notes == [
        "memory bandwidth of the host: not measured (no memory)",
        "memory of a rank's process: not measured (it failed)",
    ]
    assert found.samples == [good]


def test_profiles_without_shapes_or_with_impossible_ones_are_refused() -> None:
    with pytest.raises(SpipeError, match="at least one model"):
        profiling.profile([], device="cpu")
    with pytest.raises(SpipeError, match="microbatch_size = 0"):
        profiling.profile([(SMALL, 0, 8, "fp32")], device="cpu")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"spipe_profile": 2}', '{"spipe_profile": 1, "machine": {}, "samples": [{}], "notes": []}',
     '{"spipe_profile":1,"machine":{},"samples":[{"what":"adam","about":{},"seconds":[-1]}],"notes":[]}',
     '{"spipe_profile":1,"machine":{},"samples":[{"what":"adam","about":{},"seconds":[]}],"notes":[]}'],
)  # fmt: skip
def test_files_that_are_no_profiles_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(SpipeError, match=r"profile\.json: not a profile"):
        Profile.load(tmp_path / "profile.json")


class FakeEvent:
    clock = 0.0

    def __init__(self, **_: bool) -> None: ...

    def record(self) -> None:
        FakeEvent.clock += 1.0
        self.at = FakeEvent.clock

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at - self.at


def test_the_parts_for_gpus_run_on_two_pretended_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        device_count=lambda: 2,
        synchronize=lambda device=None: None,
        Stream=lambda device: None,
        stream=lambda stream: contextlib.nullcontext(),
        Event=FakeEvent,
        cudart=lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
    )
    for module in (copies, layers, repeat):
        monkeypatch.setattr(module, "cuda", fake)
    monkeypatch.setattr(copies, "device_of", lambda index: torch.device("cpu"))
    monkeypatch.setattr(copies, "SIZES", (64, 128, 256, 512))
    monkeypatch.setattr(copies, "MIB", 256)
    plain = torch.ones

    def ones(*arguments: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        return plain(*arguments, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "ones", ones)
    samples = [
        *copies.host_copies(0.001), *copies.peer_copies(0.001), *copies.device_copy(0.001), *copies.page_lock(1.0),
        *copies.adam_beside_copies("bf16", 2, 0.01),
    ]  # fmt: skip
    assert {(s.about["memory"], s.about["devices"]) for s in samples if s.what == "copy"} == {
        ("page-locked", 1), ("page-locked", 2), ("pageable", 1)
    }  # fmt: skip
    assert {s.what for s in samples} == {"copy", "peer copy", "device copy", "page lock", "adam"}
    assert all(min(s.seconds) > 0 for s in samples)
    layer = layers._build(SMALL, "block", 2, 16, "fp32", "cpu")
    assert layers._cuda_rounds(layers._one_by_one(layer))(layer, 3) == [(1e-3, 1e-3, 1e-3)] * 3
    fake.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2)
    with pytest.raises(RuntimeError, match="gave CUDA error 2"):
        copies.page_lock(1.0)


def test_passes_are_recorded_after_they_were_used_and_replayed_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended device: what is done while recording is the pass, and nothing is done again to replay it."""
    said: list[str] = []

    class Graph:
        def __init__(self) -> None:
            self.name = ""

        def replay(self) -> None:
            said.append(f"replay {self.name}")

    @contextlib.contextmanager
    def recording(graph: Graph, **_: object) -> Iterator[None]:
        begin = len(said)
        yield
        (graph.name,) = said[begin:]

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fake = SimpleNamespace(
        graph_pool_handle=lambda: None, Stream=lambda: stream, current_stream=lambda: stream,
        stream=lambda stream: contextlib.nullcontext(), CUDAGraph=Graph, graph=recording, Event=FakeEvent,
        synchronize=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(layers, "cuda", fake)
    layer = layers._build(SMALL, "block", 2, 16, "fp32", "cpu")
    for name in ("forward", "recompute", "backward"):
        work = getattr(layers._Layer, name)

        def noted(*arguments: object, name: str = name, work: Callable[..., object] = work) -> object:
            said.append(name)
            return work(*arguments)

        monkeypatch.setattr(layers._Layer, name, noted)
    passes = layers._recorded(layer)
    assert said == 3 * ["forward", "recompute", "backward"]
    assert float(layer.gradients[-1].abs().sum()) > 0
    said.clear()
    assert layers._cuda_rounds(passes)(layer, 2) == [(1e-3, 1e-3, 1e-3)] * 2
    assert said == 2 * ["replay forward", "replay recompute", "replay backward"]
    times = layers._replay_times("cpu")
    assert len(times) > 20
    assert min(times) > 0


def test_domains_and_processors_are_read_from_the_system(tmp_path: Path) -> None:
    for number, cores in ((0, "0-3"), (1, "4-7"), (2, "")):
        folder = tmp_path / "devices/system/node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    assert machine.numa_domains(tmp_path) == [{"number": 0, "cores": "0-3"}, {"number": 1, "cores": "4-7"}]
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU\n")
    assert machine.cpu_name(tmp_path / "cpuinfo") == "Some CPU"
    assert machine.cpu_name(tmp_path / "nothing")
