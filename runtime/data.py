"""Training tokens, and the batches of a run.

Tokens come from a token file (``.bin``, ``.npy``; mapped, never read as a whole), or from text, whose bytes are tokens
unless a tokenizer turns them into others. The text is cut into sequences side by side; every epoch goes once through
all of them, in an order of its own. Which sequences a microbatch sees is a function of the seed and of the number of
sequences before it, and of nothing else: every layout trains on the same tokens, and a position is one number.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spipe.errors import SpipeError
from spipe.plan import Plan

VOCABULARY = 256
TOKENS_FILE = "tokens.bin"
_CHUNK = 1 << 24
_ENOUGH = 64  # tokens of which every other one is not 0 by chance
Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Corpus:
    """A text: ``tokens`` of shape (num_tokens,), unsigned integers, and where it came from."""

    tokens: Tokens
    source: str

    @classmethod
    def load(cls, path: str | Path | None = None, token_bytes: int = 2) -> "Corpus":
        """The tokens of a file, the text files of a folder, or the default.

        A ``.bin`` file holds token numbers of ``token_bytes`` bytes (2 or 4, little-endian, no header), a ``.npy`` file
        a one-dimensional array of unsigned integers. Any other file counts as it is, text or not: a token is a byte. In
        a folder, at any depth, files that are not UTF-8 are left out, and the others follow one another in the order of
        their paths. The default is the text of Python's own documentation topics, which every CPython has. Raises
        SpipeError, naming the path, if there is nothing readable in it.
        """
        if path is None:
            return cls(np.frombuffer(_default_text().encode(), dtype=np.uint8), "pydoc_data.topics")
        path = Path(path)
        try:
            if path.exists() and not path.is_dir() and not path.is_file():  # a pipe would be read by one rank only
                raise SpipeError(f"{path}: neither a regular file nor a folder; give a file or a folder of text files")
            tokens = _folder_tokens(path) if path.is_dir() else _file_tokens(path, token_bytes)
        except OSError as error:
            raise SpipeError(
                f"{path}: cannot read the training text ({error.strerror}); give a text file or folder"
            ) from None
        if not len(tokens):
            what = "no readable, non-empty text file in this folder" if path.is_dir() else "the file is empty"
            raise SpipeError(f"{path}: {what}; give a text file or a folder of text files")
        return cls(tokens, str(path))

    def check(self, sequence: int, vocab_size: int) -> None:
        """Raises SpipeError unless sequences of ``sequence`` tokens for this vocabulary can be cut from the text."""
        what = "bytes" if self.tokens.dtype == np.uint8 else "tokens"
        if len(self.tokens) < sequence + 1:
            raise SpipeError(
                f"{self.source}: the text has {len(self.tokens)} {what}, but a sequence of {sequence} tokens and its "
                f"labels need {sequence + 1}; give more text or a plan with shorter sequences"
            )
        if vocab_size > np.iinfo(self.tokens.dtype).max:
            return
        for first in range(0, len(self.tokens), _CHUNK):
            part = self.tokens[first : first + _CHUNK]
            largest = int(part.max())
            if largest < vocab_size:
                continue
            if what == "bytes":
                raise SpipeError(
                    f"{self.source}: the text has a byte {largest}, but the model's vocabulary has {vocab_size} "
                    f"entries; bytes need vocab_size = {VOCABULARY} (or plain text below {vocab_size})"
                )
            raise SpipeError(
                f"{self.source}: token {largest} at position {first + int(part.argmax())}, but the model's vocabulary "
                f"has {vocab_size} entries (0 to {vocab_size - 1}); use the model's own tokenizer, and say if tokens "
                "have another width (token_bytes, 2 or 4)"
            )

    def check_width(self) -> None:
        """Raises SpipeError if tokens of 2 bytes look as if they were halves of tokens of 4 bytes."""
        part = self.tokens[: 1 << 16]
        if part.dtype == np.uint16 and len(part) >= _ENOUGH and part.any() and not part[1::2].any():
            raise SpipeError(
                f"{self.source}: read as tokens of 2 bytes, every other one is 0; say how wide they are "
                "(--token-bytes 4, or 2 if that is so)"
            )

    def split(self, validation_fraction: float, sequence: int) -> tuple["Corpus", "Corpus"]:
        """Text to train on and, from its end, text to validate on. Raises SpipeError if one is without a sequence."""
        if not 0 < validation_fraction < 1:
            raise SpipeError(f"validation_fraction = {validation_fraction} should be above 0 and below 1")
        cut = len(self.tokens) - round(len(self.tokens) * validation_fraction)
        parts = {"training": self.tokens[:cut], "validation": self.tokens[cut:]}
        for name, tokens in parts.items():
            if len(tokens) < sequence + 1:
                raise SpipeError(
                    f"{self.source}: validation_fraction = {validation_fraction} leaves {len(tokens)} tokens for "
                    f"{name}, a sequence of {sequence} and its labels need {sequence + 1}; give more text or another "
                    "fraction"
                )
        train, validation = (Corpus(tokens, f"{self.source} ({name})") for name, tokens in parts.items())
        return train, validation

    def num_sequences(self, sequence: int) -> int:
        """Sequences of an epoch; neighbours share one token (a label of one, an input of the next)."""
        return (len(self.tokens) - 1) // sequence

    def batch(self, seed: int, first: int, num_sequences: int, sequence: int) -> NDArray[np.int64]:
        """Sequences ``first`` to ``first + num_sequences`` of the run, counted through its epochs.

        Shape (num_sequences, sequence + 1): inputs are [:, :-1], labels [:, 1:].
        """
        count = self.num_sequences(sequence)
        starts = np.empty(num_sequences, dtype=np.int64)
        for chosen, key, places in _by_epoch(seed, first, num_sequences, count):
            offset = int(key) % (len(self.tokens) - count * sequence)
            starts[chosen] = places * sequence + offset
        batch: NDArray[np.int64] = self.tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)
        return batch


class Feed(Protocol):
    """The microbatches of a run: a function of step and number, the same on every rank."""

    def tensors(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one microbatch; steps count from the start of this run."""


