"""A spec from a profile: a known machine is recovered, and what makes a profile doubtful is said."""

import random
from pathlib import Path
from typing import Any

import pytest

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, MeasuredLayer, load_hardware
from spipe.model import LAYER_KINDS, PASS_FACTOR, ModelSpec, load_model
from spipe.plan import make_plan
from spipe.profile import Profile, Sample
from spipe.sim import simulate
from spipe.sim.cost import CostModel
from spipe.sim.profiled import hardware_of, warnings_of

MIB = 1 << 20
BLOCK = load_model("llama2-7b")


def samples_of(seconds: float, noise: float = 0.01, count: int = 41) -> tuple[float, ...]:
    generator = random.Random(str(seconds))
    return tuple(seconds * (1 + generator.gauss(0, noise)) for _ in range(count))


def layer_samples(truth: HardwareSpec, model: ModelSpec, size: int, sequence: int, dtype: str) -> list[Sample]:
    costs = CostModel(model, truth, dtype, sequence, size)
    return [
        Sample(
            "layer",
            {"layer_kind": kind, "pass_name": name, "microbatch_size": size, "sequence": sequence, "dtype": dtype,
             "head_dim": model.head_dim, **MeasuredLayer.shape_of(model, kind)},
            samples_of(max(costs.layer_s(kind, name), 1e-7)),
        )
        for kind in LAYER_KINDS
        for name in PASS_FACTOR
    ]  # fmt: skip


def gpu_profile(
    truth: HardwareSpec, all_at_once: float = 1.0, peer_gb_per_s: float = 392.0, undo_slowdown: float = 1.1
) -> Profile:
    """Two GPUs whose copies at the same time reach ``all_at_once`` of twice one's."""
    link, number = truth.links[0], 2
    machine = {
        "device": "cuda", "cpu": "a processor", "cores": truth.cpu.cores, "numa_domains": [{"number": 0}],
        "memory_bytes": truth.cpu.memory_bytes, "available_bytes": truth.cpu.memory_bytes, "torch": "2", "date": "now",
        "gpus": [{"name": "a GPU", "memory_bytes": truth.accelerator.memory_bytes}] * number,
        "peer_access": [[0, 1], [1, 0]] if peer_gb_per_s else [], "compute_threads": 1,
    }  # fmt: skip
    found: list[Sample] = []

    def add(what: str, seconds: float, **about: Any) -> None:
        found.append(Sample(what, about, samples_of(seconds)))

    for size in (MIB, 16 * MIB, 128 * MIB):
        alone = link.latency_s + size / link.bandwidth_bytes_per_s
        for way in ("h2d", "d2h"):
            add("copy", alone, direction=way, bytes=size, memory="page-locked", devices=1)
        together = 2 * size / (link.both_directions_bytes_per_s or 2 * link.bandwidth_bytes_per_s)
        add("copy", together, direction="both", bytes=size, memory="page-locked", devices=1)
        if peer_gb_per_s:
            add("peer copy", 4e-5 + size / peer_gb_per_s / 1e9, bytes=size, source=0, target=1)
    for way in ("h2d", "d2h"):
        slow = 128 * MIB / link.bandwidth_bytes_per_s / all_at_once
        add("copy", slow, direction=way, bytes=128 * MIB, memory="page-locked", devices=number)
    add("copy", MIB / 9e9, direction="h2d", bytes=MIB, memory="pageable", devices=1)
    bandwidth = truth.accelerator.memory_bandwidth_bytes_per_s
    add("device copy", 2 * MIB / bandwidth, bytes=MIB)
    for name, issue_s in (("forward", 1e-4), ("recompute", 1.5e-4), ("backward", 3e-4)):
        add("issue", issue_s, device="cuda", pass_name=name)
    add("issue", 8e-5, device="cuda", replayed=True)
    add("page lock", 1e9 / 4e9, bytes=10**9)
    add("triad", 1e9 / truth.cpu.memory_bandwidth_bytes_per_s, threads=truth.cpu.cores, bytes=10**9)
    for count in (4096, 1 << 26):
        seconds = truth.cpu.adam_s_per_op + count / truth.cpu.adam_parameters_per_s
        add("adam", seconds, threads=truth.cpu.cores, parameters=count, dtype="bf16")
    add("adam", seconds / undo_slowdown, threads=truth.cpu.cores, parameters=count, dtype="bf16", undo=False)
    for dtype, peak in truth.accelerator.peak_flops.items():
        add("matmul", 1e12 / (peak * 0.9), dtype=dtype, flops=1e12)
    for size in (1, 2, 4):
        found += layer_samples(truth, BLOCK, size, 2048, "bf16")
    return Profile(machine, found)


