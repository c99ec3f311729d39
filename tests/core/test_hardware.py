"""Hardware specs: built-in machines, files and their units, routes, and what a wrong value is answered with."""

import json
import math
import pickle
import random
from pathlib import Path

import pytest

from spipe.errors import SpipeError
from spipe.hardware import (
    HARDWARE_NAMES,
    Cpu,
    HardwareSpec,
    MeasuredLayer,
    UnitCost,
    load_hardware,
)
from spipe.model import ModelSpec, load_model
from spipe.topology import Link, parse_node

EXPECTED = (
    "a100x8 h200x1 h200x2 h200x4 h200x8 ideal laptop rtx3090-cluster rtx3090x4 rtx4090-cluster rtx4090x8 "
    "v100-cluster v100-ideal-host v100x4"
)


def load_text(folder: Path, text: str) -> HardwareSpec:
    path = folder / "mine.toml"
    path.write_text(text)
    return load_hardware(path)


def edge_names(hardware: HardwareSpec, source: tuple[str, int], target: tuple[str, int]) -> list[str]:
    return [hardware.edges()[edge].name for edge in hardware.route(source, target).edges]  # type: ignore[arg-type]


# Built-in machines


def test_all_built_ins_are_there() -> None:
    assert " ".join(HARDWARE_NAMES) == EXPECTED


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_every_built_in_round_trips(name: str, tmp_path: Path) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.note
    path = tmp_path / "saved.toml"
    hardware.save(path)
    text = path.read_text()
    assert load_hardware(path) == hardware
    load_hardware(path).save(path)
    assert path.read_text() == text
    dumped = json.dumps(hardware.model_dump(mode="json"), allow_nan=False)
    assert HardwareSpec.model_validate(json.loads(dumped)) == hardware
    assert HardwareSpec.model_validate_json(hardware.model_dump_json()) == hardware
    assert hash(HardwareSpec.model_validate(json.loads(dumped))) == hash(hardware)


@pytest.mark.parametrize("name", HARDWARE_NAMES)
def test_every_pair_of_places_has_a_route(name: str) -> None:
    hardware = load_hardware(name)
    topology = hardware.topology
    places = [("gpu", rank) for rank in range(hardware.num_ranks)]
    places += [("memory", host) for host in range(hardware.num_hosts)]
    for source in places:
        for target in places:
            route = topology.route(source, target)  # type: ignore[arg-type]
            if source == target:
                assert route.edges == ()
                continue
            used = [topology.edges[edge] for edge in route.edges]
            assert len(set(route.edges)) == len(route.edges)
            assert route.bandwidth_bytes_per_s == min(edge.bandwidth_bytes_per_s for edge in used)
            assert route.latency_s == pytest.approx(sum(edge.latency_s for edge in used))


def test_measured_numbers_are_in_base_units() -> None:
    h200 = load_hardware("h200x1")
    assert h200.accelerator.peak("bf16") == 989e12
    assert h200.accelerator.memory_bytes == 139 * 2**30
    assert h200.cpu.adam_parameters_per_s == 3.9e9
    assert h200.cpu.memory_bandwidth_bytes_per_s == 134e9
    route = h200.route(("memory", 0), ("gpu", 0))
    assert (route.bandwidth_bytes_per_s, route.latency_s) == (55e9, 1e-5)
    assert route.seconds(55e9) == pytest.approx(1 + 1e-5)
    # One LLaMA-7B block in bf16, 2 x 2048 tokens, took 2.96 ms.
    model = load_model("llama2-7b")
    flops = model.layer_forward_flops("block", 2, 2048, causal=True)
    assert flops / (989e12 * h200.accelerator.efficiency(4096, model.hidden_size)) == pytest.approx(2.96e-3, rel=0.02)


