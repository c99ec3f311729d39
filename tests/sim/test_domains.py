"""NUMA domains: cores, memory and the interconnect between sockets, where a hardware file describes them."""

import pytest

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, load_hardware
from spipe.model import load_model
from spipe.ops import Kind
from spipe.plan import Plan, make_plan
from spipe.sim import simulate
from spipe.sim.cost import CostModel
from spipe.sim.pricing import Pricing
from spipe.topology import Link


def two_sockets(interconnect_gb_per_s: float) -> HardwareSpec:
    """Four V100 and their memory, half of both on each socket."""
    ends = [("gpu0", "root0", 13), ("gpu1", "root0", 13), ("gpu2", "root1", 13), ("gpu3", "root1", 13)]
    ends += [("root0", "memory0", 40), ("root1", "memory1", 40)]
    links = [Link(a=a, b=b, bandwidth_bytes_per_s=width * 1e9) for a, b, width in ends]
    links.append(Link(a="root0", b="root1", bandwidth_bytes_per_s=interconnect_gb_per_s * 1e9))
    return load_hardware("v100x4").replace(links=tuple(links))


def planned(schedule: str, hardware: HardwareSpec, backward: int = 2, **options: object) -> Plan:
    return make_plan(
        load_model("10b"),
        hardware,
        schedule=schedule,
        forward_stages=2,
        backward_stages=backward,
        global_batch=8,
        microbatch_size=2,
        sequence=1024,
        precision="fp16",
        published=True,
        layer_costs=[0.0, *[1.0] * 48, 0.0],
        options=options,
    )


def fetched_edges(plan: Plan) -> set[str]:
    program, pricing = plan.program(), Pricing(CostModel.of(plan), plan.program())
    fetches = [i for i, kind in enumerate(program.kind) if kind == Kind.FETCH]
    return {pricing.edges[edge].name for i in fetches for route, _ in pricing.parts(i) for edge in route.edges}


def test_domains_are_numbered_host_by_host_and_ranks_have_the_nearest() -> None:
    topology = two_sockets(20).resized(num_hosts=1).topology
    assert topology.num_domains == 2
    assert [topology.domain_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert topology.route(("domain", 0), ("gpu", 3)).memory_accesses == ((0, 1),)
    assert topology.route(("memory", 0), ("gpu", 3)).memory_accesses == ((1, 1),)
    assert topology.route(("memory", 0), ("domain", 1)).edges == ()
    with pytest.raises(SpipeError, match="NUMA domain 2: should be 0 to 1"):
        topology.route(("domain", 2), ("gpu", 0))


def test_decoupled_passes_fetch_over_the_interconnect() -> None:
    """Forward weights lie where their backward runs, on the other socket; Mobius runs both passes on one rank."""
    crossing = {"host0/root0 -> host0/root1", "host0/root1 -> host0/root0"}
    assert crossing <= fetched_edges(planned("spipe", two_sockets(20)))
    assert not crossing & fetched_edges(planned("mobius", two_sockets(20)))

    def slowed(schedule: str) -> float:
        fast, slow = (simulate(planned(schedule, two_sockets(width)), num_steps=1).makespan_s for width in (40, 6))
        return slow / fast

    assert slowed("spipe") > 1.1 > 1.05 > slowed("mobius")


def test_optimizers_use_cores_and_memory_of_their_domain() -> None:
    plan = planned("mobius", two_sockets(20))
    program, pricing = plan.program(), Pricing(CostModel.of(plan), plan.program())
    used: dict[int, set[int]] = {}
    for i, kind in enumerate(program.kind):
        if kind == Kind.STEP:
            flow = pricing.price(i)[1]
            assert flow is not None
            used.setdefault(program.rank[i], set()).update(resource - pricing.num_edges for resource, _ in flow.uses)
    assert used == {0: {0, 2}, 1: {0, 2}, 2: {1, 3}, 3: {1, 3}}  # memories of both domains, then cores
    assert pricing.capacities[pricing.num_edges :] == [45e9, 45e9, 16.0, 16.0]


def test_a_rank_with_the_cores_of_two_domains_takes_both() -> None:
    hardware = two_sockets(20)
    pricing = Pricing(CostModel.of(planned("mobius", hardware)), planned("mobius", hardware).program())
    assert pricing.domains(3, 8) == [(1, 1.0)]
    assert pricing.domains(3, 17) == [(1, 0.5), (0, 0.5)]


def test_evenly_used_domains_are_as_fast_as_one_pool() -> None:
    pool = two_sockets(40).links[:4]
    pool = tuple(link.replace(b="root0") for link in pool)
    pool += (Link(a="root0", b="memory", bandwidth_bytes_per_s=80e9),)
    times = [
        simulate(planned("mobius", two_sockets(40).replace(links=links)), num_steps=1).makespan_s
        for links in (two_sockets(40).links, pool)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.02)


def test_an_accelerator_without_a_link_is_named() -> None:
    hardware = two_sockets(20)
    with pytest.raises(SpipeError, match="no way from rank 2 to memory of host 0"):
        hardware.replace(links=tuple(link for link in hardware.links if link.a != "gpu2"))
