"""The activations kept for recompute: kept where they are, sent when produced, or through host memory."""

from itertools import pairwise

from spipe.lower.draft import Draft, most_at_a_time
from spipe.ops import Kind


def add_stage_inputs(draft: Draft) -> None:
    """Messages, or STOREs and LOADs, of what backward stages start from."""
    options = draft.options
    never, on_host = options.recompute == "never", options.stage_input_route == "host"
    loads: dict[int, list[tuple[int, int, int]]] = {}  # rank -> (reader, load, last reader)
    stores: dict[int, list[tuple[int, int]]] = {}  # rank -> (producer, store) of what a forward saved
    staying = _staying(draft) if never and on_host else set()
    following = _following(draft) if options.stage_inputs == "sync" else {}
    for k, stage in enumerate(draft.layout.backward):
        source, keeps = draft.layout.stage_input(k), draft.keeps(k)
        if source.origin == "tokens" and not (keeps and on_host):
            continue
        number = draft.num_forward + k
        produced = draft.forward[k if keeps else source.forward]
        readers, last_readers = draft.recompute[k], draft.last_backward[k]
        if on_host and keeps == never:
            for m, (producer, reader, last) in enumerate(zip(produced, readers, last_readers, strict=True)):
                if (k, m) in staying:
                    draft.deps[reader].append(producer)
                    continue
                lane = draft.lane_number("d2h_in", source.rank)
                store = draft.add(Kind.STORE_STAGE_INPUT, number, m, source.rank, lane, [producer])
                lane = draft.lane_number("h2d_in", stage.rank)
                load = draft.add(Kind.LOAD_STAGE_INPUT, number, m, stage.rank, lane, [store])
                draft.carried[store].append(load)
                draft.deps[reader].append(load)
                loads.setdefault(stage.rank, []).append((reader, load, last))
                if keeps:
                    stores.setdefault(stage.rank, []).append((producer, store))
        elif source.rank == stage.rank:
            draft.wait(zip(readers, produced, strict=True))
        else:
            sends, receives = draft.send_all(Kind.SEND_STAGE_INPUT, number, source.rank, stage.rank, "p2p_in", produced)
            draft.wait(zip(readers, receives, strict=True))
            for received, last in zip(receives, last_readers, strict=True):
                draft.carried[received].append(last)
            draft.wait((following[op], send) for op, send in zip(produced, sends, strict=True) if op in following)
    for uses in loads.values():
        first, loaded, final = zip(*sorted(uses), strict=True)
        num_slots = max(most_at_a_time(first, final), options.stage_input_slots)
        draft.wait(draft.ring(loaded, final, num_slots))
    for pairs in stores.values():
        producers, stored = zip(*sorted(pairs), strict=True)
        draft.wait(draft.ring(producers, stored, options.send_slots, numbered=False))


def _staying(draft: Draft) -> set[tuple[int, int]]:
    """(stage, microbatch) that do not go to the host: their backward is among the next few of their rank."""
    staying: set[tuple[int, int]] = set()
    for mine in draft.compute:
        behind: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> backwards before its forward
        done = 0
        for i in mine:
            if draft.kind[i] == Kind.FORWARD:
                behind[draft.stage[i], draft.index[i]] = done
            elif draft.kind[i] == Kind.BACKWARD:
                what = (draft.stage[i] - draft.num_forward, draft.index[i])
                if done - behind.get(what, done) < draft.options.stage_input_slots:
                    staying.add(what)
                done += 1
    return staying


def _following(draft: Draft) -> dict[int, int]:
    """The compute op of the same rank after each op, FREE left out."""
    return dict(pair for mine in draft.compute for pair in pairwise(i for i in mine if draft.kind[i] != Kind.FREE))