def test_the_ideal_machine_counts_blocks_only() -> None:
    ideal = load_hardware("ideal")
    assert ideal.num_ranks == 32
    assert ideal.unit_cost is not None
    assert ideal.unit_cost.layer_s("block", "forward") == ideal.unit_cost.layer_s("block", "recompute") == 1e-3
    assert ideal.unit_cost.layer_s("block", "backward") == 2e-3
    assert ideal.unit_cost.layer_s("head", "backward") == ideal.unit_cost.layer_s("embedding", "forward") == 0
    assert ideal.route(("gpu", 0), ("gpu", 31)).seconds(1e12) == 0
    assert ideal.accelerator.usable_memory_bytes == math.inf
    assert ideal.model_dump(mode="json")["cpu"]["memory_bytes"] == "inf"


def test_efficiency_and_dtypes() -> None:
    v100 = load_hardware("v100x4").accelerator
    half = v100.half_efficiency_tokens
    assert v100.efficiency(half, math.inf) == v100.efficiency(math.inf, half) == v100.max_efficiency / 2
    assert v100.efficiency(1024, 4096) == v100.efficiency(4096, 1024) < v100.efficiency(2048, 4096)
    assert v100.efficiency(0, 4096) == 0
    with pytest.raises(SpipeError, match="dtype 'bf16': NVIDIA V100 32 GB computes in fp32, fp16 only"):
        v100.peak("bf16")


def test_ranks_are_numbered_host_by_host() -> None:
    cluster = load_hardware("v100-cluster")
    assert [cluster.host_of(rank) for rank in (0, 3, 4, 31)] == [0, 0, 1, 7]
    assert list(cluster.ranks_of(1)) == [4, 5, 6, 7]
    with pytest.raises(SpipeError, match="rank 32 of hardware v100-cluster: should be 0 to 31"):
        cluster.host_of(32)
    assert cluster.resized(num_hosts=2).num_ranks == 8
    assert cluster.resized(num_hosts=1).replace(name="v100x4") == load_hardware("v100x4")


# Routes


def test_peer_to_peer_stays_out_of_host_memory() -> None:
    h200 = load_hardware("h200x2")
    route = h200.route(("gpu", 0), ("gpu", 1))
    assert edge_names(h200, ("gpu", 0), ("gpu", 1)) == [
        "host0/gpu0 -> host0/nvswitch0",
        "host0/nvswitch0 -> host0/gpu1",
    ]
    assert route.bandwidth_bytes_per_s == 392e9
    assert route.latency_s == 40e-6
    assert route.memory_accesses == ()


def test_without_peer_to_peer_messages_are_staged_in_host_memory() -> None:
    rtx = load_hardware("rtx3090x4")
    assert edge_names(rtx, ("gpu", 0), ("gpu", 2)) == [
        "host0/gpu0 -> host0/root0",
        "host0/root0 -> host0/memory0",
        "host0/memory0 -> host0/root0",
        "host0/root0 -> host0/gpu2",
    ]
    assert rtx.route(("gpu", 0), ("gpu", 2)).memory_accesses == ((0, 2),)
    assert edge_names(rtx, ("memory", 0), ("gpu", 2)) == ["host0/memory0 -> host0/root0", "host0/root0 -> host0/gpu2"]


def test_a_link_without_peer_to_peer_is_not_used_between_accelerators() -> None:
    h200 = load_hardware("h200x2").replace(peer_to_peer=False)
    assert h200.route(("gpu", 0), ("gpu", 1)).memory_accesses == ((0, 2),)
    assert h200.route(("gpu", 0), ("gpu", 1)).bandwidth_bytes_per_s == 55e9


def test_direct_rdma_crosses_hosts_without_memory() -> None:
    cluster = load_hardware("v100-cluster")
    route = cluster.route(("gpu", 0), ("gpu", 4))
    assert route.is_remote
    assert route.memory_accesses == ()
    assert edge_names(cluster, ("gpu", 0), ("gpu", 4)) == [
        "host0/gpu0 -> host0/root0",
        "host0/root0 -> host0/nic0",
        "host0/nic0 -> network",
        "network -> host1/nic0",
        "host1/nic0 -> host1/root0",
        "host1/root0 -> host1/gpu0",
    ]
    assert cluster.route(("memory", 0), ("gpu", 4)).memory_accesses == ((0, 1),)


