"""Text and batches."""

from pathlib import Path

import numpy as np
import pytest

from spipe.errors import SpipeError
from spipe.runtime.data import Corpus, tokenize


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


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_an_epoch_is_every_sequence_once_in_an_order_of_its_own(count: int) -> None:
    """Sequences of 4 tokens, each starting at a multiple of 4 (shifted by what is left over)."""
    corpus = Corpus(np.arange(4 * count + 3, dtype=np.uint32), "numbers")
    assert corpus.num_sequences(4) == count
    orders = []
    for epoch in range(3):
        rows = corpus.batch(1, epoch * count, count, 4)
        shift = int(rows[:, 0].min())
        assert shift in (0, 1, 2)
        assert sorted(rows[:, 0] - shift) == [4 * n for n in range(count)]
        assert (np.diff(rows, axis=1) == 1).all()
        orders.append(list(rows[:, 0] - shift))
    if count > 7:
        assert orders[0] != orders[1] != orders[2]
        assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 0.3
        assert orders[0] != sorted(orders[0])


def test_a_batch_may_reach_over_epochs_and_positions_add_up() -> None:
    corpus = Corpus(np.arange(101, dtype=np.uint16), "numbers")
    whole = corpus.batch(0, 0, 60, 10)
    parts = [corpus.batch(0, first, 7, 10) for first in range(0, 56, 7)]
    assert np.array_equal(np.concatenate(parts), whole[:56])


@pytest.mark.parametrize(("suffix", "dtype"), [("bin", "<u2"), ("bin", "<u4"), ("npy", "<u2"), ("npy", "<u4")])
def test_token_files_are_mapped(tmp_path: Path, suffix: str, dtype: str) -> None:
    tokens = np.arange(1000, dtype=dtype)
    file = tmp_path / f"tokens.{suffix}"
    tokens.tofile(file) if suffix == "bin" else np.save(file, tokens)
    corpus = Corpus.load(file, int(dtype[-1]))
    assert isinstance(corpus.tokens, np.memmap)
    assert np.array_equal(corpus.tokens, tokens)
    corpus.check(16, 1000)
    with pytest.raises(SpipeError, match="token 999 at position 999, but the model's vocabulary has 999 entries"):
        corpus.check(16, 999)


def test_unusable_token_files_are_refused(tmp_path: Path) -> None:
    odd, empty, letters = tmp_path / "odd.bin", tmp_path / "empty.bin", tmp_path / "letters.npy"
    odd.write_bytes(b"12345")
    with pytest.raises(SpipeError, match=r"odd.bin: 5 bytes are not a whole number of tokens of 2 bytes"):
        Corpus.load(odd)
    empty.write_bytes(b"")
    with pytest.raises(SpipeError, match=r"empty.bin: the file is empty"):
        Corpus.load(empty)
    letters.write_text("letters")
    with pytest.raises(SpipeError, match=r"letters.npy: not a .npy file"):
        Corpus.load(letters)
    np.save(letters, np.zeros((2, 3), dtype=np.int64))
    with pytest.raises(SpipeError, match=r"an array of shape \(2, 3\) and type int64"):
        Corpus.load(letters)
    with pytest.raises(SpipeError, match="token_bytes = 3 should be 2 or 4"):
        Corpus.load(odd, 3)
    short = tmp_path / "short.bin"
    np.arange(5, dtype="<u2").tofile(short)
    with pytest.raises(SpipeError, match="the text has 5 tokens, but a sequence of 8 tokens and its labels need 9"):
        Corpus.load(short).check(8, 100)


def test_a_split_keeps_the_end_for_validation(tmp_path: Path) -> None:
    corpus = Corpus(np.arange(100, dtype=np.uint16), "numbers")
    train, validation = corpus.split(0.2, 8)
    assert (train.tokens[-1], validation.tokens[0], len(validation.tokens)) == (79, 80, 20)
    with pytest.raises(SpipeError, match=r"validation_fraction = 0.05 leaves 5 tokens for validation"):
        corpus.split(0.05, 8)
    with pytest.raises(SpipeError, match=r"validation_fraction = 1.0 should be above 0 and below 1"):
        corpus.split(1.0, 8)


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of words, with an end of text."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<|endoftext|>", "first", "second", "text"]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.transformers
def test_documents_are_packed_with_an_end_behind_each(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("first text")
    (tmp_path / "text" / "b").write_text("second text other")
    for width in (2, 4):
        tokenize(tmp_path / "text", tmp_path / "tokenizer", tmp_path / "out.bin", width)
        assert list(Corpus.load(tmp_path / "out.bin", width).tokens) == [2, 4, 1, 3, 4, 0, 1]
    (tmp_path / "none").mkdir()
    with pytest.raises(SpipeError, match="none: no readable, non-empty text file there"):
        tokenize(tmp_path / "none", tmp_path / "tokenizer", tmp_path / "out.bin", 2)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(SpipeError, match=r"tokenizer.json: not a tokenizer"):
        tokenize(tmp_path / "text", tmp_path / "tokenizer", tmp_path / "out.bin", 2)
    with pytest.raises(SpipeError, match=r"nowhere: there is no such file; give a tokenizer.json"):
        tokenize(tmp_path / "text", tmp_path / "nowhere", tmp_path / "out.bin", 2)