@dataclass(frozen=True)
class TokenFeed:
    """Microbatches of tokens for a run that starts after ``position`` sequences."""

    plan: Plan
    corpus: Corpus
    position: int = 0

    def batch(self, step: int, microbatch: int) -> NDArray[np.int64]:
        """Tokens of one microbatch, shape (b, s + 1); steps count from the position."""
        plan = self.plan
        first = self.position + step * plan.global_batch + microbatch * plan.microbatch_size
        return self.corpus.batch(plan.seed, first, plan.microbatch_size, plan.sequence)

    def tensors(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels, (b, s) int64 each."""
        batch = torch.from_numpy(self.batch(step, microbatch))
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


@dataclass(frozen=True)
class ValidationFeed:
    """The first microbatches of the validation text, in one order for good."""

    plan: Plan
    corpus: Corpus

    def tensors(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels, (b, s) int64 each; whatever the step."""
        size = self.plan.microbatch_size
        batch = torch.from_numpy(self.corpus.batch(0, microbatch * size, size, self.plan.sequence))
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def shuffled(seed: int, first: int, num_wanted: int, count: int) -> NDArray[np.int64]:
    """Which of ``count`` items come as numbers ``first`` to ``first + num_wanted`` of a training, counted through its
    epochs; every epoch has all of them once, in an order of its own."""
    items = np.empty(num_wanted, dtype=np.int64)
    for chosen, _, places in _by_epoch(seed, first, num_wanted, count):
        items[chosen] = places
    return items


def _by_epoch(
    seed: int, first: int, num_wanted: int, count: int
) -> Iterator[tuple[NDArray[np.bool_], np.uint64, NDArray[np.int64]]]:
    """Per epoch: which of the wanted numbers are in it, its key, and the items that they are."""
    numbers = np.arange(first, first + num_wanted, dtype=np.uint64)
    epochs, places = numbers // np.uint64(count), numbers % np.uint64(count)
    for epoch in np.unique(epochs):
        key = _mixed(np.array([_mixed(np.array([seed % 2**64], np.uint64))[0] ^ epoch], np.uint64))[0]
        chosen = epochs == epoch
        yield chosen, key, _shuffled(places[chosen], count, key).astype(np.int64)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def _shuffled(places: NDArray[np.uint64], count: int, key: np.uint64) -> NDArray[np.uint64]:
    """Where a permutation of 0 .. ``count`` - 1 sends ``places``: a Feistel network, walked until it is in range.

    Nothing is stored, however long the text, and any position is reached at once.
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    result, outside = places.copy(), np.ones(len(places), dtype=bool)
    while outside.any():
        high, low = result[outside] >> shift, result[outside] & mask
        for turn in range(4):
            high, low = low, high ^ (_mixed(low ^ key ^ np.uint64(turn << 60)) & mask)
        result[outside] = (high << shift) | low
        outside = result >= count
    return result


def _default_text() -> str:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics))


def _file_tokens(path: Path, token_bytes: int) -> Tokens:
    if token_bytes not in (2, 4):
        raise SpipeError(f"token_bytes = {token_bytes} should be 2 or 4")
    size = path.stat().st_size
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise SpipeError(f"{path}: not a .npy file of numbers ({error})") from None
        if array.ndim != 1 or array.dtype.kind != "u":
            raise SpipeError(
                f"{path}: an array of shape {array.shape} and type {array.dtype}; token files are one-dimensional and "
                "of unsigned integers (uint8, uint16, uint32)"
            )
        tokens: Tokens = array
        return tokens
    width = token_bytes if path.suffix == ".bin" else 1
    if size % width:
        raise SpipeError(
            f"{path}: {size} bytes are not a whole number of tokens of {width} bytes; say their width (token_bytes, "
            "2 or 4), or make the file again"
        )
    if not size:
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=f"<u{width}" if width > 1 else np.uint8, mode="r")


def _folder_tokens(folder: Path) -> Tokens:
    return np.frombuffer(b"\n".join(text.encode() for text in _documents(folder)), dtype=np.uint8)


def _documents(path: Path | None) -> Iterator[str]:
    """The texts of a file or of a folder's files, in the order of their paths; None: the default text."""
    if path is None:
        yield _default_text()
        return
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        try:
            text = file.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            yield text


def load_tokenizer(path: Path) -> Any:
    """A Hugging Face tokenizer from a ``tokenizer.json`` or the folder that holds it. Raises SpipeError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SpipeError(
            f"{file}: reading a tokenizer needs the package tokenizers, of the extra train: pip install tokenizers"
        ) from None
    if not file.is_file():
        raise SpipeError(f"{file}: there is no such file; give a tokenizer.json or the folder that holds it")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise SpipeError(f"{file}: not a tokenizer ({error})") from None


def tokenize(path: Path | None, tokenizer_path: Path, output: Path, token_bytes: int) -> None:
    """Write the tokens of a text file or folder (None: the default text) as a ``.bin`` file.

    Documents (files) are packed one after the other, each followed by the tokenizer's end-of-text token if it has one
    of the usual names. Raises SpipeError if there is no text, or a token does not fit in ``token_bytes``.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    names = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
    ends = [tokenizer.token_to_id(name) for name in names]
    end = next((number for number in ends if number is not None), None)
    found = False
    with open(output, "wb") as file:
        for text in _documents(path):
            found = True
            ids = tokenizer.encode(text, add_special_tokens=False).ids + ([] if end is None else [end])
            if max(ids) >= 2 ** (8 * token_bytes):
                raise SpipeError(f"{tokenizer_path}: token {max(ids)} does not fit in {token_bytes} bytes")
            np.array(ids, dtype=f"<u{token_bytes}").tofile(file)
    if not found:
        raise SpipeError(f"{path}: no readable, non-empty text file there; give a text file or a folder of text files")
