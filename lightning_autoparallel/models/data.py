"""Text as sequences of bytes: a data module that needs no download and no tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import LightningDataModule
from lightning_autoparallel.models.text import read_text


class ByteSequences(Dataset[dict[str, Tensor]]):
    """Next-byte prediction over rows of text.

    Args:
        rows: bytes (N, T + 1), uint8.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`inputs` and `targets`, each (T,) int64, the targets one byte ahead."""
        row = self.rows[index].long()
        return {"inputs": row[:-1], "targets": row[1:]}


class TextDataModule(LightningDataModule):
    """Packs text into byte sequences (vocabulary 256) and splits them into train and validation.

    The text is cut into rows of `seq_len + 1` bytes that share no byte; a seeded permutation of the rows decides the
    split, so every rank draws the same one. Batches that are not full are dropped: a training step has static shapes.

    Args:
        path: a `.txt`, `.py` or `.jsonl` file (its lines' "text" fields), or a folder of such files; None takes the
            sources of Python's standard library.
        seq_len: T, bytes that one sequence predicts.
        batch_size: B, sequences per step and data-parallel rank.
        val_fraction: share of the sequences kept for validation.
        max_bytes: read at most this much text.
        num_workers: worker processes of each DataLoader.
        seed: decides the split and the order of training sequences.

    Raises:
        ConfigError: a number is out of range (at once); the path is missing or holds no usable text, or there is too
            little of it for one batch of each split (when the text is read, in `setup`).
    """

    def __init__(
        self,
        path: str | None = None,
        seq_len: int = 128,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        max_bytes: int = 4_000_000,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(seq_len, batch_size, max_bytes) < 1 or not 0.0 < val_fraction < 1.0:
            raise ConfigError(
                f"TextDataModule(seq_len={seq_len}, batch_size={batch_size}, max_bytes={max_bytes}, "
                f"val_fraction={val_fraction}): the first three must be at least 1, val_fraction between 0 and 1."
            )
        self.path = None if path is None else Path(path)
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes
        self.num_workers = num_workers
        self.seed = seed
        self._splits: tuple[ByteSequences, ByteSequences] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read and split the text, once; every stage uses the same split."""
        self._sequences()

    @property
    def train_sequences(self) -> ByteSequences:
        """The training split."""
        return self._sequences()[0]

    @property
    def val_sequences(self) -> ByteSequences:
        """The validation split."""
        return self._sequences()[1]

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Shuffled training batches: `inputs` and `targets`, each (B, T) int64."""
        return self._loader(self.train_sequences, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Validation batches, in a fixed order."""
        return self._loader(self.val_sequences, shuffle=False)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The validation batches: there is no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The validation batches: there is no third split."""
        return self.val_dataloader()

    def unigram_entropy(self) -> float:
        """Nats per byte of the validation text under its own byte frequencies, `-sum p ln p`.

        No model that ignores the context can have a lower validation loss.
        """
        counts = torch.bincount(self.val_sequences.rows.flatten().long(), minlength=256).double()
        return float(torch.special.entr(counts / counts.sum()).sum())

    def _sequences(self) -> tuple[ByteSequences, ByteSequences]:
        if self._splits is None:
            self._splits = self._split(read_text(self.path, self.max_bytes))
        return self._splits

    def _split(self, text: bytes) -> tuple[ByteSequences, ByteSequences]:
        width = self.seq_len + 1
        n_rows = len(text) // width
        n_val = round(n_rows * self.val_fraction)
        if min(n_val, n_rows - n_val) < self.batch_size:
            raise ConfigError(
                f"{self.path or 'The standard library'} gives {len(text)} bytes, that is {n_rows - n_val} training and "
                f"{n_val} validation sequences of {width} bytes; each split needs batch_size={self.batch_size}. "
                "Give more text, raise max_bytes, lower seq_len or batch_size, or change val_fraction."
            )
        rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: n_rows * width].unflatten(0, (n_rows, width))
        rows = rows[torch.randperm(n_rows, generator=torch.Generator().manual_seed(self.seed))]
        return ByteSequences(rows[n_val:]), ByteSequences(rows[:n_val])

    def _loader(self, sequences: ByteSequences, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            sequences,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=True,
            num_workers=self.num_workers,
            generator=torch.Generator().manual_seed(self.seed),
        )