def test_without_direct_rdma_remote_data_is_staged_on_both_hosts() -> None:
    cluster = load_hardware("rtx3090-cluster")
    assert cluster.route(("gpu", 0), ("gpu", 4)).memory_accesses == ((0, 2), (1, 2))
    assert cluster.route(("memory", 0), ("gpu", 4)).memory_accesses == ((0, 1), (1, 2))
    assert cluster.route(("gpu", 4), ("memory", 0)).memory_accesses == ((0, 1), (1, 2))
    assert cluster.route(("memory", 0), ("memory", 1)).memory_accesses == ((0, 1), (1, 1))


def test_both_directions_share_an_edge_only_where_the_link_limits_them() -> None:
    h200 = load_hardware("h200x1")
    down, up = h200.route(("memory", 0), ("gpu", 0)), h200.route(("gpu", 0), ("memory", 0))
    (shared,) = set(down.edges) & set(up.edges)
    assert h200.edges()[shared].bandwidth_bytes_per_s == 99e9
    rtx = load_hardware("rtx3090x4")
    down, up = rtx.route(("memory", 0), ("gpu", 0)), rtx.route(("gpu", 0), ("memory", 0))
    assert not set(down.edges) & set(up.edges)


def test_staged_data_shares_a_link_with_itself() -> None:
    rtx = load_hardware("rtx3090x4")
    links = tuple(
        link.replace(bandwidth_bytes_per_s=8e9, both_directions_bytes_per_s=10e9) if link.b == "memory" else link
        for link in rtx.links
    )
    narrow = rtx.replace(links=links)
    assert narrow.route(("gpu", 0), ("gpu", 1)).bandwidth_bytes_per_s == 5e9
    assert narrow.route(("gpu", 0), ("memory", 0)).bandwidth_bytes_per_s == 6e9


def test_the_nearest_memory_domain_and_the_widest_way_are_taken() -> None:
    def link(a: str, b: str, bandwidth: float) -> Link:
        return Link(a=a, b=b, bandwidth_bytes_per_s=bandwidth)

    hardware = load_hardware("h200x2").replace(
        links=(
            link("gpu0", "root0", 50e9),
            link("gpu1", "root1", 50e9),
            link("root0", "memory0", 100e9),
            link("root1", "memory1", 100e9),
            link("root0", "root1", 20e9),
            link("gpu*", "gpu*", 200e9),
        )
    )
    assert edge_names(hardware, ("memory", 0), ("gpu", 1)) == [
        "host0/memory1 -> host0/root1",
        "host0/root1 -> host0/gpu1",
    ]
    assert edge_names(hardware, ("gpu", 0), ("gpu", 1)) == ["host0/gpu0 -> host0/gpu1"]
    staged = hardware.replace(peer_to_peer=False).route(("gpu", 0), ("gpu", 1))
    assert staged.bandwidth_bytes_per_s == 20e9
    assert staged.memory_accesses == ((0, 2),)


def test_places_that_do_not_exist() -> None:
    hardware = load_hardware("v100x4")
    with pytest.raises(SpipeError, match="rank 4: should be 0 to 3"):
        hardware.route(("gpu", 4), ("gpu", 0))
    with pytest.raises(SpipeError, match="memory of host 1: should be 0 to 0"):
        hardware.route(("gpu", 0), ("memory", 1))


@pytest.mark.parametrize("name", ["gpu", "gpu0", "memory", "network", "nic3", "gpu*"])
def test_node_names(name: str) -> None:
    kind, number = parse_node(name)
    assert name.startswith(kind)
    assert number == (None if name == "gpu*" else int(name.removeprefix(kind) or 0))


# Files


