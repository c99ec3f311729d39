"""Bounds: times that no step can beat, of a layout and of everything that could be laid out on the hardware.

Ops never take less than their own seconds, whatever they share, so that contention makes no bound wrong. All bounds are
of steps in steady state: the distance of two VALIDATEs. With stale weights steps get there after a while only, so that
more of them are simulated (``spipe.sim.simulation.SETTLING_STEPS``), and they overlap, so that fill and drain are no
part of these bounds.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from spipe.layout import Layout
from spipe.model import PassName
from spipe.ops import Kind
from spipe.sim.cost import CostModel

_TOGETHER = 1.2
"""Several STEPs at a time are at most so many times faster than one after the other; see ``spipe.sim.pricing``."""


def lower_bound_s(
    costs: CostModel, layout: Layout, num_microbatches: int, options: Mapping[str, Any] = MappingProxyType({})
) -> float:
    """A step of this layout, with ``options`` that differ from the defaults, takes at least this long.

    The compute of two steps never overlaps, but with stale weights, where no more than the compute of one rank is left
    of this bound. So a step lasts as long as a rank computes, and the time the forward stages
    below its first one take to send it the first microbatch, the time the backward stages below its last one take for
    the last, and what the lowest layer needs between two steps (``turn_s``). Gradient copies, the optimizer and, on
    device ``cpu``, the cores of a host are bounds, too.
    """
    hardware = costs.hardware
    held_layers = options.get("device_layers", 0)
    kept = len(layout.forward) if options.get("recompute") == "never" else 0  # stages that recompute nothing
    turns = not held_layers and not kept and options.get("optimizer") != "stale"

    def seconds(layers: range, kind: Kind, name: PassName) -> float:
        return costs.stage_s(layers, name) + costs.overhead_s(kind)

    busy, num_ops, num_backward, offloaded, stepped, lead, tail = ([0.0] * layout.num_ranks for _ in range(7))
    below = 0.0
    for stage in layout.forward:
        if not busy[stage.rank]:
            lead[stage.rank] = below
        forward = seconds(stage.layers, Kind.FORWARD, "forward")
        busy[stage.rank] += num_microbatches * forward
        num_ops[stage.rank] += num_microbatches
        below += forward
    below = 0.0
    for k, stage in enumerate(layout.backward):
        if not num_backward[stage.rank]:
            tail[stage.rank] = below
        backward = seconds(stage.layers, Kind.BACKWARD, "backward")
        recompute = seconds(stage.layers, Kind.RECOMPUTE, "recompute") if k >= kept else 0.0
        busy[stage.rank] += num_microbatches * (recompute + backward)
        num_ops[stage.rank] += (2 if k >= kept else 1) * num_microbatches
        num_backward[stage.rank] += 1
        below += 0.0 if kept else backward  # split in two, only its first half is waited for
        on_host = range(min(max(stage.first, held_layers), stage.stop), stage.stop)
        offloaded[stage.rank] += costs.num_parameters(on_host) * costs.gradient_element_bytes
        stepped[stage.rank] += costs.num_stepped_parameters(on_host) / costs.adam_rate
    if hardware.device != "cpu":
        issue = hardware.accelerator.launch_overhead_s
        busy = [max(total, (count - 1) * issue) for total, count in zip(busy, num_ops, strict=True)]
    lowest = layout.forward[0] if layout.forward else layout.backward[0]
    turn = turn_s(costs, {lowest.rank}) if turns else 0.0
    apart = [turn + sum(parts) for parts in zip(busy, lead, tail, strict=True)]
    bounds = list(busy) if options.get("optimizer") == "stale" else apart
    hosts: dict[int, float] = {}
    for rank in range(layout.num_ranks):
        host = hardware.host_of(rank)
        bounds.append(offloaded[rank] / hardware.route(("gpu", rank), ("memory", host)).bandwidth_bytes_per_s)
        work = busy[rank] * costs.compute_threads + stepped[rank] * costs.adam_threads
        hosts[host] = hosts.get(host, 0.0) + work / hardware.cpu.cores
    return max(bounds + (list(hosts.values()) if hardware.device == "cpu" else []))


def turn_s(costs: CostModel, ranks: Iterable[int]) -> float:
    """Between its last backward in a step and its first forward in the next, the lowest layer's gradient goes to the
    host, is stepped, and its weights come back: to one of ``ranks``, whichever is fastest."""
    hardware, lowest = costs.hardware, range(1)
    weights = costs.num_parameters(lowest) * costs.element_bytes
    gradients = costs.num_parameters(lowest) * costs.gradient_element_bytes
    down = max(_rate(costs, ("gpu", r), ("memory", hardware.host_of(r))) for r in range(hardware.num_ranks))
    up = max(_rate(costs, ("memory", h), ("gpu", r)) for r in ranks for h in range(hardware.num_hosts))
    return gradients / down + costs.num_stepped_parameters(lowest) / costs.adam_rate + weights / up


def _rate(costs: CostModel, source: tuple[str, int], target: tuple[str, int]) -> float:
    return costs.hardware.route(source, target).bandwidth_bytes_per_s  # type: ignore[arg-type]


def least_step_s(
    costs: CostModel,
    num_ranks: int,
    num_microbatches: int,
    *,
    full_forward: bool = False,
    barrier: bool = False,
    held_layers: int = 0,
    steps_together: bool = True,
    recompute: bool = True,
    stale: bool = False,
) -> dict[str, float]:
    """No plan for ``num_ranks`` or fewer ranks has a step that is shorter than any of these times, by what limits it.

    Args:
        costs: of the model on the hardware, for one microbatch size.
        num_ranks, num_microbatches: of the plans that are bounded.
        full_forward: whether the forward pass has to cover what the top backward stage recomputes anyway.
        barrier: whether plans have to end a step with a barrier.
        held_layers: so many of the lowest layers may be held and stepped by accelerators.
        steps_together: whether a rank may run several STEPs at a time.
        recompute: whether all that is needed backward is recomputed.
        stale: whether a step may begin before the weights of the step before are there.

    Compute: if n ranks share all ops evenly, each is busy for 1/n of them. The k-th rank that starts has at least k
    layers below its first one, and waits for them to send it the first microbatch; after the last op of the k-th rank
    from the end, at least k layers are left to go backward. What the top backward stage recomputes needs no forward,
    but then one rank has the whole stage.

    Optimizer: every parameter is stepped once, on all hosts together. A rank steps nothing from the time when its
    layers are read again until the first gradient of a stage is complete. Links: every layer's weights are fetched at
    least once a step, and its gradients offloaded. Memory of a host: what the three move.
    """
    model, hardware = costs.model, costs.hardware
    layers = range(model.num_total_layers)
    forward, again, backward = (
        np.array([costs.device_s(model.layer_kind(i), name) for i in layers])
        for name in ("forward", "recompute", "backward")
    )
    again = again - [costs.unseen_s(range(i, i + 1)) for i in layers]  # in which a stage may end
    full_forward = full_forward and recompute  # without, what a forward covers is not computed again
    again = (again if recompute else np.minimum(again, forward)) + backward  # of the top backward stage
    below = again if recompute else backward  # of what lies below the top backward stage
    turn = 0.0 if held_layers or stale or not recompute else turn_s(costs, range(num_ranks))
    compute = np.inf
    lead, tail = np.cumsum([0.0, *forward]), np.cumsum([0.0, *backward])
    for used in range(1, num_ranks + 1):
        fill = np.mean([tail[min(k, len(layers))] for k in range(used)]) if recompute else 0.0
        for top in layers:  # the first layer of the top backward stage
            reach = len(layers) if full_forward else top
            busy = num_microbatches * (below[:top].sum() + again[top:].sum() + forward[:reach].sum())
            late = np.mean([lead[min(k, reach)] for k in range(used)])
            shared = busy / used + (0.0 if stale else fill + late)
            compute = min(compute, max(shared, num_microbatches * again[top:].sum()))
    together = _TOGETHER if steps_together else 1.0
    hosts = -(-num_ranks // hardware.ranks_per_host)
    on_hosts = layers[min(held_layers, len(layers)) :]
    stepped = costs.num_stepped_parameters(on_hosts)
    one_each = costs.adam_share * costs.ranks_per_host
    # Several STEPs of a rank use cores that its share leaves over.
    on_host = 1.0 if steps_together else min(1.0, one_each)
    optimizer = stepped / (hosts * costs.host_adam_rate * on_host * together)
    if barrier:
        optimizer += forward[:-1].sum() + num_microbatches * again[-1]
    elif not held_layers and not stale and stepped >= num_ranks * costs.num_stepped_parameters(range(1)):
        optimizer += num_microbatches * below[1:].min()
    parameters = costs.num_parameters(on_hosts)
    ranks = range(num_ranks)
    down = sum(_rate(costs, ("gpu", r), ("memory", hardware.host_of(r))) for r in ranks)
    up = sum(_rate(costs, ("memory", hardware.host_of(r)), ("gpu", r)) for r in ranks)
    moved = parameters * (costs.element_bytes + costs.gradient_element_bytes) + stepped * costs.adam_bytes
    result = {
        "compute": float(turn + compute),
        "optimizer": float(optimizer),
        "gradients to the host": parameters * costs.gradient_element_bytes / down,
        "weights to the accelerators": parameters * costs.element_bytes / up,
        "host memory": moved / (hosts * hardware.cpu.memory_bandwidth_bytes_per_s),
    }
    if hardware.device == "cpu":
        busy = num_microbatches * below.sum() * costs.compute_threads
        result["cores"] = float(busy + stepped / costs.adam_rate * costs.adam_threads) / (hosts * hardware.cpu.cores)
        result["optimizer"] = float(stepped / (hosts * costs.host_adam_rate * together))
    return result
