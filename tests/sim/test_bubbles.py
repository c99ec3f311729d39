"""Attributed idleness against counterfactuals: what is made infinitely fast is no longer waited for."""

import pytest

from spipe.hardware import HardwareSpec, load_hardware
from spipe.model import load_model
from spipe.plan import Plan, make_plan
from spipe.sim import simulate

FAST = 1e30


@pytest.fixture(params=["spipe", "mobius", "1f1b"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return make_plan(
        load_model("10b"), load_hardware("h200x4"), schedule=request.param, forward_stages=2,
        backward_stages=6 if request.param == "spipe" else 2, global_batch=8, microbatch_size=1, sequence=1024,
    )  # fmt: skip


def idle(plan: Plan, hardware: HardwareSpec) -> dict[str, float]:
    return simulate(plan, hardware=hardware).bubbles.total()


def with_links(hardware: HardwareSpec, node: str) -> HardwareSpec:
    """Links from accelerators to ``node`` that take no time."""
    free = {"bandwidth_bytes_per_s": FAST, "latency_s": 0.0, "both_directions_bytes_per_s": None}
    return hardware.replace(links=tuple(link.replace(**free) if link.b == node else link for link in hardware.links))


def test_everything_is_waited_for_on_real_hardware(plan: Plan) -> None:
    causes = idle(plan, plan.hardware)
    assert causes["weight fetch"] > 0
    assert causes["transfer"] > 0
    assert causes["optimizer"] > 0


def test_infinitely_fast_copies(plan: Plan) -> None:
    hardware = with_links(plan.hardware, "memory").override({"cpu.memory_bandwidth_bytes_per_s": FAST})
    causes = idle(plan, hardware)
    assert causes["weight fetch"] == pytest.approx(0, abs=1e-9)
    assert causes["gradient push"] == pytest.approx(0, abs=1e-9)


def test_infinitely_fast_messages(plan: Plan) -> None:
    causes = idle(plan, with_links(plan.hardware, "nvswitch0"))
    assert causes["transfer"] == pytest.approx(0, abs=1e-9)
    assert causes["stage input"] == pytest.approx(0, abs=1e-9)


def test_infinitely_fast_optimizer(plan: Plan) -> None:
    hardware = plan.hardware.override(
        {"cpu.adam_parameters_per_s": FAST, "cpu.adam_s_per_op": 0.0, "cpu.memory_bandwidth_bytes_per_s": FAST}
    )
    hardware = with_links(hardware, "nvswitch0")  # the verdict takes two message latencies
    assert idle(plan, hardware)["optimizer"] == pytest.approx(0, abs=1e-9)