def test_human_and_base_units_give_the_same(tmp_path: Path) -> None:
    base = 'extends = "h200x1"\n'
    human = load_text(tmp_path, base + "[accelerator]\nmemory_gib = 24\nlaunch_overhead_us = 7\n")
    plain = load_text(tmp_path, base + "[accelerator]\nmemory_bytes = 25769803776\nlaunch_overhead_s = 7e-6\n")
    other = load_text(tmp_path, base + "[accelerator]\nmemory_mib = 24576\nlaunch_overhead_ms = 0.007\n")
    assert human == plain == other
    assert human.accelerator.memory_bytes == 24 * 2**30
    assert load_text(tmp_path, base + "[accelerator]\nmemory_gb = 24").accelerator.memory_bytes == 24e9


def test_a_file_extends_a_built_in_or_another_file(tmp_path: Path) -> None:
    first = load_text(tmp_path, 'extends = "h200x8"\n[cpu]\ncores = 96\n')
    assert first.name == "mine"
    assert first.cpu == load_hardware("h200x8").cpu.replace(cores=96)
    second = tmp_path / "second.toml"
    second.write_text('extends = "mine.toml"\nranks_per_host = 4\n')
    assert load_hardware(second).replace(name="mine", ranks_per_host=8) == first
    (tmp_path / "mine.toml").write_text('extends = "second.toml"')
    with pytest.raises(SpipeError, match="extends itself"):
        load_hardware(second)


def test_measurements_round_trip_exactly(tmp_path: Path) -> None:
    dice = random.Random(1)
    model = load_model("tiny")
    rows = tuple(
        MeasuredLayer(
            layer_kind=kind,
            pass_name="backward",
            microbatch_size=batch,
            sequence=128,
            dtype="fp32",
            **MeasuredLayer.shape_of(model, kind),
            seconds=dice.random() * 1e-3,
            spread_s=dice.random() * 1e-5,
            num_samples=20,
        )
        for kind in ("embedding", "block", "head")
        for batch in (1, 2)
    )
    links = tuple(
        link.replace(bandwidth_bytes_per_s=dice.random() * 1e10, latency_s=dice.random() * 1e-4)
        for link in load_hardware("laptop").links
    )
    hardware = load_hardware("laptop").model_copy(
        update={
            "links": links,
            "measured": rows,
            "measured_op_overhead_s": {"FORWARD": dice.random() * 1e-4},
            "provenance": {
                "measured": "measured",
                "cpu.adam_s_per_op": "fitted",
                "accelerator.peak_flops.fp32": "fitted",
            },
        }
    )
    path = tmp_path / "measured.toml"
    hardware.save(path)
    assert load_hardware(path) == hardware
    assert HardwareSpec.model_validate_json(hardware.model_dump_json()) == hardware
    assert hardware.find_measured(model, "block", "backward", 2, 128, "fp32") == rows[3]
    assert hardware.find_measured(model, "head", "backward", 1, 128, "fp32") == rows[4]
    assert hardware.find_measured(model, "block", "backward", 2, 128, "bf16") is None
    assert hardware.find_measured(model.replace(ffn_size=384), "block", "backward", 2, 128, "fp32") is None


@pytest.mark.parametrize(
    ("changes", "memory_gib", "usable_gib"),
    [
        ({}, 128, 118),
        ({"cpu.memory_gib": 1024}, 1024, 944),
        ({"cpu.memory_gib": 32}, 32, 29.5),
        ({"cpu.memory_bytes": 2.0**36}, 64, 59),
        ({"cpu.memory_gib": 1024, "cpu.usable_memory_gib": 1000}, 1024, 1000),
        ({"cpu.usable_memory_gib": 100}, 128, 100),
    ],
)
def test_the_same_part_of_more_or_less_host_memory_is_usable(
    tmp_path: Path, changes: dict[str, float], memory_gib: float, usable_gib: float
) -> None:
    lines = "".join(f"{key} = {value}\n" for key, value in changes.items())
    written = load_text(tmp_path, f'extends = "h200x1"\n{lines}')
    (tmp_path / "again.toml").write_text('extends = "mine.toml"')
    for hardware in (load_hardware("h200x1").override(changes), written, load_hardware(tmp_path / "again.toml")):
        cpu = hardware.cpu
        assert (cpu.memory_bytes / 2**30, cpu.usable_memory_bytes / 2**30) == (memory_gib, usable_gib)


