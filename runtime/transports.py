"""How messages travel between ranks: through host memory, from GPU to GPU, gloo or NCCL.

``send`` and ``recv`` are called in the thread of a peer lane, in the lane's order, which is the same on both sides.
On the CPU a message is there when ``recv`` returns; on CUDA it is there in the order of the lane's stream.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch

from spipe.errors import SpipeError, unknown
from spipe.ops import SENDS
from spipe.program import Program
from spipe.runtime.devices import Device
from spipe.runtime.peer_memory import Counter, PeerMemory, PeerMemoryError, copy_async
from spipe.runtime.region import bytes_of
from spipe.runtime.rendezvous import KeyValueStore, c10d, prefixed
from spipe.runtime.store import COUNTER_BYTES, MAILBOX_SLOTS, Store

TransportName = Literal["auto", "host", "peer", "gloo", "nccl"]
TRANSPORTS: tuple[TransportName, ...] = ("auto", "host", "peer", "gloo", "nccl")

Direction = tuple[int, int]
"""Of messages: lane and sending rank."""


class Transport(Protocol):
    """Moves the messages of one rank.

    Attributes:
        name: one of ``TRANSPORTS``.
        device_bytes: memory on the rank's device that PyTorch does not know of.
    """

    name: str
    device_bytes: int

    def send(self, op: int, step: int, tensor: torch.Tensor) -> None:
        """Send a flat, contiguous tensor on the device as op ``op``."""

    def recv(self, op: int, step: int, tensor: torch.Tensor) -> None:
        """Fill a flat, contiguous tensor on the device with the message of op ``op``."""

    def release(self) -> None:
        """The run was aborted: let go what waits for a message on the device."""

    def close(self) -> None:
        """Drop connections."""


class Messages:
    """Messages of a job, numbered from the start of the run in each direction of a lane."""

    def __init__(self, program: Program, store: Store) -> None:
        self.program, self.directions = program, store.layout.mailboxes
        self._key: list[Direction] = [(-1, -1)] * len(program)
        self._position, self._per_step = [0] * len(program), dict.fromkeys(self.directions, 0)
        for i in range(len(program)):
            if program.kind[i] in SENDS:
                key = (program.lane[i], program.rank[i])
                for op in (i, program.partner[i]):
                    self._key[op], self._position[op] = key, self._per_step[key]
                self._per_step[key] += 1

    def number(self, op: int, step: int) -> tuple[Direction, int]:
        """Direction of a message, and its number there."""
        key = self._key[op]
        return key, step * self._per_step[key] + self._position[op]

    def of_rank(self, rank: int) -> tuple[list[Direction], list[Direction]]:
        """Directions in which a rank receives, and those in which it sends."""
        lanes = self.program.lanes
        mine = [key for key in self.directions if rank in (lanes[key[0]].rank, lanes[key[0]].peer)]
        return [key for key in mine if key[1] != rank], [key for key in mine if key[1] == rank]


class HostTransport:
    """Mailboxes in the host's shared region: two per direction of a lane, each a copy in and a copy out."""

    name = "host"
    device_bytes = 0

    def __init__(self, program: Program, store: Store, device: Device) -> None:
        self.store, self.device, self.messages = store, device, Messages(program, store)
        self.boxes = {key: [store.boundary(span) for span in spans] for key, spans in store.layout.mailboxes.items()}

    def send(self, op: int, step: int, tensor: torch.Tensor) -> None:
        key, number = self.messages.number(op, step)
        flag = self.store.layout.mailbox_flags[key]
        if number >= MAILBOX_SLOTS:
            self._wait(flag + 1, number - MAILBOX_SLOTS + 1)
        self.device.copy(self.boxes[key][number % MAILBOX_SLOTS], tensor)
        self.device.finish_lane()
        self.store.flags.set(flag, number + 1)

    def recv(self, op: int, step: int, tensor: torch.Tensor) -> None:
        key, number = self.messages.number(op, step)
        flag = self.store.layout.mailbox_flags[key]
        self._wait(flag, number + 1)
        self.device.copy(tensor, self.boxes[key][number % MAILBOX_SLOTS])
        self.device.finish_lane()
        self.store.flags.set(flag + 1, number + 1)

    def _wait(self, flag: int, value: int) -> None:
        self.store.flags.wait(flag, value, float("inf"), self.store.layout.abort)

    def release(self) -> None: ...

    def close(self) -> None: ...


