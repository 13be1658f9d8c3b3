"""Batches that are objects train as on one device; batches that cannot be divided into rows are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds


class Notes:
    """Of a batch, without tensors."""

    def __init__(self, text: str) -> None:
        self.text = text


class Sample:
    """Of a data set's own class: Lightning moves it by its ``to``."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.parts = x, {"y": y}
        self.notes, self.path = Notes("unread"), Path("somewhere")

    def to(self, *args: Any, **kwargs: Any) -> Sample:
        return Sample(self.x.to(*args, **kwargs), self.parts["y"].to(*args, **kwargs))


class OfObjects(Net):
    def batches(self):
        return [Sample(x, y) for x, y in super().batches()]

    def loss(self, batch):
        return super().loss((batch.x, batch.parts["y"]))


class ReadsNotes(OfObjects):
    strategy: ClassVar = {"capture": "step"}

    def loss(self, batch):
        return super().loss(batch) * len(batch.notes.text)


class Packed(Net):
    strategy: ClassVar = {"capture": "step"}

    def batches(self):
        return [(pack_sequence(list(x)), y) for x, y in super().batches()]

    def loader(self, rank, shards):
        return DataLoader(self.batches(), batch_size=None)

    def loss(self, batch):
        return batch[0].data.sum() * self.net[0].bias.sum()


class TimeFirst(Net):
    strategy: ClassVar = {"capture": "step"}

    def loader(self, rank, shards):
        def collate(items):
            return torch.stack([x for x, _ in items], 1), torch.stack([y for _, y in items])

        rows = [row for batch in self.batches() for row in zip(*batch, strict=True)]
        return DataLoader([(x.expand(5, 6), y) for x, y in rows], batch_size=8 // shards, collate_fn=collate)

    def loss(self, batch):
        return super().loss((batch[0][-1], batch[1]))


def test_objects_train(worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, OfObjects, MESH), train(OfObjects, None))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReadsNotes, "reads batch leaf 'notes', a Notes: the step would keep the first batch's"),
        (Packed, "the batch of training_step holds a PackedSequence"),
        (TimeFirst, "batch leaf '0' has shape [5, 4, 6], but its DataLoader gives batches of 4 rows: its dim 1 is"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_has_no_rows_is_refused(kind, message, worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, kind):
        assert message in text