def test_limited_instead_of_unlimited_memory_is_usable() -> None:
    cpu = load_hardware("ideal").override({"cpu.memory_gib": 64}).cpu
    assert cpu.memory_bytes == cpu.usable_memory_bytes == 64 * 2**30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cpu.usable_memory_gib": 1024}, "cpu: usable_memory_gib = 1024 should not exceed memory_gib = 128$"),
        ({"cpu.usable_memory_gb": 65, "cpu.memory_gb": 64}, "usable_memory_gb = 65 should not exceed memory_gb = 64$"),
        ({"cpu.usable_memory_bytes": 2e11}, r"usable_memory_bytes = 2e\+11 should not exceed memory_bytes = 1.37"),
    ],
)
def test_more_usable_memory_than_there_is_is_refused_in_the_unit_given(changes: dict[str, float], message: str) -> None:
    with pytest.raises(SpipeError, match=message):
        load_hardware("h200x1").override(changes)


@pytest.mark.parametrize("date", ["2026-05", "2026-05-31"])
def test_a_price_is_of_a_month_or_a_day(tmp_path: Path, date: str) -> None:
    native = [date] if date.count("-") == 2 else []  # TOML has a type for days
    for value in (f'"{date}"', *native):
        hardware = load_text(tmp_path, f'extends = "h200x1"\nprice.date = {value}\n')
        assert hardware.price is not None
        assert hardware.price.date == date
        hardware.save(tmp_path / "saved.toml")
        assert load_hardware(tmp_path / "saved.toml") == hardware


@pytest.mark.parametrize("value", ['"yesterday"', '"2026-13"', '"2026-02-30"', '""', "2026", "true", "09:00:00"])
def test_a_price_of_no_date_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SpipeError, match=r"price.date = .* should be a month or a day, such as 2026-05"):
        load_text(tmp_path, f'extends = "h200x1"\nprice.date = {value}\n')


