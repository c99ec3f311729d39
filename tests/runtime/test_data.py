"""Text and batches."""

from pathlib import Path

import numpy as np
import pytest

from spipe.errors import SpipeError
from spipe.runtime.data import Corpus


def test_a_batch_is_a_function_of_seed_and_position() -> None:
    corpus = Corpus.load()
    batch = corpus.batch(3, 5, 4, 16)
    assert batch.shape == (4, 17)
    assert batch.dtype == np.int64
    assert np.array_equal(batch, corpus.batch(3, 5, 4, 16))
    for other in ((4, 5), (3, 9)):
        assert not np.array_equal(batch, corpus.batch(*other, 4, 16))
    text = corpus.tokens.tobytes()
    assert all(row.astype(np.uint8).tobytes() in text for row in batch)


def test_the_shortest_text_has_one_sequence(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_bytes(b"abcdefghi")
    corpus = Corpus.load(file)
    corpus.check(8, 256)
    assert (corpus.batch(0, 0, 3, 8) == np.frombuffer(b"abcdefghi", np.uint8)).all()
    with pytest.raises(SpipeError, match="9 bytes, but a sequence of 9 tokens and its labels need 10"):
        corpus.check(9, 256)


def test_a_folder_is_its_text_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.txt").write_text("")
    assert Corpus.load(tmp_path).tokens.tobytes() == b"first\nsecond"


def test_unusable_texts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpipeError, match="missing: cannot read"):
        Corpus.load(tmp_path / "missing")
    (tmp_path / "empty").write_text("")
    with pytest.raises(SpipeError, match="empty: the file is empty"):
        Corpus.load(tmp_path / "empty")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpipeError, match="folder: no readable, non-empty text file"):
        Corpus.load(tmp_path / "folder")
    (tmp_path / "accents").write_text("naïve" * 10)
    with pytest.raises(SpipeError, match="accents: the text has a byte 195, but the model's vocabulary has 128"):
        Corpus.load(tmp_path / "accents").check(8, 128)
