"""How messages travel between ranks: through host memory, gloo or NCCL.

``send`` and ``recv`` are called in the thread of a peer lane, in the lane's order, which is the same on both sides.
On the CPU a message is there when ``recv`` returns; on CUDA it is there in the order of the lane's stream.
"""

from datetime import timedelta
from typing import Any, Literal, Protocol

import torch

from spipe.errors import SpipeError, unknown
from spipe.ops import SENDS
from spipe.program import Program
from spipe.runtime.devices import Device
from spipe.runtime.rendezvous import KeyValueStore, c10d, prefixed
from spipe.runtime.store import MAILBOX_SLOTS, Store

TransportName = Literal["auto", "host", "gloo", "nccl"]
TRANSPORTS: tuple[TransportName, ...] = ("auto", "host", "gloo", "nccl")


class Transport(Protocol):
    """Moves the messages of one rank."""

    name: str

    def send(self, op: int, step: int, tensor: torch.Tensor) -> None:
        """Send a flat, contiguous tensor on the device as op ``op``."""

    def recv(self, op: int, step: int, tensor: torch.Tensor) -> None:
        """Fill a flat, contiguous tensor on the device with the message of op ``op``."""

    def close(self) -> None:
        """Drop connections."""


class HostTransport:
    """Mailboxes in the host's shared region: two per direction of a lane, each a copy in and a copy out."""

    name = "host"

    def __init__(self, program: Program, store: Store, device: Device) -> None:
        self.store, self.device = store, device
        self.key: list[tuple[int, int]] = [(-1, -1)] * len(program)
        self.position, self.per_step = [0] * len(program), dict.fromkeys(store.layout.mailboxes, 0)
        for i in range(len(program)):
            if program.kind[i] in SENDS:
                key = (program.lane[i], program.rank[i])
                for op in (i, program.partner[i]):
                    self.key[op], self.position[op] = key, self.per_step[key]
                self.per_step[key] += 1
        self.boxes = {key: [store.boundary(span) for span in spans] for key, spans in store.layout.mailboxes.items()}

    def _place(self, op: int, step: int) -> tuple[int, int, torch.Tensor]:
        """Number of the message in its direction, its flag, and its mailbox."""
        key = self.key[op]
        number = step * self.per_step[key] + self.position[op]
        return number, self.store.layout.mailbox_flags[key], self.boxes[key][number % MAILBOX_SLOTS]

    def send(self, op: int, step: int, tensor: torch.Tensor) -> None:
        number, flag, box = self._place(op, step)
        if number >= MAILBOX_SLOTS:
            self._wait(flag + 1, number - MAILBOX_SLOTS + 1)
        self.device.copy(box[: tensor.numel()], tensor)
        self.device.finish_lane()
        self.store.flags.set(flag, number + 1)

    def recv(self, op: int, step: int, tensor: torch.Tensor) -> None:
        number, flag, box = self._place(op, step)
        self._wait(flag, number + 1)
        self.device.copy(tensor, box[: tensor.numel()])
        self.device.finish_lane()
        self.store.flags.set(flag + 1, number + 1)

    def _wait(self, flag: int, value: int) -> None:
        self.store.flags.wait(flag, value, float("inf"), self.store.layout.abort)

    def close(self) -> None: ...


class GroupTransport:
    """A process group of two ranks for every peer lane: its own sockets (gloo) or its own communicator (NCCL)."""

    def __init__(
        self, name: Literal["gloo", "nccl"], program: Program, rank: int, store: KeyValueStore, timeout_s: float,
        device: Device,
    ) -> None:  # fmt: skip
        self.name: str = name
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
        return "host" if device == "cpu" or shared_devices or num_ranks == 1 else "nccl"
    if name == "gloo" and device == "cuda":
        raise SpipeError("transport gloo moves CPU memory, but the plan is for device cuda; use nccl, host or auto")
    if name == "nccl" and device == "cpu":
        raise SpipeError("transport nccl needs device cuda, but the plan is for device cpu; use host, gloo or auto")
    if name == "nccl" and shared_devices:
        raise SpipeError(
            "transport nccl needs a CUDA device for every rank; with ranks that share one use host or auto"
        )
    return name


def make_transport(
    name: str, program: Program, rank: int, store: Store, device: Device, rendezvous: KeyValueStore,
    timeout_s: float,
) -> Transport:  # fmt: skip
    """The transport ``name`` (as ``choose_transport`` gave it) for one rank."""
    if name == "host":
        return HostTransport(program, store, device)
    return GroupTransport("gloo" if name == "gloo" else "nccl", program, rank, rendezvous, timeout_s, device)