def test_override_uses_the_names_of_the_file() -> None:
    hardware = load_hardware("h200x2").override({"accelerator.memory_gib": 24, "ranks_per_host": 1})
    assert hardware.accelerator.memory_bytes == 24 * 2**30
    assert hardware.num_ranks == 1
    with pytest.raises(SpipeError, match=r"override: accelerator.memory_gib = 0 should be greater than 0"):
        hardware.override({"accelerator.memory_gib": 0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ranks_per_host = -1", "ranks_per_host = -1 should be greater than or equal to 1"),
        ('device = "tpu"', "device = 'tpu' should be 'cuda' or 'cpu'"),
        ('devise = "cpu"', "unknown key 'devise'; nearest: device"),
        ("schema_version = 2", "schema_version = 2 should be 1"),
        ("accelerator = 3", "accelerator = 3 should be a table of fields"),
        ("links = []", "links = [] should have a link"),
        ("num_hosts = 2", "links: no way from memory of host 0 to rank 1"),
        ("[accelerator]\nmemory_gib = -5", "accelerator.memory_gib = -5 should be greater than 0"),
        ("[accelerator]\nmemory_gib = 0", "accelerator.memory_gib = 0 should be greater than 0"),
        ("[accelerator]\nmemory_gib = nan", "accelerator.memory_gib = nan should be greater than 0"),
        ("[accelerator]\nmemory_gib = inf", "accelerator.memory_bytes = inf: only hardware with a [unit_cost] section"),
        ("[accelerator]\nmemory_gib = true", "accelerator.memory_gib = True should be a number"),
        ("[accelerator]\nmemory_gib = '80'", "accelerator.memory_gib = '80' should be a number"),
        ("[accelerator]\nmemroy_gib = 80", "unknown key 'memroy_gib'; nearest: memory_gib"),
        ("[accelerator]\nmemory = 80", "accelerator.memory: not a unit for this quantity; write 'memory_gib'"),
        ("[accelerator]\nmemory_gib = 8\nmemory_gb = 8", "accelerator.memory_gb: the same quantity is given twice"),
        ("[accelerator]\nlaunch_overhead_us = inf", "accelerator.launch_overhead_us = inf should be a finite number"),
        ("[accelerator]\nusable_fraction = 1.5", "accelerator.usable_fraction = 1.5 should be less than or equal to 1"),
        ("[accelerator.peak_tflops]\nbf16 = -3", "accelerator.peak_tflops.bf16 = -3 should be greater than 0"),
        ("[accelerator.peak_tflops]\nfp8 = 3", "accelerator.peak_tflops.fp8 = 3 should be 'fp32', 'bf16' or 'fp16'"),
        ("[cpu]\nadam_us_per_op = -2", "cpu.adam_us_per_op = -2 should be greater than or equal to 0"),
        ("[cpu]\nusable_memory_gib = 500", "should not exceed memory_gib = 128"),
        ("[cpu]\nmemory_bandwidth_gb_per_s = 1e-300", "memory_bandwidth_gb_per_s = 1e-300 should be 1e-60 to 1e+60"),
        ("peer_to_peer = 'yes'", "peer_to_peer = 'yes' should be true or false"),
        ("gpu_direct_rdma = 1", "gpu_direct_rdma = 1 should be true or false"),
        ("[cpu]\nnum_domains = 17", "num_domains = 17 should not exceed cores = 16"),
        ("device = 'cpu'\n[accelerator]\ncompute_threads = 17", "should not exceed cpu.cores = 16"),
        ("[provenance]\nlinks = 'guess'", "provenance.links = 'guess' should be 'assumed', 'published'"),
        ("[provenance]\n'accelerator.peak' = 'fitted'", "unknown field 'peak'; nearest: peak_flops"),
    ],
)
def test_bad_values_are_named_with_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpipeError) as caught:
        load_text(tmp_path, f'extends = "h200x1"\n{text}')
    assert message in str(caught.value)
    assert str(tmp_path / "mine.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("a='gpu*'\nb='memory'\nbandwidth_gib_per_s=5", "links[0].bandwidth_gib_per_s: not a unit for this quantity; "),
        ("a='gpu*'\nb='memory'\nbandwidth_gib_per_s=5", "write 'bandwidth_gb_per_s' (1e9 bytes per second) or"),
        ("a='gpu*'\nb='memory'\nlatency_us=5", "links[0].bandwidth_bytes_per_s is missing (write"),
        ("a='gpu*'\nb='memori'\nbandwidth_gb_per_s=5", "links[0]: unknown node 'memori'; allowed: gpu, switch,"),
        ("a='nic*'\nb='memory'\nbandwidth_gb_per_s=5", "node 'nic*': only gpu* stands for several nodes"),
        ("a='gpu1'\nb='memory'\nbandwidth_gb_per_s=5", "links: node 'gpu1': a host has 1 ranks (ranks_per_host)"),
        ("a='gpu*'\nb='switch0'\nbandwidth_gb_per_s=5", "links: no way from rank 0 to memory of host 0"),
        ("a='memory'\nb='memory'\nbandwidth_gb_per_s=5", "links: 'memory' is linked to itself"),
        (
            "a='gpu*'\nb='memory'\nbandwidth_gb_per_s=5\n[[links]]\na='memory'\nb='gpu*'\nbandwidth_gb_per_s=9",
            "links has gpu* - memory more than once",
        ),
        (
            "a='gpu*'\nb='memory'\nbandwidth_gb_per_s=5\nboth_directions_gb_per_s=11",
            "both_directions_gb_per_s = 11 should be between one and two times bandwidth_gb_per_s = 5",
        ),
        ("a='gpu*'\nb='memory'\nbandwidth_gb_per_s=inf", "links[0].bandwidth_bytes_per_s = inf: only hardware with"),
    ],
)
def test_bad_links(tmp_path: Path, fields: str, message: str) -> None:
    with pytest.raises(SpipeError) as caught:
        load_text(tmp_path, f'extends = "h200x1"\n[[links]]\n{fields}')
    assert message in str(caught.value)
    assert "is missing" not in str(caught.value) or "latency_us" in fields