def test_a_known_gpu_host_is_recovered(tmp_path: Path) -> None:
    truth = load_hardware("h200x2")
    spec = hardware_of(gpu_profile(truth), "here")
    for found, true in zip(spec.links, truth.links, strict=True):
        assert (found.a, found.b) == (true.a, true.b)
        if true.b == "memory":
            assert found.bandwidth_bytes_per_s == pytest.approx(true.bandwidth_bytes_per_s, rel=0.02)
    assert spec.cpu.adam_parameters_per_s == pytest.approx(truth.cpu.adam_parameters_per_s, rel=0.02)
    assert spec.cpu.undo_slowdown == pytest.approx(1.1, rel=0.02)
    assert hardware_of(gpu_profile(truth, undo_slowdown=0.9), "here").cpu.undo_slowdown == 1.0
    assert hardware_of(gpu_profile(truth, undo_slowdown=75.0), "here").cpu.undo_slowdown == 1.5  # a busy machine
    assert spec.accelerator.launch_overhead_s == pytest.approx(8e-5, rel=0.02)
    assert spec.cpu.page_lock_bytes_per_s == pytest.approx(4e9, rel=0.02)
    assert spec.cpu.pageable_bytes_per_s == pytest.approx(9e9, rel=0.02)
    plan = make_plan(
        BLOCK, truth, forward_stages=2, backward_stages=6, global_batch=8, microbatch_size=2, sequence=2048
    )
    assert simulate(plan, hardware=spec).step_s == pytest.approx(simulate(plan).step_s, rel=0.03)
    other = load_model("qwen3-8b")  # no layer of it was measured: the fitted curve is all there is
    for kind in ("block", "head"):
        for name in PASS_FACTOR:
            found_s = CostModel(other, spec, "bf16", 4096, 2).layer_s(kind, name)
            assert found_s == pytest.approx(CostModel(other, truth, "bf16", 4096, 2).layer_s(kind, name), rel=0.06)
    assert 0 < spec.uncertainty["cpu.adam_parameters_per_s"] < 0.01
    assert spec.provenance["measured"] == "measured"
    spec.save(tmp_path / "here.toml")
    assert load_hardware(tmp_path / "here.toml") == spec


def test_gpus_that_share_a_link_get_a_root_complex() -> None:
    truth = load_hardware("h200x2")
    spec = hardware_of(gpu_profile(truth, all_at_once=0.6, peer_gb_per_s=0), "here")
    assert not spec.peer_to_peer
    alone, shared = spec.links
    assert (alone.b, shared.a, shared.b) == ("root0", "root0", "memory")
    assert shared.bandwidth_bytes_per_s == pytest.approx(1.2 * alone.bandwidth_bytes_per_s, rel=0.05)
    by_pcie = hardware_of(gpu_profile(truth, peer_gb_per_s=40), "here")
    assert by_pcie.route(("gpu", 0), ("gpu", 1)).memory_accesses == ()


def test_a_profile_without_what_a_spec_needs_is_refused() -> None:
    whole = gpu_profile(load_hardware("h200x2"))
    for what in ("layer", "matmul", "adam", "copy", "device copy"):
        rest = [sample for sample in whole.samples if sample.what != what]
        with pytest.raises(SpipeError, match="profile again"):
            hardware_of(Profile(whole.machine, rest), "here")


def test_a_busy_machine_and_wide_samples_are_said() -> None:
    whole = gpu_profile(load_hardware("h200x2"))
    assert warnings_of(whole) == []
    busy = Sample("triad", {"threads": 2, "bytes": 8, "processor_share": 0.6}, (0.5, 1.0, 1.0, 1.5))
    wide = Sample("page lock", {"bytes": 8}, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8))
    first, *rest = warnings_of(Profile(whole.machine, [*whole.samples, busy, wide], ["page-locking: not measured"]))
    assert first == "page-locking: not measured"
    assert "our threads had 60% of it" in rest[0]
    assert any("page lock (bytes 8) varies" in line for line in rest)
