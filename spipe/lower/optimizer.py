"""Gradients to the host, and the optimizer: speculative or not, on the host or on the accelerator."""

from collections import defaultdict
from collections.abc import Sequence

from spipe.errors import SpipeError
from spipe.lower.draft import Draft
from spipe.ops import Kind

Offloads = dict[tuple[int, int], int]
"""(Backward stage, bucket) -> OFFLOAD_GRAD."""


def add_gradient_offload(draft: Draft) -> Offloads:
    """A stage accumulates into one slab from its first BACKWARD until its gradients are on the host."""
    offloads: Offloads = {}
    for rank in range(draft.layout.num_ranks):
        mine = [k for k, s in enumerate(draft.layout.backward) if s.rank == rank and draft.trains(s.layers)]
        mine.sort(key=lambda k: min(draft.last_backward[k]))
        first, last = [min(draft.last_backward[k]) for k in mine], [max(draft.last_backward[k]) for k in mine]
        alternating = max((sum(e >= f for f in first[j:]) for j, e in enumerate(last)), default=0)
        num_slots = draft.options.gradient_slots or max(2, alternating)
        slabs: list[list[int]] = []
        for j, k in enumerate(mine):
            if j >= num_slots and first[j] < last[j - num_slots]:
                raise SpipeError(
                    f"rank {rank} alternates between {alternating} backward stages but has "
                    f"gradient_slots={num_slots}: set gradient_slots to at least {alternating}"
                )
            stage, lane = draft.num_forward + k, draft.lane_number("d2h", rank)
            slab = []
            for b, layers in reversed(list(enumerate(draft.buckets[stage]))):
                if not draft.trains(layers):
                    continue
                offloads[k, b] = draft.add(Kind.OFFLOAD_GRAD, stage, b, rank, lane, [last[j]])
                slab.append(offloads[k, b])
            slabs.append(slab)
            draft.slot.update(dict.fromkeys((*slab, *draft.last_backward[k]), j % num_slots))
        for j in range(len(mine)):
            if j >= num_slots:
                draft.deps[first[j]] += slabs[j - num_slots]
            else:
                draft.carried[first[j]] += slabs[j + (len(mine) - 1 - j) // num_slots * num_slots]
    return offloads


def add_optimizer(draft: Draft, fetches: Sequence[int], loads: Sequence[int], offloads: Offloads) -> None:
    """STEP speculatively (or after the verdict), VALIDATE over all ranks, COMMIT; then perhaps a barrier."""
    options, num_layers = draft.options, draft.layout.num_layers
    gradients_of_rank: list[list[int]] = [[] for _ in range(draft.layout.num_ranks)]
    for offload in offloads.values():
        gradients_of_rank[draft.rank[offload]].append(offload)
    for k, each in enumerate(draft.layout.backward):
        if not draft.trains(each.layers):  # a step's compute lies between two VALIDATEs, also where nothing is trained
            gradients_of_rank[each.rank].append(max(draft.last_backward[k]))
    verdict = _add_collective(draft, Kind.VALIDATE, gradients_of_rank)
    readers = _fetches_of_held(draft, fetches)
    head = offloads.get((draft.num_backward - 1, len(draft.buckets[-1]) - 1), -1)
    commit_of_layer = [-1] * num_layers
    store_of_layer: dict[int, int] = {}
    commits: list[list[int]] = [[] for _ in range(draft.layout.num_ranks)]
    turn = [0] * draft.layout.num_ranks
    for (k, b), offload in offloads.items():
        stage, rank = draft.num_forward + k, draft.rank[offload]
        layers = draft.buckets[stage][b]
        gradients = [offload]
        if draft.tied and 0 in layers and head != offload:
            gradients.append(head)
        if options.holds(layers.start, num_layers, draft.tied):
            lane = draft.lane_number("device_step", rank)
            needs = [offload, verdict[rank], *readers[rank, layers]]
            step = draft.add(Kind.STEP, stage, b, rank, lane, needs)
            store = draft.add(Kind.STORE_WEIGHTS, stage, b, rank, draft.lane_number("d2h", rank), [step])
            draft.carried[step].append(store)
            store_of_layer[layers.start] = store
        else:
            worker, turn[rank] = turn[rank], (turn[rank] + 1) % options.optimizer_workers
            lane = draft.lane_number(f"cpu{worker or ''}", rank)
            needs = [*gradients, verdict[rank]] if options.optimizer == "sync" else list(gradients)
            step = draft.add(Kind.STEP, stage, b, rank, lane, needs)
        commit = draft.add(Kind.COMMIT, stage, b, rank, draft.lane_number("settle", rank), [step, verdict[rank]])
        for gradient in gradients:
            draft.carried[gradient].append(commit)
        commits[rank].append(commit)
        for layer in layers:
            commit_of_layer[layer] = commit
    barriers = _add_collective(draft, Kind.BARRIER, commits) if options.barrier else range(0)
    if barriers:
        for i in loads:
            draft.carried[i].append(barriers[draft.rank[i]])
    for i in fetches:
        layers = draft.buckets[draft.stage[i]][draft.index[i]]
        needed = {commit_of_layer[layer] for layer in layers if layer not in draft.frozen}
        if not needed:
            needed.add(verdict[draft.rank[i]])
        if draft.tied and num_layers - 1 in layers:
            needed.add(commit_of_layer[0])
        store = store_of_layer.get(layers.start, -1)
        if store >= 0 and draft.rank[store] != draft.rank[i]:  # the host's copy, not the accelerator's own
            needed.add(store)
        draft.carried[i] += sorted(needed)
        if barriers:
            draft.carried[i].append(barriers[draft.rank[i]])


def _add_collective(draft: Draft, kind: Kind, needs: Sequence[list[int]]) -> range:
    """One op a rank, which happen together; ``needs`` is what each rank waits for."""
    first_number = draft.num_forward + draft.num_backward
    ops = [
        draft.add(kind, first_number + rank, 0, rank, draft.lane_number("control", rank), list(mine))
        for rank, mine in enumerate(needs)
    ]
    draft.collectives.append(range(ops[0], ops[-1] + 1))
    return draft.collectives[-1]


def _fetches_of_held(draft: Draft, fetches: Sequence[int]) -> dict[tuple[int, range], list[int]]:
    """FETCHes by rank and layers: what reads the weights that a STEP on the accelerator replaces."""
    readers: defaultdict[tuple[int, range], list[int]] = defaultdict(list)
    if draft.options.device_layers:
        for i in fetches:
            readers[draft.rank[i], draft.buckets[draft.stage[i]][draft.index[i]]].append(i)
    return readers