def test_syntax_errors_name_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(SpipeError, match=r"mine\.toml: .*line 3"):
        load_text(tmp_path, 'extends = "h200x1"\n[cpu]\ncores = = 3\n')


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100x8", "unknown hardware 'h100x8'; nearest: h200x8, a100x8"),
        ("nowhere/h.toml", "hardware 'nowhere/h.toml': there is no such file"),
    ],
)
def test_unknown_hardware(name: str, message: str) -> None:
    with pytest.raises(SpipeError) as caught:
        load_hardware(name)
    assert message in str(caught.value)


def test_extending_something_unknown(tmp_path: Path) -> None:
    with pytest.raises(SpipeError, match="extends: unknown hardware 'h200'; nearest: h200x8"):
        load_text(tmp_path, 'extends = "h200"')
    with pytest.raises(SpipeError, match="extends = 3 should be the name or path"):
        load_text(tmp_path, "extends = 3")


def test_specs_are_frozen_and_checked_when_built_directly() -> None:
    cpu = load_hardware("laptop").cpu
    with pytest.raises(ValueError, match="frozen"):
        cpu.cores = 8  # type: ignore[misc]
    with pytest.raises(SpipeError, match="Cpu: cores = 0 should be greater than or equal to 1"):
        Cpu(**(dict(cpu) | {"cores": 0}))
    with pytest.raises(SpipeError, match="unit_block_s = inf should be"):
        UnitCost(unit_block_s=math.inf)


def test_staged_data_moves_in_pieces() -> None:
    hardware = load_hardware("rtx3090-cluster")
    fine, coarse, whole = (hardware.replace(staging_piece_bytes=size) for size in (0.0, 1e6, 1e9))
    routes = [spec.route(("gpu", 0), ("gpu", 4)) for spec in (fine, coarse, whole)]
    pcie, network = 8.94e9, 8e9  # accelerator -> memory -> memory -> accelerator
    assert routes[0].hops_bytes_per_s == pytest.approx((pcie, network, pcie))
    assert routes[0].staging_s(1e7) == 0
    assert routes[1].staging_s(1e7) == pytest.approx(2e6 / pcie)  # one piece before and one after the slowest hop
    assert routes[2].seconds(1e7) == pytest.approx(routes[2].latency_s + 1e7 * (2 / pcie + 1 / network))
    assert hardware.route(("memory", 0), ("gpu", 0)).staging_s(1e7) == 0


def test_pageable_memory_needs_its_rate() -> None:
    with pytest.raises(SpipeError, match="page_locked = false needs pageable_bytes_per_s"):
        load_hardware("v100x4").override({"cpu.page_locked": False})


def test_a_spec_forgets_what_it_worked_out_when_it_is_changed_or_sent_away() -> None:
    model = load_model("10b")
    assert (hash(model), model.num_total_layers) == (hash(load_model("10b").replace()), 50)
    shorter = model.model_copy(update={"num_layers": 3})
    assert (shorter.num_total_layers, hash(shorter)) == (5, hash(model.replace(num_layers=3)))
    assert "_hash" not in model.__getstate__()["__dict__"]
    assert pickle.loads(pickle.dumps(model)) == model
    assert dict(model).keys() == ModelSpec.model_fields.keys()
