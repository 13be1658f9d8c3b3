"""The byte sequences: what is read, how it is split, and what is refused."""

import json
import math

import pytest
import torch

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.models import TextDataModule


@pytest.fixture
def numbers(tmp_path):
    """A text in which every line differs."""
    file = tmp_path / "numbers.txt"
    file.write_text("\n".join(f"{i:07d}" for i in range(1000)))
    return file


def _data(path, **options):
    return TextDataModule(str(path), **{"seq_len": 15, "batch_size": 4, "val_fraction": 0.2, **options})


def _rows(sequences):
    return {bytes(row.tolist()) for row in sequences.rows}


def test_items_predict_the_next_byte(numbers):
    data = _data(numbers)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()} == {
        "inputs": ((4, 15), torch.int64),
        "targets": ((4, 15), torch.int64),
    }
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


def test_splits_share_nothing_and_lose_nothing(numbers):
    data = _data(numbers)
    train, val = _rows(data.train_sequences), _rows(data.val_sequences)
    assert not train & val
    assert (len(train), len(val)) == (400, 100)
    text = numbers.read_bytes() + b"\n"
    assert train | val == {text[i : i + 16] for i in range(0, 8000, 16)}


def test_same_seed_gives_same_split_and_order(numbers):
    first, again, other = _data(numbers, seed=1), _data(numbers, seed=1), _data(numbers, seed=2)
    assert torch.equal(first.val_sequences.rows, again.val_sequences.rows)
    assert not torch.equal(first.val_sequences.rows, other.val_sequences.rows)
    for one, two in zip(first.train_dataloader(), again.train_dataloader(), strict=True):
        assert torch.equal(one["inputs"], two["inputs"])


def test_incomplete_batches_are_dropped(numbers):
    data = _data(numbers, batch_size=7)
    assert (len(data.train_dataloader()), len(data.val_dataloader())) == (400 // 7, 100 // 7)


def test_reads_folders_of_every_kind(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("A" * 16)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "B" * 8}) + "\n\n" + json.dumps({"text": "é" * 4}) + "\n")
    (tmp_path / "sub" / "c.py").write_text("C" * 16)
    (tmp_path / "d.bin").write_bytes(b"D" * 100)
    data = _data(tmp_path, seq_len=51, batch_size=1, val_fraction=0.5, max_bytes=1000)
    with pytest.raises(ConfigError, match="gives 52 bytes"):
        data.setup()
    data = _data(tmp_path, seq_len=25, batch_size=1, val_fraction=0.5)
    text = b"A" * 16 + b"\n" + b"B" * 8 + b"\n" + "é".encode() * 4 + b"\n" + b"C" * 16 + b"\n"
    assert _rows(data.train_sequences) | _rows(data.val_sequences) == {text[:26], text[26:]}


def test_default_text_is_the_standard_library():
    data = TextDataModule(max_bytes=50_000, val_fraction=0.1)
    assert b"import" in b"".join(_rows(data.train_sequences))
    assert 2.5 < data.unigram_entropy() < 4.0


def test_entropy_of_known_frequencies(tmp_path):
    file = tmp_path / "even.txt"
    # a row of 4 bytes holds each letter once, so any split has the same frequencies
    file.write_text("abcd" * 100)
    assert _data(file, seq_len=3).unigram_entropy() == pytest.approx(math.log(4))


def test_missing_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no text at .*absent"):
        _data(tmp_path / "absent").setup()


def test_other_kinds_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(ConfigError, match=r"a\.csv is of kind '\.csv'.*\.txt, \.py, \.jsonl"):
        _data(tmp_path / "a.csv").setup()
    with pytest.raises(ConfigError, match="holds no"):
        _data(tmp_path).setup()


@pytest.mark.parametrize("line", ['{"txt": "a"}', "{", '["text"]', '{"text": 3}'])
def test_json_lines_without_text_are_refused(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        _data(file).setup()


def test_too_little_text_is_refused(numbers):
    with pytest.raises(ConfigError, match=r"gives 100 bytes.*batch_size=4"):
        _data(numbers, max_bytes=100).setup()


@pytest.mark.parametrize("option", [{"seq_len": 0}, {"batch_size": 0}, {"max_bytes": 0}, {"val_fraction": 1.0}])
def test_numbers_out_of_range_are_refused_at_once(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        TextDataModule(**option)
