"""Shared resources as fluids: links, memory bandwidth and cores that several ops use at a time.

A flow has an amount of work, a cap on its rate, and what it takes of each resource per unit of rate. Rates are weighted
max-min fair: every flow's rate is raised in proportion to its ``share`` until it reaches its cap or one of its
resources is full. Rates change only when a flow begins or ends, and only for the flows connected to it through
resources that are asked for more than they have. A flow whose resources all have enough for everybody runs at its cap
and costs nothing but a comparison and an addition per resource.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import simpy

_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class FlowSpec:
    """What a kind of op takes of the shared resources.

    Attributes:
        work: amount of work, in any unit; at its cap the flow lasts ``work / cap``.
        cap: highest rate, work per second.
        share: weight of its rate in the fair sharing. Weights equal to the caps slow everybody down by one factor;
            weights of the caps divided by what is taken at them give everybody the same amount.
        uses: (resource, amount of it that one unit of rate takes).
    """

    work: float
    cap: float
    share: float
    uses: tuple[tuple[int, float], ...]


class Completion(simpy.Event):
    """The end of an op, scheduled when the op begins: one event an op, whether its lane had to wait for it or not."""

    _ok = True
    _value = None

    def begin(self, delay: float) -> None:
        """The op begins now and takes ``delay`` seconds."""
        self.env.schedule(self, simpy.events.NORMAL, delay)


class Flow:
    """A running flow; its work is done at ``end_s`` if no rate changes before."""

    __slots__ = ("cap", "completion", "end_s", "rate", "share", "uses", "wake_s")

    def __init__(self, spec: FlowSpec, now: float) -> None:
        self.cap = self.rate = spec.cap
        self.share = spec.share
        self.uses = spec.uses
        self.end_s = now + spec.work / spec.cap
        self.completion: Completion | None = None
        self.wake_s = 0.0


class Fluid:
    """All shared resources of a machine, and the flows that run on them."""

    def __init__(self, env: simpy.Environment, capacities: Sequence[float]) -> None:
        self.env = env
        self.capacity = [capacity * (1 + _TOLERANCE) for capacity in capacities]
        self.demand = [0.0] * len(capacities)
        """What the running flows would take at their caps."""
        self.flows: list[dict[Flow, None]] = [{} for _ in capacities]

    def start(self, spec: FlowSpec, completion: Completion) -> Flow:
        """Begin a flow; ``completion`` happens when it may be done (ask ``resume`` then)."""
        now = self.env.now
        flow = Flow(spec, now)
        crowded = False
        demand, capacity = self.demand, self.capacity
        for resource, amount in flow.uses:
            self.flows[resource][flow] = None
            demand[resource] += amount * flow.cap
            if demand[resource] > capacity[resource]:
                crowded = True
        if crowded:
            self._share(flow, now)
        if flow.rate == flow.cap:
            completion.begin(spec.work / spec.cap)  # it can only become later than this, never earlier
        else:
            self._wait(flow, completion)
        return flow

    def resume(self, flow: Flow) -> Completion | None:
        """None if the flow is done (its resources are released), else what to wait for next."""
        now = self.env.now
        if flow.end_s - now > _TOLERANCE * now:
            completion = Completion(self.env)
            self._wait(flow, completion)
            return completion
        crowded = False
        demand, capacity = self.demand, self.capacity
        for resource, amount in flow.uses:
            crowded = crowded or demand[resource] > capacity[resource]
            flows = self.flows[resource]
            del flows[flow]
            demand[resource] = demand[resource] - amount * flow.cap if flows else 0.0
        if crowded:
            self._share(flow, now)
        return None

    def _wait(self, flow: Flow, completion: Completion) -> None:
        flow.completion = completion
        self._wake_at_end(flow)

    def _wake_at_end(self, flow: Flow) -> None:
        flow.wake_s = flow.end_s
        wake = self.env.timeout(max(flow.end_s - self.env.now, 0.0), value=flow.wake_s)
        wake.callbacks.append(lambda event: self._woken(flow, event.value))

    def _woken(self, flow: Flow, wake_s: float) -> None:
        if flow.completion is None or wake_s != flow.wake_s:
            return  # an earlier wake-up took its place
        if flow.end_s - self.env.now > _TOLERANCE * self.env.now:
            self._wake_at_end(flow)
        else:
            flow.completion.begin(0.0)
            flow.completion = None

    # ------------------------------------------------------------------ rates

    def _share(self, changed: Flow, now: float) -> None:
        """New rates for the flows that share a crowded resource with ``changed``, directly or through others."""
        resources = {resource: None for resource, _ in changed.uses}
        component: dict[Flow, None] = {}
        pending = list(resources)
        while pending:
            for flow in self.flows[pending.pop()]:
                if flow not in component:
                    component[flow] = None
                    for resource, _ in flow.uses:
                        if resource not in resources and self.demand[resource] > self.capacity[resource]:
                            resources[resource] = None
                            pending.append(resource)
        crowded = [resource for resource in resources if self.demand[resource] > self.capacity[resource]]
        for flow, rate in max_min_rates(component, crowded, self.capacity).items():
            if rate != flow.rate:
                flow.end_s = now + (flow.end_s - now) * (flow.rate / rate)
                flow.rate = rate
                if flow.completion is not None and flow.end_s < flow.wake_s:
                    self._wake_at_end(flow)


def max_min_rates(flows: Iterable[Flow], resources: Iterable[int], capacity: Sequence[float]) -> dict[Flow, float]:
    """Weighted max-min fair rates of ``flows`` under their caps and the capacity of ``resources`` (others are ample).

    Progressive filling: raise a common level, at which a flow's rate is level · share, until a flow reaches its cap or
    a resource is full; fix the rates of those flows; go on with the others.
    """
    room = {resource: capacity[resource] for resource in resources}
    weight = dict.fromkeys(room, 0.0)  # what the resource gives per level to the flows that are not fixed yet
    users: dict[int, list[Flow]] = {resource: [] for resource in room}
    for flow in flows:
        for resource, amount in flow.uses:
            if resource in room:
                weight[resource] += amount * flow.share
                users[resource].append(flow)
    by_cap = sorted(flows, key=lambda flow: flow.cap / flow.share, reverse=True)
    rates: dict[Flow, float] = {}
    while by_cap:
        if by_cap[-1] in rates:
            by_cap.pop()
            continue
        level, full = math.inf, -1
        for resource, total in weight.items():
            if total * level > room[resource]:
                level, full = room[resource] / total, resource
        fixed = [by_cap[-1]]
        if fixed[0].cap > level * fixed[0].share:
            fixed = [flow for flow in users[full] if flow not in rates]
            del weight[full]
        for flow in fixed:
            rates[flow] = rate = min(flow.cap, level * flow.share)
            for resource, amount in flow.uses:
                if resource in weight:
                    room[resource] = max(room[resource] - amount * rate, 0.0)
                    weight[resource] -= amount * flow.share
    return rates
