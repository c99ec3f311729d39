"""Shared resources: max-min fair rates against hand-computed cases, and times of flows that come and go."""

import math
from collections.abc import Generator

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from spipe.sim.resources import Completion, Flow, FlowSpec, Fluid, max_min_rates


def rates(specs: list[FlowSpec], capacity: list[float]) -> list[float]:
    flows = [Flow(spec, 0.0) for spec in specs]
    found = max_min_rates(flows, range(len(capacity)), capacity)
    return [found[flow] for flow in flows]


def spec(cap: float, *uses: tuple[int, float], share: float = 1.0, work: float = 1.0) -> FlowSpec:
    return FlowSpec(work, cap, share, uses)


def test_equal_flows_share_equally() -> None:
    assert rates([spec(10, (0, 1)), spec(10, (0, 1))], [12]) == pytest.approx([6, 6])


def test_what_a_slow_flow_leaves_goes_to_the_others() -> None:
    assert rates([spec(2, (0, 1)), spec(10, (0, 1)), spec(10, (0, 1))], [12]) == pytest.approx([2, 5, 5])


def test_classic_two_links() -> None:
    # A over both links, B on the first (capacity 10), C on the second (capacity 4): A and C get 2, B the rest.
    flows = [spec(100, (0, 1), (1, 1)), spec(100, (0, 1)), spec(100, (1, 1))]
    assert rates(flows, [10, 4]) == pytest.approx([2, 8, 2])


def test_shares_weigh() -> None:
    assert rates([spec(9, (0, 1), share=1), spec(9, (0, 1), share=2)], [9]) == pytest.approx([3, 6])


def test_shares_equal_to_caps_slow_everybody_down_by_the_same_factor() -> None:
    flows = [spec(1, (0, 2)), spec(1, (0, 1)), spec(1, (0, 1))]  # four threads
    assert rates(flows, [2]) == pytest.approx([0.5, 0.5, 0.5])


def test_weight_per_unit_of_rate() -> None:
    assert rates([spec(10, (0, 2)), spec(10, (0, 1))], [9]) == pytest.approx([3, 3])


@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 10),
            st.floats(0.1, 10),
            st.dictionaries(st.integers(0, 3), st.floats(0.1, 5), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.floats(0.5, 20), min_size=4, max_size=4),
)
def test_no_resource_is_overdrawn_and_every_flow_is_held_by_something(
    drawn: list[tuple[float, float, dict[int, float]]], capacity: list[float]
) -> None:
    specs = [FlowSpec(1.0, cap, share, tuple(uses.items())) for cap, share, uses in drawn]
    found = rates(specs, capacity)
    used = [0.0] * 4
    for flow, rate in zip(specs, found, strict=True):
        assert 0 < rate <= flow.cap * (1 + 1e-9)
        for resource, amount in flow.uses:
            used[resource] += amount * rate
    assert all(total <= limit * (1 + 1e-9) for total, limit in zip(used, capacity, strict=True))
    for flow, rate in zip(specs, found, strict=True):
        full = [r for r, _ in flow.uses if used[r] >= capacity[r] * (1 - 1e-9)]
        # Max-min: either at its cap, or some full resource on which no other flow has a higher level.
        assert rate >= flow.cap * (1 - 1e-9) or any(
            all(
                rate / flow.share >= other_rate / other.share * (1 - 1e-6)
                for other, other_rate in zip(specs, found, strict=True)
                if any(resource == r for resource, _ in other.uses)
            )
            for r in full
        )


def play(arrivals: list[tuple[float, FlowSpec]], capacity: list[float]) -> tuple[list[float], int]:
    """End of each flow that starts at the given time, and the number of SimPy events it took."""
    env = simpy.Environment()
    fluid = Fluid(env, capacity)
    ends = [math.nan] * len(arrivals)

    def run(i: int, at: float, spec: FlowSpec) -> Generator[simpy.Event, None, None]:
        yield env.timeout(at)
        completion: Completion | None = Completion(env)
        assert completion is not None
        flow = fluid.start(spec, completion)
        while completion is not None:
            yield completion
            completion = fluid.resume(flow)
        ends[i] = env.now

    for i, (at, flow_spec) in enumerate(arrivals):
        env.process(run(i, at, flow_spec))
    events = 0
    while env.peek() < math.inf:
        env.step()
        events += 1
    assert all(demand == 0 for demand in fluid.demand)
    return ends, events


def test_a_flow_is_slowed_while_another_one_runs() -> None:
    # Both could use the whole link: the first runs alone for 1 s, shares for 2 s, then the other finishes alone.
    ends, _ = play([(0.0, spec(1, (0, 1), work=2)), (1.0, spec(1, (0, 1), work=2))], [1])
    assert ends == pytest.approx([3.0, 4.0])


def test_a_flow_that_is_slowed_twice_and_freed_again() -> None:
    arrivals = [(0.0, spec(1, (0, 1), work=3)), (1.0, spec(1, (0, 1), work=0.5)), (1.0, spec(1, (0, 1), work=0.5))]
    ends, _ = play(arrivals, [1])
    assert ends == pytest.approx([4.0, 2.5, 2.5])


def test_flows_on_other_resources_are_not_touched() -> None:
    ends, _ = play([(0.0, spec(1, (0, 1), work=2)), (0.5, spec(1, (1, 1), work=1))], [1, 1])
    assert ends == pytest.approx([2.0, 1.5])


def test_an_uncontended_flow_takes_one_event() -> None:
    _, alone = play([(0.0, spec(1, (0, 1), work=2))], [1])
    _, without = play([], [1])
    assert alone - without == 4  # start of the process, arrival, completion, end of the process


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 3), st.floats(0.2, 2)), min_size=1, max_size=6))
def test_work_is_conserved_on_one_resource(drawn: list[tuple[float, float, float]]) -> None:
    arrivals = [(at, spec(cap, (0, 1), work=work)) for at, work, cap in drawn]
    ends, _ = play(arrivals, [1.0])
    for (at, flow), end in zip(arrivals, ends, strict=True):
        assert end >= at + flow.work / min(flow.cap, 1.0) * (1 - 1e-9)
    assert max(ends) - min(at for at, _ in arrivals) >= sum(flow.work for _, flow in arrivals) * (1 - 1e-9)
