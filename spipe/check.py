"""Check: prove a program sound before anyone runs it.

Independent of how lowering builds programs: it looks at the finished op lists only. Every fault is a sentence that
names the ops; ``require`` raises them.

What is checked: the layers of each pass and the ops of each stage are complete; every op depends on what it reads
(weights, inputs, gradients, stage inputs) and nothing is read after it was freed or before its step was settled; slots
have one user at a time; the ops of a lane are in one order on both sides of a message; a rank's issue order is
topological; nothing deadlocks with the planned lanes nor with one serial lane per rank, sends being rendezvous and
collectives N-way.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import pairwise

from spipe.errors import SpipeError
from spipe.ops import COLLECTIVES, COMPUTE, PARTNER, RECVS, SENDS, Kind
from spipe.program import Program


def check(program: Program) -> list[str]:
    """All faults found, as sentences; empty if the program is sound."""
    checker = _Checker(program)
    faults = [*checker.coverage(), *checker.order(), *checker.messages()]
    if faults:
        return faults  # what follows relies on the above
    return [*checker.inputs(), *checker.weights(), *checker.gradients(), *checker.slots(), *checker.deadlocks()]


def require(program: Program) -> None:
    """Raises SpipeError with the faults found."""
    faults = check(program)
    if faults:
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        raise SpipeError(f"the program is not sound: {shown}")


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.layout = program.layout
        self.num_forward = len(self.layout.forward)
        self.number: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # (kind, stage, index) -> ops
        for i, key in enumerate(zip(program.kind, program.stage, program.index, strict=True)):
            self.number[key].append(i)
        self.held: dict[tuple[int, Kind], int] = {}  # (layer on an accelerator, STEP or STORE_WEIGHTS) -> op
        self.position: dict[int, int] = {}  # compute op -> position in its rank's compute order
        counts: Counter[int] = Counter()
        for i, kind in enumerate(program.kind):
            if kind in COMPUTE or kind == Kind.FREE:
                self.position[i] = counts[program.rank[i]]
                counts[program.rank[i]] += 1

        self.backward_kinds = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)[: 1 + (Kind.WEIGHT_GRADIENT in program.kind)]
        self.last_kind = self.backward_kinds[-1]
        """What makes the gradients of the weights."""

    def name(self, i: int) -> str:
        return f"{self.program.op(i)} of rank {self.program.rank[i]}"

    def find(self, kind: Kind, stage: int, index: int) -> int:
        return self.number[kind, stage, index][0]

    # ------------------------------------------------------------------ completeness and order

    def coverage(self) -> Iterator[str]:
        """Each stage has its compute ops once per microbatch and its weight ops once per bucket, on its own rank."""
        program, layout = self.program, self.layout
        expected: dict[tuple[Kind, int, int], int] = {}  # (kind, stage, index) -> rank
        for stage, spec in enumerate((*layout.forward, *layout.backward)):
            backward = stage >= self.num_forward
            for kind in (Kind.RECOMPUTE, *self.backward_kinds) if backward else (Kind.FORWARD,):
                expected.update({(kind, stage, m): spec.rank for m in range(program.num_microbatches)})
            if backward:
                trained = [b for b in range(len(program.buckets[stage])) if program.trains(stage, b)]
                for kind in (Kind.OFFLOAD_GRAD, Kind.STEP, Kind.COMMIT):
                    expected.update({(kind, stage, b): spec.rank for b in trained})
                for b, layers in enumerate(program.buckets[stage]):
                    if program.is_held(layers.start):
                        expected[Kind.STORE_WEIGHTS, stage, b] = spec.rank
        for rank in range(layout.num_ranks):
            expected[Kind.VALIDATE, self.num_forward + len(layout.backward) + rank, 0] = rank
        kinds = {kind for kind, _, _ in expected}
        for (kind, stage, index), rank in expected.items():
            found = self.number.get((kind, stage, index), [])
            what = f"{Kind(kind).name} of {program.stage_name(stage)} index {index}"
            if len(found) != 1:
                yield f"{what} occurs {len(found)} times instead of once"
            elif program.rank[found[0]] != rank:
                yield f"{what} is on rank {program.rank[found[0]]} instead of {rank}"
        for code, stage, index in self.number:
            if code in kinds and (Kind(code), stage, index) not in expected:
                yield f"{Kind(code).name} of {program.stage_name(stage)} index {index} does not belong to the layout"
        for stage, buckets in enumerate(program.buckets):
            if [layer for bucket in buckets for layer in bucket] != list(program.layers(stage)):
                yield f"the buckets of {program.stage_name(stage)} do not cover its layers once"

    def order(self) -> Iterator[str]:
        """Dependencies come earlier in the global order and are local, but for what passes through host memory."""
        program = self.program
        for i, deps in enumerate(program.dependencies):
            for d in deps:
                if not 0 <= d < i:
                    yield f"{self.name(i)} depends on {self.name(d)}, which comes later"
                elif program.rank[d] != program.rank[i] and program.kind[d] not in (
                    Kind.OFFLOAD_GRAD,
                    Kind.STORE_STAGE_INPUT,
                ):
                    yield f"{self.name(i)} depends on {self.name(d)} of another rank without a message"

    def messages(self) -> Iterator[str]:
        """Every SEND has its RECV on the same lane with the same name, next to each other."""
        program = self.program
        for i, kind in enumerate(program.kind):
            if kind not in SENDS and kind not in RECVS:
                continue
            j = program.partner[i]
            if not 0 <= j < len(program) or program.partner[j] != i:
                yield f"{self.name(i)} has no partner"
                continue
            send, recv = (i, j) if kind in SENDS else (j, i)
            if (
                PARTNER.get(Kind(program.kind[send])) != program.kind[recv]
                or program.stage[send] != program.stage[recv]
                or program.index[send] != program.index[recv]
            ):
                yield f"{self.name(send)} is matched with {self.name(recv)}"
            elif program.lane[send] != program.lane[recv]:
                yield f"{self.name(send)} and its receive are on different lanes"
            elif abs(send - recv) != 1:
                yield f"{self.name(send)} and its receive do not stand together in the global order"
            else:
                lane = program.lanes[program.lane[send]]
                if {program.rank[send], program.rank[recv]} != {lane.rank, lane.peer}:
                    yield f"{self.name(send)} is on the lane of ranks {lane.rank} and {lane.peer}"

    # ------------------------------------------------------------------ data flow

    def after(self, i: int, wanted: int, what: str) -> Iterator[str]:
        """Op ``i`` waits for ``wanted``, directly or because its own lane is in order."""
        program = self.program
        if wanted in program.dependencies[i]:
            return
        same_lane = i in self.position and wanted in self.position and program.rank[i] == program.rank[wanted]
        if same_lane and self.position[wanted] < self.position[i]:
            return
        yield f"{self.name(i)} does not wait for {what}, {self.name(wanted)}"

    def arrives(self, i: int, kind: Kind, stage: int, index: int, producer: int, what: str) -> Iterator[str]:
        """Op ``i`` reads what ``producer`` makes: locally, or through a message that carries it."""
        program = self.program
        if program.rank[producer] == program.rank[i]:
            yield from self.after(i, producer, what)
            return
        received = self.number.get((kind, stage, index), [])
        if len(received) != 1:
            yield f"{self.name(i)} needs {what} from rank {program.rank[producer]}, but there is no message"
            return
        if program.rank[received[0]] != program.rank[i]:
            yield f"{self.name(received[0])} is not on the rank that needs {what}"
        yield from self.after(i, received[0], what)
        yield from self.after(program.partner[received[0]], producer, what)

    def inputs(self) -> Iterator[str]:
        """Activations, stage inputs, tokens and incoming gradients are there when they are read."""
        program, layout, first = self.program, self.layout, self.num_forward
        for m in range(program.num_microbatches):
            for k in range(first):
                i = self.find(Kind.FORWARD, k, m)
                if k:
                    below = self.find(Kind.FORWARD, k - 1, m)
                    yield from self.arrives(i, Kind.RECV_ACTIVATION, k, m, below, "its input")
                else:
                    yield from self.loaded(i, k, m)
            for k in range(len(layout.backward)):
                stage = first + k
                i, j = self.find(Kind.RECOMPUTE, stage, m), self.find(Kind.BACKWARD, stage, m)
                yield from self.after(j, i, "its recompute")
                if self.last_kind is not Kind.BACKWARD:
                    yield from self.after(self.find(self.last_kind, stage, m), j, "its first half")
                if k in (0, len(layout.backward) - 1):
                    yield from self.loaded(i, stage, m)
                if self.keeps(k):
                    yield from self.saved(i, k, m)
                elif k:
                    yield from self.stage_input(i, k, m)
                if k + 1 < len(layout.backward):
                    above = self.find(Kind.BACKWARD, stage + 1, m)
                    reader = i if program.options.recompute == "late" else j
                    yield from self.arrives(reader, Kind.RECV_GRADIENT, stage, m, above, "its gradient")

    def loaded(self, i: int, stage: int, m: int) -> Iterator[str]:
        found = self.number.get((Kind.LOAD_TOKENS, stage, m), [])
        if not found:
            yield f"{self.name(i)} reads tokens or labels that nobody loads"
        else:
            yield from self.after(i, found[0], "its tokens")

    def stage_input(self, i: int, k: int, m: int) -> Iterator[str]:
        program = self.program
        source, stage = self.layout.stage_input(k), self.num_forward + k
        producer = self.find(Kind.FORWARD, source.forward, m)
        if program.options.stage_input_route == "p2p" or program.options.recompute == "never":
            yield from self.arrives(i, Kind.RECV_STAGE_INPUT, stage, m, producer, "its stage input")
            return
        yield from self.through_host(i, stage, m, producer, "its stage input")

    def keeps(self, k: int) -> bool:
        """Whether a backward stage needs what its own forward saved, instead of a stage input."""
        return self.program.options.recompute == "never" and k < self.num_forward

    def saved(self, i: int, k: int, m: int) -> Iterator[str]:
        """What a forward saved stays on its rank, or goes through host memory and back."""
        forward, stage = self.find(Kind.FORWARD, k, m), self.num_forward + k
        what = "what its forward saved"
        if self.program.rank[forward] != self.program.rank[i]:
            yield f"{self.name(i)} needs {what} on rank {self.program.rank[forward]}"
        elif self.number.get((Kind.STORE_STAGE_INPUT, stage, m)):
            yield from self.through_host(i, stage, m, forward, what)
        else:
            yield from self.after(i, forward, what)

    def through_host(self, i: int, stage: int, m: int, producer: int, what: str) -> Iterator[str]:
        """Op ``i`` reads what ``producer`` made and what was stored in host memory and loaded from there."""
        stores = self.number.get((Kind.STORE_STAGE_INPUT, stage, m), [])
        loads = self.number.get((Kind.LOAD_STAGE_INPUT, stage, m), [])
        if len(stores) != 1 or len(loads) != 1:
            yield f"{self.name(i)} needs {what} through host memory, but it is not stored and loaded once"
            return
        yield from self.after(i, loads[0], what)
        yield from self.after(loads[0], stores[0], what)
        yield from self.after(stores[0], producer, what)

    def weights(self) -> Iterator[str]:
        """Compute reads weights between FETCH and FREE, and every FETCH waits until all its layers are settled.

        With stale weights that is one step longer ago (``Program.lag``).
        """
        program = self.program
        fetches: dict[tuple[int, int], list[int]] = defaultdict(list)  # (rank, residency) -> ops
        frees: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, kind in enumerate(program.kind):
            if kind == Kind.FETCH:
                fetches[program.rank[i], program.visit[i]].append(i)
            elif kind == Kind.FREE:
                frees[program.rank[i], program.visit[i]].append(i)
        for i in (i for i, kind in enumerate(program.kind) if kind in COMPUTE):
            key = (program.rank[i], program.weights[i])
            layers = sorted(x for f in fetches[key] for x in program.buckets[program.stage[f]][program.index[f]])
            if layers != list(program.layers(program.stage[i])):
                yield f"{self.name(i)} needs layers {program.layers(program.stage[i])}, but layers {layers} are fetched"
            for f in fetches[key]:
                yield from self.after(i, f, "its weights")
            if len(frees[key]) != 1:
                yield f"the weights of {self.name(i)} are freed {len(frees[key])} times"
            elif self.position[frees[key][0]] < self.position[i]:
                yield f"{self.name(i)} reads weights after {self.name(frees[key][0])}"
        settled = {}
        for i, kind in enumerate(program.kind):
            if kind == Kind.COMMIT:
                settled.update(dict.fromkeys(program.buckets[program.stage[i]][program.index[i]], i))
            elif kind in (Kind.STEP, Kind.STORE_WEIGHTS):
                self.held[program.buckets[program.stage[i]][program.index[i]].start, Kind(kind)] = i
        for i in (i for mine in fetches.values() for i in mine):
            read = set(program.buckets[program.stage[i]][program.index[i]])
            if program.tied and self.layout.num_layers - 1 in read:
                read.add(0)
            if read <= program.frozen and not any(program.kind[d] == Kind.VALIDATE for d in program.carried[i]):
                yield f"{self.name(i)} may start a step before the one before is judged"
            for layer in read - program.frozen:
                if settled[layer] not in program.carried[i]:
                    yield f"{self.name(i)} may read stale weights: it does not wait for {self.name(settled[layer])}"
                if not program.is_held(layer):
                    continue
                step, store = (self.held[layer, kind] for kind in (Kind.STEP, Kind.STORE_WEIGHTS))
                if program.owner(layer) == program.rank[i]:
                    yield from self.after(step, i, "a copy of the weights it replaces")
                elif store not in program.carried[i]:
                    yield f"{self.name(i)} may read stale weights: it does not wait for {self.name(store)}"

    def gradients(self) -> Iterator[str]:
        """Gradients leave complete, step once both uses are there, are judged by all, and are settled after both."""
        program, first = self.program, self.num_forward
        verdict = {program.rank[i]: i for i, kind in enumerate(program.kind) if kind == Kind.VALIDATE}
        top = first + len(self.layout.backward) - 1
        head = self.find(Kind.OFFLOAD_GRAD, top, len(program.buckets[top]) - 1) if program.tied else -1
        for k, spec in enumerate(self.layout.backward):
            stage = first + k
            backwards = [self.find(self.last_kind, stage, m) for m in range(program.num_microbatches)]
            for b, layers in enumerate(program.buckets[stage]):
                if not program.trains(stage, b):
                    continue
                offload, step = self.find(Kind.OFFLOAD_GRAD, stage, b), self.find(Kind.STEP, stage, b)
                commit = self.find(Kind.COMMIT, stage, b)
                last = max(backwards, key=lambda i: self.position[i])
                yield from self.after(offload, last, "the last gradient")
                yield from self.after(step, offload, "its gradient")
                if program.tied and 0 in layers and head != offload:
                    yield from self.after(step, head, "the head's gradient of the tied weight")
                    if commit not in program.carried[head]:
                        yield f"{self.name(head)} may overwrite a gradient that {self.name(commit)} still needs"
                yield from self.after(verdict[spec.rank], offload, "a gradient it judges")
                yield from self.after(commit, step, "its STEP")
                yield from self.after(commit, verdict[spec.rank], "the verdict")
                held = program.is_held(layers.start)
                if program.options.optimizer == "sync" or held:
                    yield from self.after(step, verdict[spec.rank], "the verdict (it cannot be undone)")
                if held:
                    store = self.find(Kind.STORE_WEIGHTS, stage, b)
                    yield from self.after(store, step, "the weights it stores")
                    if store not in program.carried[step]:
                        yield f"{self.name(step)} may replace weights that {self.name(store)} still reads"
                if commit not in program.carried[offload]:
                    yield f"{self.name(offload)} may overwrite a gradient that {self.name(commit)} still needs"
            if [self.position[i] for i in backwards] != sorted(self.position[i] for i in backwards):
                yield f"gradients of B{k} are not accumulated in the order of microbatches"

    # ------------------------------------------------------------------ slots

    def slots(self) -> Iterator[str]:
        """A slot's next user waits for the end of the previous one, within a step and from one step to the next."""
        program = self.program
        uses: dict[tuple[str, int, int, int], list[tuple[list[int], list[int]]]] = defaultdict(list)
        fetches: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, kind in enumerate(program.kind):
            rank, slot, stage = program.rank[i], program.slot[i], program.stage[i]
            if kind == Kind.FETCH:
                fetches[rank, program.visit[i]].append(i)
            elif kind == Kind.FREE:
                if program.options.weight_slots is not None and slot >= program.options.weight_slots:
                    yield f"{self.name(i)} uses weight slot {slot} of {program.options.weight_slots}"
                uses["weights", rank, 0, slot].append((fetches[rank, program.visit[i]], [i]))
            elif kind == Kind.RECV_ACTIVATION:
                uses["activation", rank, program.lane[i], slot].append(
                    ([i], [self.find(Kind.FORWARD, stage, program.index[i])])
                )
            elif kind == Kind.RECV_GRADIENT:
                uses["gradient", rank, program.lane[i], slot].append(
                    ([i], [self.find(self.last_kind, stage, program.index[i])])
                )
        for k, spec in enumerate(self.layout.backward):
            stage = self.num_forward + k
            backwards = [self.find(self.last_kind, stage, m) for m in range(program.num_microbatches)]
            buckets = [b for b in range(len(program.buckets[stage])) if program.trains(stage, b)]
            if not buckets:
                continue
            offloads = [self.find(Kind.OFFLOAD_GRAD, stage, b) for b in buckets]
            first = min(backwards, key=lambda i: self.position[i])
            uses["gradient slab", spec.rank, 0, program.slot[first]].append(([first], offloads))
        for (what, _, _, slot), users in uses.items():
            users.sort(key=lambda use: min(use[0]))
            for (_, previous), (taken, _) in pairwise(users):
                for i in taken:
                    for j in previous:
                        yield from self.after(i, j, f"{what} slot {slot} to be free")
            for i in users[0][0]:
                for j in users[-1][1]:
                    if j not in program.carried[i]:
                        yield f"{self.name(i)} does not wait for {what} slot {slot} of the step before, {self.name(j)}"

    # ------------------------------------------------------------------ deadlock

    def deadlocks(self) -> Iterator[str]:
        """Run the ops without a clock, with the planned lanes and with one serial lane per rank."""
        program = self.program
        planned = [(lane, rank) for lane, rank in zip(program.lane, program.rank, strict=True)]
        serial = [(0, rank) for rank in program.rank]
        for what, lanes in (("the planned lanes", planned), ("one serial lane per rank", serial)):
            stuck = self.stuck(lanes, ready_first=what == "the planned lanes")
            if stuck:
                heads = "; ".join(self.name(i) for i in stuck[:4])
                yield f"deadlock with {what}: {len(stuck)} lanes wait, at {heads}"

    def stuck(self, lanes: list[tuple[int, int]], ready_first: bool) -> list[int]:
        """Lane heads that can never run; a message or collective runs when all its ops are heads and ready."""
        program = self.program
        queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        for i, lane in enumerate(lanes):
            if ready_first and program.lanes[program.lane[i]].discipline == "deadline":
                lane = (-1 - i, lane[1])  # takes whatever is ready: as good as a lane of its own
            queues[lane].append(i)
            lanes[i] = lane
        unmet = [len(deps) for deps in program.dependencies]
        successors: list[list[int]] = [[] for _ in lanes]
        for i, deps in enumerate(program.dependencies):
            for d in deps:
                successors[d].append(i)
        together = {i: group for group in program.collectives() for i in group}
        candidates = deque(queue[0] for queue in queues.values())
        while candidates:
            i = candidates.popleft()
            if program.kind[i] in COLLECTIVES:
                group = together[i]
            else:
                group = (i,) if program.partner[i] < 0 else (i, program.partner[i])
            if any(unmet[j] or not queues[lanes[j]] or queues[lanes[j]][0] != j for j in group):
                continue
            for j in group:
                queues[lanes[j]].popleft()
                if queues[lanes[j]]:
                    candidates.append(queues[lanes[j]][0])
            for j in group:
                for successor in successors[j]:
                    unmet[successor] -= 1
                    if not unmet[successor]:
                        candidates.append(successor)
        return [queue[0] for queue in queues.values() if queue]
