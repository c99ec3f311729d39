"""Training text as bytes, and the batches of a step.

A token is a byte. Which text a microbatch sees is a function of (seed, step, microbatch) and of nothing else, so every
layout trains on the same tokens.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spipe.errors import SpipeError

VOCABULARY = 256


@dataclass(frozen=True)
class Corpus:
    """A text: ``tokens`` of shape (num_tokens,), uint8, and where it came from."""

    tokens: NDArray[np.uint8]
    source: str

    @classmethod
    def load(cls, path: str | Path | None = None) -> "Corpus":
        """The bytes of a file, the text files of a folder, or the default.

        A file counts as it is, text or not: a token is a byte. In a folder, at any depth, files that are not UTF-8 are
        left out, and the others follow one another in the order of their paths. The default is the text of Python's
        own documentation topics, which every CPython has. Raises SpipeError, naming the path, if there is nothing
        readable in it.
        """
        if path is None:
            topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
            text = "\n".join(topics[name] for name in sorted(topics))
            return cls(np.frombuffer(text.encode(), dtype=np.uint8), "pydoc_data.topics")
        path = Path(path)
        try:
            if path.exists() and not path.is_dir() and not path.is_file():  # a pipe would be read by one rank only
                raise SpipeError(f"{path}: neither a regular file nor a folder; give a file or a folder of text files")
            content = _read_folder(path) if path.is_dir() else path.read_bytes()
        except OSError as error:
            raise SpipeError(
                f"{path}: cannot read the training text ({error.strerror}); give a text file or folder"
            ) from None
        if not content:
            what = "no readable, non-empty text file in this folder" if path.is_dir() else "the file is empty"
            raise SpipeError(f"{path}: {what}; give a text file or a folder of text files")
        return cls(np.frombuffer(content, dtype=np.uint8), str(path))

    def check(self, sequence: int, vocab_size: int) -> None:
        """Raises SpipeError unless sequences of ``sequence`` tokens for this vocabulary can be cut from the text."""
        if len(self.tokens) < sequence + 1:
            raise SpipeError(
                f"{self.source}: the text has {len(self.tokens)} bytes, but a sequence of {sequence} tokens and its "
                f"labels need {sequence + 1}; give more text or a plan with shorter sequences"
            )
        largest = int(self.tokens.max())
        if largest >= vocab_size:
            raise SpipeError(
                f"{self.source}: the text has a byte {largest}, but the model's vocabulary has {vocab_size} entries; "
                f"bytes need vocab_size = {VOCABULARY} (or plain text below {vocab_size})"
            )

    def batch(self, seed: int, step: int, microbatch: int, num_sequences: int, sequence: int) -> NDArray[np.int64]:
        """Tokens of one microbatch, shape (b, s + 1): inputs are [:, :-1], labels [:, 1:]."""
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step, microbatch])))
        starts = generator.integers(0, len(self.tokens) - sequence, num_sequences)
        batch: NDArray[np.int64] = self.tokens[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)
        return batch


def _read_folder(folder: Path) -> bytes:
    parts = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        try:
            content = file.read_bytes()
            content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if content:
            parts.append(content)
    return b"\n".join(parts)
