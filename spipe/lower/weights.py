"""Weights: which slot serves which visit, and the FETCH and FREE of every residency."""

from collections.abc import Sequence
from itertools import groupby

from spipe.lower.draft import Draft
from spipe.ops import Kind

Range = tuple[int, int]
Visit = tuple[int, list[int]]
"""(Stage number, compute ops in order): consecutive ops that read the same layers."""
Residency = tuple[int, list[int], int]
"""(Stage number, compute ops that read the weights, slot): one visit, or several that reuse what is still there."""


def add_weights(draft: Draft) -> list[int]:
    """FETCH and FREE of all ranks; returns the FETCHes."""
    ranges = [(stage.first, stage.stop) for stage in draft.stages]
    fetches: list[int] = []
    for rank, mine in enumerate(draft.compute):
        groups = (list(ops) for _, ops in groupby(mine, key=lambda i: ranges[draft.stage[i]]))
        visits = [(draft.stage[ops[0]], ops) for ops in groups]
        fetches += _add_fetches(draft, rank, _residencies(draft, visits, ranges))
    return fetches


def _residencies(draft: Draft, visits: list[Visit], ranges: list[Range]) -> list[Residency]:
    """A visit is served by the slot that still holds its layers, or by a fetch into another one."""
    reuse, num_slots = draft.options.reuse_weights, draft.options.weight_slots
    layers = [ranges[stage] for stage, _ in visits]
    next_use = _next_uses(layers)
    holder = [-1] * (len(set(layers)) if num_slots is None else num_slots)  # slot -> visit last served from it
    resident = [-1] * len(holder)  # slot -> residency
    residencies: list[Residency] = []
    for v, (stage, readers) in enumerate(visits):
        held = [s for s, u in enumerate(holder) if reuse and u >= 0 and layers[u] == layers[v]]
        slot = held[0] if held else _victim(holder, next_use, v, reuse)
        if not held:
            resident[slot] = len(residencies)
            residencies.append((stage, [], slot))
        holder[slot] = v
        residencies[resident[slot]][1].extend(readers)
    return residencies


def _victim(holder: list[int], next_use: list[int], visit: int, reuse: bool) -> int:
    """The slot to fetch into: an empty one, else the farthest next use (if possible not the visit just before)."""
    if -1 in holder:
        return holder.index(-1)
    candidates = [s for s, u in enumerate(holder) if u != visit - 1] or list(range(len(holder)))
    if not reuse:
        return min(candidates, key=lambda s: holder[s])
    return max(candidates, key=lambda s: (next_use[holder[s]], -holder[s]))


def _next_uses(layers: Sequence[Range]) -> list[int]:
    """For each visit, the number of the next visit to the same layers (a large number if there is none)."""
    following: dict[Range, int] = {}
    result = [0] * len(layers)
    for v in reversed(range(len(layers))):
        result[v] = following.get(layers[v], len(layers) + 1)
        following[layers[v]] = v
    return result


def _add_fetches(draft: Draft, rank: int, residencies: list[Residency]) -> list[int]:
    """FETCH by bucket when the slot is free, FREE in the compute lane after the last reader; returns the FETCHes."""
    free_of_slot: dict[int, int] = {}
    first_of_slot: dict[int, range] = {}
    free_after: dict[int, int] = {}  # last reader -> FREE
    all_fetches: list[int] = []
    for number, (stage, readers, slot) in enumerate(residencies):
        before = [free_of_slot[slot]] if slot in free_of_slot else []
        fetches = draft.add_all(Kind.FETCH, stage, rank, "h2d", [before.copy() for _ in draft.buckets[stage]])
        for reader in readers:
            draft.deps[reader] += fetches
            draft.weights[reader] = number
        (free,) = draft.add_all(Kind.FREE, stage, rank, "compute", [[readers[-1]]])
        for i in (*fetches, free):
            draft.visit[i], draft.slot[i] = number, slot
        first_of_slot.setdefault(slot, fetches)
        free_of_slot[slot] = free_after[readers[-1]] = free
        all_fetches += fetches
    for slot, fetches in first_of_slot.items():
        for i in fetches:
            draft.carried[i].append(free_of_slot[slot])
    lane: list[int] = []
    for i in draft.compute[rank]:
        lane.append(i)
        if i in free_after:
            lane.append(free_after[i])
    draft.compute[rank] = lane
    return all_fetches
