"""One anonymous shared-memory region per host, opened by every rank of the host.

A ``memfd`` is not limited by ``/dev/shm``, has no name to collide with, and vanishes with the last process that holds
it: nothing to leak or to clean up. Other ranks open it through ``/proc/PID/fd/N``; where ``/proc`` does not reach
(another PID namespace), the descriptor travels over an abstract Unix socket.
"""

import contextlib
import ctypes
import mmap
import os
import secrets
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from spipe.errors import SpipeError
from spipe.memory import ALIGNMENT

_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 256 << 20

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Span:
    """A part of a region, in bytes."""

    offset: int
    num_bytes: int


class RegionPlan:
    """Lays parts out one after the other, each aligned; the same calls in every process give the same offsets."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def add(self, num_bytes: int, alignment: int = ALIGNMENT) -> Span:
        """Reserve ``num_bytes`` bytes."""
        offset = -(-self.num_bytes // alignment) * alignment
        self.num_bytes = offset + num_bytes
        return Span(offset, num_bytes)


class Region:
    """A mapped region. ``close`` only drops the descriptor: tensors that view the memory keep it mapped."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.descriptor, self.num_bytes = descriptor, num_bytes
        self._map = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._server: socket.socket | None = None

    @classmethod
    def create(cls, num_bytes: int) -> "Region":
        """A new region, zeroed, readable by this user only. Raises SpipeError if the system refuses the size."""
        descriptor = os.memfd_create("spipe", os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, num_bytes)
            return cls(descriptor, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise SpipeError(
                f"cannot share {num_bytes / 2**30:.2f} GiB of host memory between the ranks ({error.strerror}); "
                "free memory, raise the limit of the container, or use a smaller model"
            ) from None

    def address(self) -> str:
        """Text that ``open`` understands in another process of this host and user."""
        name = f"spipe-{os.getpid()}-{secrets.token_hex(8)}"
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind("\0" + name)
        server.listen(64)
        self._server = server
        threading.Thread(target=_serve, args=(server, self.descriptor), name="region server", daemon=True).start()
        return f"{os.getpid()} {self.descriptor} {self.num_bytes} {os.stat(self.descriptor).st_ino} {name}"

    @classmethod
    def open(cls, address: str) -> "Region":
        """Map a region that another process of this host created. Raises SpipeError if it cannot be reached."""
        process, number, num_bytes, inode, name = address.split()
        descriptor = -1
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            status = os.stat(descriptor)
            if (status.st_ino, status.st_size) != (int(inode), int(num_bytes)):  # another process of that number
                os.close(descriptor)
                descriptor = -1
        if descriptor < 0:
            descriptor = _receive(name)
        return cls(descriptor, int(num_bytes))

    def pointer(self, span: Span) -> int:
        """Address of a part in this process."""
        return self._bytes.data_ptr() + span.offset

    def tensor(self, span: Span, dtype: torch.dtype) -> torch.Tensor:
        """Flat view of a part."""
        return self._bytes[span.offset : span.offset + span.num_bytes].view(dtype)

    def advise_huge_pages(self) -> None:
        """Ask for huge pages; a no where the system has none for shared memory."""
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def populate(self, offset: int, num_bytes: int, num_threads: int) -> None:
        """Give a part its pages now, with several threads, instead of at first use; a no where that is unknown."""
        page = mmap.PAGESIZE
        first, stop = offset // page * page, min(-(-(offset + num_bytes) // page) * page, self.num_bytes)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        with ThreadPoolExecutor(num_threads) as threads:
            for begin in range(first, stop, _POPULATE_BYTES):
                length = min(_POPULATE_BYTES, stop - begin)
                threads.submit(madvise, self._bytes.data_ptr() + begin, length, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Drop the descriptor and stop handing it out."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; closing alone does not
            self._server.close()
            self._server = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def private_memory(num_elements: int) -> torch.Tensor:
    """Zeroed fp32 memory of this process, on huge pages where the system has them, aligned to a page."""
    size = max(num_elements * 4, 1)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[: num_elements * 4].view(torch.float32)


def _serve(server: socket.socket, descriptor: int) -> None:
    """Hand the descriptor to processes of the same user until the socket is closed."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] == os.getuid():
                socket.send_fds(connection, [b"d"], [descriptor])


def _receive(name: str) -> int:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(30)
            client.connect("\0" + name)
            _, descriptors, _, _ = socket.recv_fds(client, 1, 1)
            if descriptors:
                return descriptors[0]
    except OSError as error:
        reason = str(error)
    else:
        reason = "no descriptor came"
    raise SpipeError(
        f"cannot open the shared memory of this host's first rank, neither through /proc nor through the socket {name} "
        f"({reason}); the ranks of a host have to run as the same user, in one container"
    )


def bytes_of(tensor: torch.Tensor) -> int:
    """Size of a tensor's data."""
    return tensor.numel() * tensor.element_size()


def fill_bytes(tensor: torch.Tensor, value: int) -> None:
    """Set every byte of a contiguous CPU tensor."""
    ctypes.memset(tensor.data_ptr(), value, bytes_of(tensor))