class PeerTransport:
    """Mailboxes in the receiving GPU's memory: one copy from GPU to GPU, one inside the receiver.

    Copy engines do both, so that messages take nothing from the kernels that compute. Streams wait for each other by
    counters, so that no thread has to: what comes after a message is issued before it is there.
    """

    name = "peer"

    def __init__(self, program: Program, rank: int, store: Store, device: Device, rendezvous: KeyValueStore) -> None:
        self.messages, self.device, self.rank, self.rendezvous = Messages(program, store), device, rank, rendezvous
        self.num_ranks = program.layout.num_ranks
        self.slot_bytes = -(-store.layout.boundary_bytes // 512) * 512
        self.memory: dict[Direction, PeerMemory] = {}
        self.counters: dict[Direction, tuple[Counter, Counter]] = {}
        incoming, outgoing = self.messages.of_rank(rank)
        problem = ""
        try:
            for key in incoming:
                self.memory[key] = PeerMemory.allocate(MAILBOX_SLOTS * self.slot_bytes)
        except PeerMemoryError as error:
            problem = f"rank {rank}: {error}"
        self.device_bytes = sum(memory.num_bytes for memory in self.memory.values())
        try:
            for key in incoming:
                rendezvous.set(f"mailbox {key}", "" if problem else self.memory[key].handle())
            for key in outgoing:
                self.memory[key] = PeerMemory.open(rendezvous.get(f"mailbox {key}").decode())
            for key in (*incoming, *outgoing):
                first = store.region.pointer(store.layout.message_counters[key])
                self.counters[key] = Counter(first), Counter(first + COUNTER_BYTES)
                self.counters[key][0].wait(0, self._stream())  # refused at once where it is not possible
        except PeerMemoryError as error:
            problem = problem or f"rank {rank}: {error}"
        # All of them, or none: both ends of a lane have to agree.
        rendezvous.set(f"mailboxes of {rank}", problem)
        problems = [rendezvous.get(f"mailboxes of {r}").decode() for r in range(self.num_ranks)]
        if any(problems):
            self.close()
            raise PeerMemoryError(next(filter(None, problems)))

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device.device).cuda_stream)

    def send(self, op: int, step: int, tensor: torch.Tensor) -> None:
        key, number = self.messages.number(op, step)
        (put, taken), stream = self.counters[key], self._stream()
        if number >= MAILBOX_SLOTS:
            taken.wait(number - MAILBOX_SLOTS + 1, stream)
        copy_async(self._slot(key, number), tensor.data_ptr(), bytes_of(tensor), stream)
        put.write(number + 1, stream)

    def recv(self, op: int, step: int, tensor: torch.Tensor) -> None:
        key, number = self.messages.number(op, step)
        (put, taken), stream = self.counters[key], self._stream()
        put.wait(number + 1, stream)
        copy_async(tensor.data_ptr(), self._slot(key, number), bytes_of(tensor), stream)
        taken.write(number + 1, stream)

    def _slot(self, key: Direction, number: int) -> int:
        return self.memory[key].pointer + number % MAILBOX_SLOTS * self.slot_bytes

    def release(self) -> None:
        for pair in self.counters.values():
            for counter in pair:
                counter.release()

    def close(self) -> None:
        for memory in self.memory.values():
            if not memory.num_bytes:
                memory.close()
        # What others have open must stay until they have closed it.
        self.rendezvous.set(f"mailboxes closed by {self.rank}", "")
        for rank in range(self.num_ranks):
            self.rendezvous.get(f"mailboxes closed by {rank}")
        for memory in self.memory.values():
            if memory.num_bytes:
                memory.close()
        self.memory.clear()


