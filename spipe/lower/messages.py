"""Tokens, activations and gradients: what the compute ops of a step hand to each other, and its buffers."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from spipe.lower.draft import Draft, most_at_a_time
from spipe.ops import Kind

Message = tuple[int, int, int, int]
"""(Op that consumes it, op that produces it, SEND, RECV)."""
Edge = tuple[int, int, int, list[int], list[int], list[int]]
"""(Stage number of the consumer, source rank, target rank; per microbatch: producer, consumer, first op to wait)."""


def add_tokens(draft: Draft) -> list[int]:
    """Token ids for the first forward and the bottom backward stage, labels for the top one; returns LOAD_TOKENS."""
    readers: dict[int, tuple[list[int], list[int]]] = {}  # stage -> first and last ops that read tokens or labels
    if draft.num_forward:
        readers[0] = (draft.forward[0], draft.forward[0])
    for k in {0, draft.num_backward - 1}:
        readers[draft.num_forward + k] = (draft.recompute[k], draft.backward[k])
    all_loads: list[int] = []
    for stage, (first, last) in sorted(readers.items()):
        loads = draft.add_all(Kind.LOAD_TOKENS, stage, draft.stages[stage].rank, "h2d_in", [[] for _ in first])
        draft.wait(zip(first, loads, strict=True))
        releasers, takers = zip(*sorted(zip(last, loads, strict=True)), strict=True)  # in compute order
        draft.wait(draft.ring(takers, releasers, draft.options.token_slots))
        all_loads += loads
    return all_loads


def add_activations(draft: Draft) -> list[list[Message]]:
    """Outputs of forward stages to the stage above; returns the messages of each pair of ranks."""
    stages, ops = draft.layout.forward, draft.forward
    return _add_messages(
        draft,
        Kind.SEND_ACTIVATION,
        ((k, stages[k - 1].rank, stages[k].rank, ops[k - 1], ops[k], ops[k]) for k in range(1, draft.num_forward)),
    )


def add_gradients(draft: Draft) -> list[list[Message]]:
    """Gradients of stage inputs to the stage below; returns the messages of each pair of ranks."""
    ranks = [stage.rank for stage in draft.layout.backward]
    first_reader = draft.recompute if draft.options.recompute == "late" else draft.backward
    return _add_messages(
        draft,
        Kind.SEND_GRADIENT,
        (
            (
                draft.num_forward + k,
                ranks[k + 1],
                ranks[k],
                draft.backward[k + 1],
                draft.last_backward[k],
                first_reader[k],
            )
            for k in reversed(range(draft.num_backward - 1))
        ),
    )


def _add_messages(draft: Draft, kind: Kind, edges: Iterable[Edge]) -> list[list[Message]]:
    messages: dict[tuple[int, int], list[Message]] = {}
    for stage, source, target, produced, consumed, waiting in edges:
        if source == target:
            draft.wait(zip(waiting, produced, strict=True))
            continue
        sends, receives = draft.send_all(kind, stage, source, target, "p2p", produced)
        draft.wait(zip(waiting, receives, strict=True))
        messages.setdefault((source, target), []).extend(zip(consumed, produced, sends, receives, strict=True))
    return list(messages.values())


def message_slots(draft: Draft, messages: Sequence[list[Message]], end: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Receive and send slots of activations and gradients, per pair of ranks: which op waits for which other.

    Where a rank has to take in messages long before it can use them (a breadth-first ring with M > N), fewer slots
    than messages in flight would stall the ring for good. So the receive slots are at least what is in flight when
    every op starts as early as logical time allows (``end``); that schedule is a proof that the slots suffice.
    """
    for of_pair in messages:
        consumed, produced, sends, receives = zip(*sorted(of_pair), strict=True)
        peak = most_at_a_time([end[op] for op in produced], [end[op] for op in consumed])
        received = draft.ring(receives, consumed, max(peak, draft.options.receive_slots))
        producers, sent_in_turn = zip(*sorted(zip(produced, sends, strict=True)), strict=True)
        sent = draft.ring(producers, sent_in_turn, draft.options.send_slots, numbered=False)
        yield from chain(received, sent)
