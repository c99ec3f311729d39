"""GPU memory that other processes of this host write into, and counters that streams wait for, by the CUDA driver.

An allocation has a handle of 64 bytes that another process opens: as an address of its own GPU's address space, whether
the two use the same GPU or two with peer access. Copies run on copy engines and need no kernel on either side. The
driver's functions are called directly because PyTorch's way to share a tensor makes a context on the other GPU, which
takes half a gigabyte of its memory.
"""

import ctypes
from functools import cache
from typing import Any

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1
_AT_LEAST = 0  # how a stream compares, with wrap-around
_COUNTER_MASK = 2**32 - 1
_FAR = 2**29  # beyond all that a run has queued, and still ahead of it with wrap-around


class PeerMemoryError(Exception):
    """The driver cannot allocate, share or open memory; the message says what failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise PeerMemoryError(f"the CUDA driver cannot be loaded ({error})") from None
    pointer, size = ctypes.c_uint64, ctypes.c_size_t
    driver.cuMemAlloc_v2.argtypes = (ctypes.POINTER(pointer), size)
    driver.cuMemFree_v2.argtypes = (pointer,)
    driver.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), pointer)
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (pointer,)
    driver.cuMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_void_p)
    driver.cuMemHostGetDevicePointer_v2.argtypes = (ctypes.POINTER(pointer), ctypes.c_void_p, ctypes.c_uint)
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        getattr(driver, name).argtypes = (ctypes.c_void_p, pointer, ctypes.c_uint32, ctypes.c_uint)
    return driver


def _call(name: str, *arguments: Any) -> None:
    try:
        code = getattr(_driver(), name)(*arguments)
    except AttributeError:
        raise PeerMemoryError(f"the CUDA driver has no function {name}") from None
    if code:
        raise PeerMemoryError(f"{name} failed with CUDA error {code}")


class PeerMemory:
    """Memory on this process's current GPU (``allocate``) or on another process's (``open``).

    Attributes:
        pointer: address in this process.
        num_bytes: its size; 0 if opened.
    """

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.pointer, self.num_bytes = pointer, num_bytes

    @classmethod
    def allocate(cls, num_bytes: int) -> "PeerMemory":
        """Raises PeerMemoryError if the device has no room."""
        pointer = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(pointer), num_bytes)
        return cls(pointer.value, num_bytes)

    def handle(self) -> str:
        """Text by which a process of this host can open it; empty where that is not allowed."""
        handle = _Handle()
        try:
            _call("cuIpcGetMemHandle", ctypes.byref(handle), self.pointer)
        except PeerMemoryError:
            return ""
        return bytes(handle).hex()

    @classmethod
    def open(cls, handle: str) -> "PeerMemory":
        """The memory of another process. Raises PeerMemoryError without peer access, or without a handle."""
        if not handle:
            raise PeerMemoryError("the other process cannot share its GPU's memory")
        pointer = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(bytes.fromhex(handle))
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, _ENABLE_PEER_ACCESS)
        return cls(pointer.value, 0)

    def close(self) -> None:
        """Free what was allocated, unmap what was opened."""
        _call("cuMemFree_v2" if self.num_bytes else "cuIpcCloseMemHandle", self.pointer)


def copy_async(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Queue a copy between two addresses of GPU memory in a stream (its ``cuda_stream``)."""
    _call("cuMemcpyAsync", target, source, num_bytes, stream)


class Counter:
    """A 32-bit word in page-locked host memory that streams of several processes wait for and write, in their order.

    Counts may wrap around; what is waited for must be less than 2^30 away, and both ends must be less than 2^28 apart.
    """

    def __init__(self, host_pointer: int) -> None:
        pointer = ctypes.c_uint64()
        _call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), host_pointer, 0)
        self.pointer, self._word = pointer.value, ctypes.c_uint32.from_address(host_pointer)
        self._last = 0

    def write(self, value: int, stream: int) -> None:
        """Set it once all work queued in the stream so far is done."""
        self._last = value
        _call("cuStreamWriteValue32_v2", stream, self.pointer, value & _COUNTER_MASK, 0)

    def wait(self, value: int, stream: int) -> None:
        """What is queued in the stream after this starts once the counter is at least ``value``."""
        self._last = value
        _call("cuStreamWaitValue32_v2", stream, self.pointer, value & _COUNTER_MASK, _AT_LEAST)

    def release(self) -> None:
        """Let go every stream that waits, now.

        Writes that are queued take it back, so that it has to be done until the streams have run dry. All processes may
        do it at once, and again: they set it to nearly the same.
        """
        self._word.value = (self._last + _FAR) & _COUNTER_MASK