class GroupTransport:
    """A process group of two ranks for every peer lane: its own sockets (gloo) or its own communicator (NCCL)."""

    def __init__(
        self, name: Literal["gloo", "nccl"], program: Program, rank: int, store: KeyValueStore, timeout_s: float,
        device: Device,
    ) -> None:  # fmt: skip
        self.name: str = name
        self.device_bytes = 0
        self.lane_of, self.device = program.lane, device
        self.groups: dict[int, tuple[Any, int]] = {}
        for number, lane in enumerate(program.lanes):
            if lane.peer >= 0 and rank in (lane.rank, lane.peer):
                mine = int(rank == lane.peer)
                prefix = prefixed(store, f"lane{number}")
                make = _gloo_group if name == "gloo" else _nccl_group
                self.groups[number] = make(prefix, mine, timeout_s), 1 - mine
                if name == "nccl":
                    self._connect(number, mine)

    def _connect(self, lane: int, mine: int) -> None:
        """Make the lane's communicator now: the first message does, and all ranks are here in the order of lanes."""
        group, peer = self.groups[lane]
        first = torch.zeros(1, device=self.device.device)
        (group.recv if mine else group.send)([first], peer, 0).wait()
        self.device.finish_lane()

    def send(self, op: int, step: int, tensor: torch.Tensor) -> None:
        group, peer = self.groups[self.lane_of[op]]
        group.send([tensor], peer, 0).wait()

    def recv(self, op: int, step: int, tensor: torch.Tensor) -> None:
        group, peer = self.groups[self.lane_of[op]]
        group.recv([tensor], peer, 0).wait()

    def release(self) -> None: ...

    def close(self) -> None:
        self.groups.clear()


def _gloo_group(store: KeyValueStore, rank: int, timeout_s: float) -> Any:
    gloo = c10d().ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, 2, options)


def _nccl_group(store: KeyValueStore, rank: int, timeout_s: float) -> Any:
    nccl = c10d().ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, rank, 2, options)


def choose_transport(name: str, device: str, num_ranks: int, shared_devices: bool) -> str:
    """What ``auto`` means here; raises SpipeError for a transport that cannot work.

    On the CPU, ``auto`` is host memory: two copies, and tens of microseconds instead of milliseconds through sockets.
    """
    if name not in TRANSPORTS:
        raise unknown("transport", name, TRANSPORTS)
    if name == "auto":
        return "host" if device == "cpu" or shared_devices or num_ranks == 1 else "peer"
    needed = {"peer": "cuda", "nccl": "cuda", "gloo": "cpu"}.get(name, device)
    if needed != device:
        raise SpipeError(
            f"transport {name} needs device {needed}, but the plan is for device {device}; use "
            f"{'host, gloo' if device == 'cpu' else 'host, peer, nccl'} or auto"
        )
    if name == "nccl" and shared_devices:
        raise SpipeError(
            "transport nccl needs a CUDA device for every rank; with ranks that share one use host or auto"
        )
    return name


def make_transport(
    name: str, program: Program, rank: int, store: Store, device: Device, rendezvous: KeyValueStore,
    timeout_s: float, report: Callable[[str], None],
) -> Transport:  # fmt: skip
    """The transport ``name`` (as ``choose_transport`` gave it) for one rank.

    GPUs that cannot reach each other's memory exchange messages through the host's; ``report`` is told.
    """
    if name == "peer":
        try:
            return PeerTransport(program, rank, store, device, rendezvous)
        except PeerMemoryError as error:
            report(f"no memory shared between GPUs ({error}); messages go through host memory")
            name = "host"
    if name == "host":
        return HostTransport(program, store, device)
    return GroupTransport("gloo" if name == "gloo" else "nccl", program, rank, rendezvous, timeout_s, device)
