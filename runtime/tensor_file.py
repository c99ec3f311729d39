"""Safetensors files, written piece by piece in any order and read straight into place.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> type, shape, offsets), and the
data. All shapes are known before the first byte is, so every tensor has its place from the start.
"""

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from spipe.errors import SpipeError
from spipe.runtime.region import bytes_of

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its type and shape, and where its bytes are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class TensorWriter:
    """A new file; ``write`` puts a tensor in its place, ``close`` makes sure that all is on the disk.

    Args:
        path: the file.
        tensors: name -> (type, shape), in the order of the file.
        metadata: text by key, kept in the header.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
        offset = 0
        for name, (dtype, shape) in tensors.items():
            stop = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = header
        self._origin = 8 + len(text)
        self.num_bytes = self._origin + offset
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  (closed by close)
        self._put(len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a contiguous CPU tensor of the type and shape that were announced."""
        first, stop = self._header[name]["data_offsets"]
        assert bytes_of(tensor) == stop - first
        if stop > first:
            self._put(_bytes_of(tensor.detach()), self._origin + first)

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while len(view):
            written = os.pwrite(self._file.fileno(), view[:_PIECE_BYTES], offset)
            view, offset = view[written:], offset + written

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._file.closed:
            self.close()


class TensorFile:
    """A file to read from. Raises SpipeError, naming the file, if it is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, 100 << 20):
                    raise ValueError("its header is cut off")
                header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries: dict[str, Entry] = {}
            for name, fields in header.items():
                first, stop = fields["data_offsets"]
                if stop > size - 8 - length:
                    raise ValueError(f"it has {size} bytes, {name} ends at byte {stop + 8 + length}")
                if fields["dtype"] not in _DTYPES:
                    raise SpipeError(
                        f"{path}: {name} is of type {fields['dtype']}, supported are {', '.join(_DTYPES)}; convert it, "
                        "or leave it out if the model has no such parameter"
                    )
                entry = Entry(_DTYPES[fields["dtype"]], tuple(fields["shape"]), 8 + length + first)
                if entry.count * entry.dtype.itemsize != stop - first:
                    raise ValueError(f"{name}: {stop - first} bytes do not make the shape {entry.shape}")
                self.entries[name] = entry
        except OSError as error:
            raise SpipeError(f"{path}: cannot read this file ({error.strerror}); restore it") from None
        except SpipeError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpipeError(f"{path}: not a whole safetensors file ({error}); copy or download it again") from None

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor of the entry's shape, converting its type, in pieces."""
        entry, flat = self.entries[name], target.view(-1)
        assert len(flat) == entry.count
        same = entry.dtype == flat.dtype
        piece = max(1, _PIECE_BYTES // entry.dtype.itemsize)
        buffer = None if same else torch.empty(min(piece, entry.count), dtype=entry.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(entry.offset)
            for first in range(0, entry.count, piece):
                part = flat[first : first + piece]
                into = part if buffer is None else buffer[: len(part)]
                view = _bytes_of(into)
                while len(view):
                    number = file.readinto(view)
                    if not number:
                        raise SpipeError(f"{self.path}: the file ended within {name}; copy it again")
                    view = view[number:]
                if buffer is not None:
                    part.copy_(into)

    def view(self, name: str) -> torch.Tensor:
        """The tensor as it lies in the file, mapped and not read before it is used; writes do not reach the file."""
        entry = self.entries[name]
        if not hasattr(self, "_map"):
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if entry.offset % entry.dtype.itemsize:  # allowed by the format, not by torch
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            self.read_into(name, tensor)
            return tensor
        if not entry.count:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(self._map, dtype=entry.dtype, count=entry.count, offset=entry.offset).view(entry.shape)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file and make sure that it is on the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
