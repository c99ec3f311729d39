"""Lower a compute order to a program: add weights, messages, stage inputs, gradients, the optimizer, and one order.

Works on integers; op objects exist only at the edges. Each section below adds the ops of one concern and the
dependencies that make it correct. Slot reuse is a dependency like any other; what a slot's first user of a step waits
for is the last user of that slot in the previous step (``carried``).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from spipe.draft import Draft
from spipe.errors import SpipeError
from spipe.layout import Layout
from spipe.ops import Kind
from spipe.options import Options
from spipe.pause import collector_paused
from spipe.program import Program
from spipe.schedules import ComputeOrder

MAX_COMPUTE_OPS = 1_000_000
"""A program with more would take minutes to lower and gigabytes to hold."""


def require_size(layout: Layout, num_microbatches: int) -> None:
    """Raises SpipeError if the program would have more than MAX_COMPUTE_OPS compute ops."""
    num_forward, num_backward = len(layout.forward), len(layout.backward)
    count = num_microbatches * (num_forward + 2 * num_backward)
    if count > MAX_COMPUTE_OPS:
        raise SpipeError(
            f"{num_microbatches} microbatches through {num_forward} forward and {num_backward} backward stages are "
            f"{count} compute ops a step; the limit is {MAX_COMPUTE_OPS}: use larger microbatches or fewer stages"
        )


def lower(
    layout: Layout, order: ComputeOrder, num_microbatches: int, options: Options | None = None, *, tied: bool = False,
    frozen: frozenset[int] = frozenset(),
) -> Program:  # fmt: skip
    """The program of one training step.

    Args:
        layout: stages and ranks.
        order: each rank's compute order, from a generator in ``spipe.schedules``.
        num_microbatches: microbatches per step.
        options: slots, routes and optimizer order.
        tied: the embedding's weight is also the head's: one parameter, stepped once with both gradients.
        frozen: layers with nothing to train: no OFFLOAD_GRAD, STEP or COMMIT for buckets that hold no other.

    Raises:
        SpipeError: if the dependencies are cyclic (too few slots for this order), naming the ops and numbers.
    """
    if num_microbatches < 1:
        raise SpipeError(f"a step needs at least one microbatch, got {num_microbatches}")
    require_size(layout, num_microbatches)
    with collector_paused():
        return _Lowering(layout, order, num_microbatches, options or Options(), tied, frozen).program()


class _Lowering(Draft):
    def __init__(
        self, layout: Layout, order: ComputeOrder, num_microbatches: int, options: Options, tied: bool,
        frozen: frozenset[int],
    ) -> None:  # fmt: skip
        super().__init__(layout, num_microbatches, options, tied, frozen)
        self.order = order
        self.messages: list[list[tuple[int, int, int, int]]] = []

    def program(self) -> Program:
        self.add_compute()
        self.add_weights()
        self.add_tokens()
        self.add_activations()
        self.add_stage_inputs()
        self.add_gradient_messages()
        self.add_gradient_offload()
        self.add_optimizer()
        self.add_message_slots()
        return self.sorted_program()

    # ------------------------------------------------------------------ compute

    def add_compute(self) -> None:
        self.forward = [[-1] * self.microbatches for _ in range(self.num_forward)]
        self.recompute = [[-1] * self.microbatches for _ in range(self.num_backward)]
        self.backward = [[-1] * self.microbatches for _ in range(self.num_backward)]
        self.last_backward = [[-1] * self.microbatches for _ in range(self.num_backward)]  # makes weight gradients
        if self.options.recompute == "never":
            require_passes_together(self.layout)
        for rank, steps in enumerate(self.order):
            mine = self.compute[rank]
            for pass_, k, m in steps:
                if pass_ == "F":
                    self.forward[k][m] = self.add(Kind.FORWARD, k, m, rank, "compute", [])
                    mine.append(self.forward[k][m])
                elif pass_ == "W":
                    stage, after = self.num_forward + k, self.backward[k][m]
                    self.last_backward[k][m] = self.add(Kind.WEIGHT_GRADIENT, stage, m, rank, "compute", [after])
                    mine.append(self.last_backward[k][m])
                else:
                    stage = self.num_forward + k
                    self.recompute[k][m] = self.add(Kind.RECOMPUTE, stage, m, rank, "compute", [])
                    self.backward[k][m] = self.add(Kind.BACKWARD, stage, m, rank, "compute", [self.recompute[k][m]])
                    mine += (self.recompute[k][m], self.backward[k][m])
                    self.last_backward[k][m] = self.backward[k][m]
        missing = [f"F{k} m{row.index(-1)}" for k, row in enumerate(self.forward) if -1 in row]
        missing += [f"B{k} m{row.index(-1)}" for k, row in enumerate(self.backward) if -1 in row]
        if missing:
            raise SpipeError(f"the compute order has no entry for {', '.join(missing[:5])}")

    # ------------------------------------------------------------------ weights

    def add_weights(self) -> None:
        """FETCH and FREE: one residency per visit, or per run of visits that reuse what is still there."""
        self.fetches: list[int] = []
        for rank in range(self.layout.num_ranks):
            visits = self._visits(rank)
            next_use = _next_uses([(self.stages[s].first, self.stages[s].stop) for s, _ in visits])
            num_slots = len({self._range(s) for s, _ in visits})
            if self.options.weight_slots is not None:
                num_slots = self.options.weight_slots
            holder: list[int] = [-1] * num_slots  # slot -> number of the visit last served from it
            residency: list[tuple[int, list[int], int]] = []  # (stage, readers, slot)
            resident: list[int] = [-1] * num_slots  # slot -> residency
            for v, (stage, readers) in enumerate(visits):
                layers = (self.stages[stage].first, self.stages[stage].stop)
                slot = next(
                    (
                        s
                        for s, u in enumerate(holder)
                        if self.options.reuse_weights and u >= 0 and self._range(visits[u][0]) == layers
                    ),
                    -1,
                )
                if slot < 0:
                    slot = self._victim(holder, next_use, v)
                    residency.append((stage, [], slot))
                    resident[slot] = len(residency) - 1
                holder[slot] = v
                number = resident[slot]
                residency[number][1].extend(readers)
                for reader in readers:
                    self.weights[reader] = number
            self._add_fetches(rank, residency)

    def _range(self, stage: int) -> tuple[int, int]:
        return self.stages[stage].first, self.stages[stage].stop

    def _visits(self, rank: int) -> list[tuple[int, list[int]]]:
        """Runs of consecutive compute ops that read the same layers: (stage number, ops)."""
        visits: list[tuple[int, list[int]]] = []
        for i in self.compute[rank]:
            if not visits or self._range(visits[-1][0]) != self._range(self.stage[i]):
                visits.append((self.stage[i], []))
            visits[-1][1].append(i)
        return visits

    def _victim(self, holder: list[int], next_use: list[int], visit: int) -> int:
        """The slot to fetch into: an empty one, else the farthest next use (if possible not the visit just before)."""
        candidates = [s for s, u in enumerate(holder) if u < 0]
        if candidates:
            return candidates[0]
        candidates = [s for s, u in enumerate(holder) if u != visit - 1] or list(range(len(holder)))
        if not self.options.reuse_weights:
            return min(candidates, key=lambda s: holder[s])
        return max(candidates, key=lambda s: (next_use[holder[s]], -holder[s]))

    def _add_fetches(self, rank: int, residency: list[tuple[int, list[int], int]]) -> None:
        free_of_slot: dict[int, int] = {}
        first_of_slot: dict[int, list[int]] = {}
        for number, (stage, readers, slot) in enumerate(residency):
            after = [free_of_slot[slot]] if slot in free_of_slot else []
            fetch = [
                self.add(Kind.FETCH, stage, b, rank, "h2d", list(after), visit=number, slot=slot)
                for b in range(len(self.buckets[stage]))
            ]
            first_of_slot.setdefault(slot, fetch)
            self.fetches += fetch
            for reader in readers:
                self.deps[reader] += fetch
            free_of_slot[slot] = self.add(Kind.FREE, stage, 0, rank, "compute", [max(readers)], visit=number, slot=slot)
            self.compute[rank].insert(self.compute[rank].index(max(readers)) + 1, free_of_slot[slot])
        for slot, fetch in first_of_slot.items():
            for i in fetch:
                self.carried[i].append(free_of_slot[slot])

    # ------------------------------------------------------------------ tokens, activations, stage inputs, gradients

    def add_tokens(self) -> None:
        """Token ids for the first forward and the bottom backward stage, labels for the top backward stage."""
        readers: dict[int, list[list[int]]] = {}  # stage -> per microbatch, the compute ops that read tokens or labels
        if self.num_forward:
            readers[0] = [[op] for op in self.forward[0]]
        for k in {0, self.num_backward - 1}:
            readers[self.num_forward + k] = [list(ops) for ops in zip(self.recompute[k], self.backward[k], strict=True)]
        self.loads: list[int] = []
        for stage, rows in sorted(readers.items()):
            rank = self.stages[stage].rank
            loads = [self.add(Kind.LOAD_TOKENS, stage, m, rank, "h2d_in", []) for m in range(self.microbatches)]
            self.loads += loads
            for load, row in zip(loads, rows, strict=True):
                self.deps[row[0]].append(load)
            uses = sorted(zip([row[-1] for row in rows], loads, strict=True))  # in compute order
            self._ring([load for _, load in uses], [last for last, _ in uses], self.options.token_slots)

    def add_activations(self) -> None:
        self._messages(
            Kind.SEND_ACTIVATION,
            "p2p",
            [(k, k, self.layout.forward[k - 1].rank, self.layout.forward[k].rank) for k in range(1, self.num_forward)],
            producer=lambda k, m: self.forward[k - 1][m],
            consumer=lambda k, m: self.forward[k][m],
            waiting=lambda k, m: self.forward[k][m],
        )

    def add_gradient_messages(self) -> None:
        ranks = [stage.rank for stage in self.layout.backward]
        first_reader = self.recompute if self.options.recompute == "late" else self.backward
        self._messages(
            Kind.SEND_GRADIENT,
            "p2p",
            [(k, self.num_forward + k, ranks[k + 1], ranks[k]) for k in reversed(range(self.num_backward - 1))],
            producer=lambda k, m: self.backward[k + 1][m],
            consumer=lambda k, m: self.last_backward[k][m],
            waiting=lambda k, m: first_reader[k][m],
        )

    def _messages(
        self, send: Kind, lane: str, edges: Iterable[tuple[int, int, int, int]],
        producer: Callable[[int, int], int], consumer: Callable[[int, int], int], waiting: Callable[[int, int], int],
    ) -> None:  # fmt: skip
        """Messages of one class; edges are (k, stage number of the consumer, source rank, destination rank)."""
        pairs: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}  # (consumer, producer, send, recv)
        recv = Kind(send + 1)
        for k, stage, source, target in edges:
            for m in range(self.microbatches):
                produced, consumed = producer(k, m), consumer(k, m)
                if source == target:
                    self.deps[waiting(k, m)].append(produced)
                    continue
                sent = self.add(send, stage, m, source, lane, [produced], peer=target)
                received = self.add(recv, stage, m, target, lane, [], peer=source)
                self.partner[sent], self.partner[received] = received, sent
                self.deps[waiting(k, m)].append(received)
                pairs.setdefault((source, target), []).append((consumed, produced, sent, received))
        self.messages += pairs.values()

    def add_message_slots(self) -> None:
        """Receive and send slots of activations and gradients, per pair of ranks.

        Where a rank has to take in messages long before it can use them (a breadth-first ring with M > N), fewer slots
        than messages in flight would stall the ring for good. So the receive slots are at least what is in flight when
        every op starts as early as logical time allows; that schedule is a proof that the slots suffice.
        """
        end = self.earliest_ends()
        for messages in self.messages:
            by_consumer = sorted(messages)
            arrivals = [(end[produced], 0, +1) for _, produced, _, _ in messages]
            releases = [(end[consumed], 1, -1) for consumed, _, _, _ in messages]  # at equal times after arrivals
            peak = max(accumulate(change for _, _, change in sorted(arrivals + releases)))
            slots = max(peak, self.options.receive_slots)
            self._ring([x[3] for x in by_consumer], [x[0] for x in by_consumer], slots)
            by_producer = sorted(messages, key=lambda x: x[1])
            self._ring([x[1] for x in by_producer], [x[2] for x in by_producer], self.options.send_slots, number=False)

    def _ring(self, takers: Sequence[int], releasers: Sequence[int], num_slots: int, number: bool = True) -> None:
        """The j-th taker uses slot j mod num_slots: it waits for the releaser of the slot's previous user."""
        for j, taker in enumerate(takers):
            if number:
                self.slot[taker] = j % num_slots
            if j >= num_slots:
                self.deps[taker].append(releasers[j - num_slots])
            else:
                self.carried[taker].append(releasers[j + (len(takers) - 1 - j) // num_slots * num_slots])

    def add_stage_inputs(self) -> None:
        """The activations kept for recompute: kept where they are, sent when produced, or through host memory."""
        never, on_host = self.options.recompute == "never", self.options.stage_input_route == "host"
        loads: dict[int, list[tuple[int, int, int]]] = {}  # rank -> (reader, load, last reader)
        stores: dict[int, list[tuple[int, int]]] = {}  # rank -> (producer, store) of what a forward saved
        staying = self._staying() if never and on_host else set()
        for k, stage in enumerate(self.layout.backward):
            source, keeps = self.layout.stage_input(k), self.keeps(k)
            if source.origin == "tokens" and not (keeps and on_host):
                continue
            number = self.num_forward + k
            for m in range(self.microbatches):
                produced = self.forward[k if keeps else source.forward][m]
                reader, last_reader = self.recompute[k][m], self.last_backward[k][m]
                if on_host and keeps == never and (k, m) not in staying:
                    store = self.add(Kind.STORE_STAGE_INPUT, number, m, source.rank, "d2h_in", [produced])
                    load = self.add(Kind.LOAD_STAGE_INPUT, number, m, stage.rank, "h2d_in", [store])
                    self.carried[store].append(load)
                    self.deps[reader].append(load)
                    loads.setdefault(stage.rank, []).append((reader, load, last_reader))
                    if keeps:
                        stores.setdefault(stage.rank, []).append((produced, store))
                elif source.rank == stage.rank:
                    self.deps[reader].append(produced)
                else:
                    sent = self.add(
                        Kind.SEND_STAGE_INPUT, number, m, source.rank, "p2p_in", [produced], peer=stage.rank
                    )
                    got = self.add(Kind.RECV_STAGE_INPUT, number, m, stage.rank, "p2p_in", [], peer=source.rank)
                    self.partner[sent], self.partner[got] = got, sent
                    self.carried[got].append(last_reader)
                    self.deps[reader].append(got)
                    if self.options.stage_inputs == "sync":
                        following = self._following(produced)
                        self.deps[following] += [sent] if following >= 0 else []
        for uses in loads.values():
            uses.sort()
            readers, loaded, last = zip(*uses, strict=True)
            at_a_time = max(j + 1 - bisect_left(last, reader) for j, reader in enumerate(readers))
            self._ring(loaded, last, max(at_a_time, self.options.stage_input_slots))
        for pairs in stores.values():
            pairs.sort()
            self._ring([f for f, _ in pairs], [store for _, store in pairs], self.options.send_slots, number=False)

    def _staying(self) -> set[tuple[int, int]]:
        """(stage, microbatch) that do not go to the host: their backward is among the next few of their rank."""
        staying: set[tuple[int, int]] = set()
        for mine in self.compute:
            behind: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> backwards before its forward
            done = 0
            for i in mine:
                if self.kind[i] == Kind.FORWARD:
                    behind[self.stage[i], self.index[i]] = done
                elif self.kind[i] == Kind.BACKWARD:
                    what = (self.stage[i] - self.num_forward, self.index[i])
                    if done - behind.get(what, done) < self.options.stage_input_slots:
                        staying.add(what)
                    done += 1
        return staying

    def _following(self, i: int) -> int:
        """The compute op of the same rank after ``i``, FREE left out; -1 if there is none."""
        mine = self.compute[self.rank[i]]
        return next((j for j in mine[mine.index(i) + 1 :] if self.kind[j] != Kind.FREE), -1)

    # ------------------------------------------------------------------ gradients to the host, optimizer

    def add_gradient_offload(self) -> None:
        """A stage accumulates into one slab from its first BACKWARD until its gradients are on the host."""
        self.offloads: dict[tuple[int, int], int] = {}
        for rank in range(self.layout.num_ranks):
            mine = [
                k for k, s in enumerate(self.layout.backward) if s.rank == rank and not self.frozen.issuperset(s.layers)
            ]
            mine.sort(key=lambda k: min(self.last_backward[k]))
            first, last = [min(self.last_backward[k]) for k in mine], [max(self.last_backward[k]) for k in mine]
            alternating = max((sum(e >= f for f in first[j:]) for j, e in enumerate(last)), default=0)
            num_slots = self.options.gradient_slots or max(2, alternating)
            for j, k in enumerate(mine):
                slot = j % num_slots
                if j >= num_slots and first[j] < last[j - num_slots]:
                    raise SpipeError(
                        f"rank {rank} alternates between {alternating} backward stages but has "
                        f"gradient_slots={num_slots}: set gradient_slots to at least {alternating}"
                    )
                stage = self.num_forward + k
                trained = [b for b, bucket in enumerate(self.buckets[stage]) if not self.frozen.issuperset(bucket)]
                offloads = [
                    self.add(Kind.OFFLOAD_GRAD, stage, b, rank, "d2h", [last[j]], slot=slot) for b in reversed(trained)
                ]
                self.offloads.update({(k, self.index[i]): i for i in offloads})
                for i in self.last_backward[k]:
                    self.slot[i] = slot
            slabs = [
                [i for b in range(len(self.buckets[self.num_forward + k])) if (i := self.offloads.get((k, b), -1)) >= 0]
                for k in mine
            ]
            for j in range(len(mine)):
                if j >= num_slots:
                    self.deps[first[j]] += slabs[j - num_slots]
                else:
                    self.carried[first[j]] += slabs[j + (len(mine) - 1 - j) // num_slots * num_slots]

    def add_optimizer(self) -> None:
        """STEP speculatively (or after the verdict), VALIDATE over all ranks, COMMIT; then perhaps a barrier."""
        validate = []
        for rank in range(self.layout.num_ranks):
            gradients = [i for (k, _), i in self.offloads.items() if self.layout.backward[k].rank == rank]
            gradients += [  # a step's compute lies between two VALIDATEs, also where nothing is trained
                max(self.last_backward[k])
                for k, stage in enumerate(self.layout.backward)
                if stage.rank == rank and self.frozen.issuperset(stage.layers)
            ]
            number = self.num_forward + self.num_backward + rank
            validate.append(self.add(Kind.VALIDATE, number, 0, rank, "control", gradients))
        head = self.offloads.get((self.num_backward - 1, len(self.buckets[-1]) - 1), -1)
        commit_of_layer = [-1] * self.layout.num_layers
        store_of_layer: dict[int, int] = {}
        commits: list[list[int]] = [[] for _ in range(self.layout.num_ranks)]
        turn = [0] * self.layout.num_ranks
        for (k, b), offload in self.offloads.items():
            stage, rank = self.num_forward + k, self.layout.backward[k].rank
            gradients = [offload]
            if self.tied and 0 in self.buckets[stage][b] and head != offload:
                gradients.append(head)
            if self.options.optimizer == "sync":
                gradients.append(validate[rank])
            layer = self.buckets[stage][b].start
            if self.options.holds(layer, self.layout.num_layers, self.tied):
                step = self._add_device_step(stage, b, rank, offload, validate[rank])
                store_of_layer[layer] = self.add(Kind.STORE_WEIGHTS, stage, b, rank, "d2h", [step])
                self.carried[step].append(store_of_layer[layer])
            else:
                worker, turn[rank] = turn[rank], (turn[rank] + 1) % self.options.optimizer_workers
                step = self.add(Kind.STEP, stage, b, rank, f"cpu{worker or ''}", gradients)
            commit = self.add(Kind.COMMIT, stage, b, rank, "settle", [step, validate[rank]])
            for gradient in gradients[: 2 if self.tied else 1]:
                if self.kind[gradient] == Kind.OFFLOAD_GRAD:
                    self.carried[gradient].append(commit)
            commits[rank].append(commit)
            for layer in self.buckets[stage][b]:
                commit_of_layer[layer] = commit
        barriers = []
        if self.options.barrier:
            for rank in range(self.layout.num_ranks):
                number = self.num_forward + self.num_backward + rank
                barriers.append(self.add(Kind.BARRIER, number, 0, rank, "control", commits[rank]))
            for i in self.loads:
                self.carried[i].append(barriers[self.rank[i]])
        for i in self.fetches:
            layers = self.buckets[self.stage[i]][self.index[i]]
            needed = {commit_of_layer[layer] for layer in layers if layer not in self.frozen}
            if not needed:
                needed.add(validate[self.rank[i]])
            if self.tied and self.layout.num_layers - 1 in layers:
                needed.add(commit_of_layer[0])
            store = store_of_layer.get(layers.start, -1)
            if store >= 0 and self.rank[store] != self.rank[i]:  # the host's copy, not the accelerator's own
                needed.add(store)
            self.carried[i] += sorted(needed)
            if barriers:
                self.carried[i].append(barriers[self.rank[i]])

    def _add_device_step(self, stage: int, bucket: int, rank: int, gradient: int, verdict: int) -> int:
        """A STEP on the accelerator: after the verdict, and after everything that copies the weights it replaces."""
        layers = self.buckets[stage][bucket]
        readers = [
            i for i in self.fetches if self.rank[i] == rank and self.buckets[self.stage[i]][self.index[i]] == layers
        ]
        return self.add(Kind.STEP, stage, bucket, rank, "device_step", [gradient, verdict, *readers])


def require_passes_together(layout: Layout) -> None:
    """Raises SpipeError unless every forward stage is also a backward stage, on the same rank."""
    for k, stage in enumerate(layout.forward):
        if layout.backward[k : k + 1] != (stage,):
            raise SpipeError(
                f"recompute = never keeps what a forward saves for its backward on its rank, but forward stage {k} "
                f"(layers {stage.first}..{stage.stop - 1}, rank {stage.rank}) is not backward stage {k}, too; "
                "use recompute = early, or a schedule that runs both passes of a stage on one rank"
            )


def _next_uses(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """For each visit, the number of the next visit to the same layers (a large number if there is none)."""
    following: dict[tuple[int, int], int] = {}
    result = [0] * len(ranges)
    for v in reversed(range(len(ranges))):
        result[v] = following.get(ranges[v], len(ranges) + 1)
        following[ranges[v]] = v
    return result
