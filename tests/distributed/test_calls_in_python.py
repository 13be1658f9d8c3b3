"""What a step's Python may do around calls that are captured: one process, as without us."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.distributed.jobs import Net, train
from tests.support.worlds import Worlds

ALONE = {"dp_shard": 1}


class Forward(Net):
    strategy: ClassVar = {"capture": "forward", "plan": "ddp"}


class Encoder(nn.Module):
    """Keeps what it computes on the way in what it is given, as the skips of a U-Net are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x, kept: Any):
        found = self.first(x)
        if isinstance(kept, dict):
            kept["found"] = found
        elif isinstance(kept, list):
            kept.append(found)
        else:
            kept.found = found
        return self.second(found.relu())


class Kept:
    found: Any = None


class PutsIntoArguments(Forward):
    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder()

    def training_step(self, batch, batch_idx):
        x, y = batch
        skips: list[Any] = []
        table: dict[str, Any] = {}
        holder = Kept()
        loss = sum(F.cross_entropy(self.net(x, kept), y) for kept in (skips, table, holder))
        return loss + sum(found.square().mean() for found in (*skips, *table.values(), holder.found))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mask", None)

    def forward(self, x):
        found = self.layer(x)
        return found if self.mask is None else found * self.mask


class MasksLater(Forward):
    """A buffer that is a tensor at some steps and at others is not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Masked()

    def training_step(self, batch, batch_idx):
        self.net.mask = torch.tensor([1.0, 0.0, 2.0]) if batch_idx in (1, 3) else None
        return self.loss(batch)


class Viewed(nn.Module):
    """Ends in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x).unflatten(-1, (2, 3))


class ChangesViews(Forward):
    def __init__(self) -> None:
        super().__init__()
        self.net = Viewed()

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        scores /= 2
        scores[:, 0] *= 3
        return F.cross_entropy(scores.sum(1), y)


class Remembers(nn.Module):
    """Returns its memory, which the step fills, beside what it computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("memory", torch.zeros(8, 3))

    def forward(self, x):
        return self.layer(x) + self.memory, self.memory


class FillsAMemory(Forward):
    def __init__(self) -> None:
        super().__init__()
        self.net = Remembers()

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores, memory = self.net(x)
        memory.copy_(scores.detach())
        return F.cross_entropy(scores, y)


class Attends(nn.Module):
    """Asks whether it is given one tensor twice, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, query, key):
        return self.layer(query) if query is key else self.layer(query) + 2 * self.layer(key)


class GivesOneTwice(Forward):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.Linear(6, 6), Attends()

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.first(x)
        return F.cross_entropy(self.net(x, x) + self.net(x, x.tanh()), y)


class BatchOfOneTwice(Net):
    """The batch holds one tensor at two places, every other time."""

    def batches(self):
        return [(x, x if i % 2 else x + 1, y) for i, (x, y) in enumerate(super().batches())]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, again, y = batch
        return (x, x, y) if torch.equal(x, again) else batch

    def training_step(self, batch, batch_idx):
        x, again, y = batch
        return self.loss((x if x is again else 3 * x, y))


class ChangesOneOfTwo(Net):
    """The usual inputs and targets of a language model: two views of one tensor, one of which is changed."""

    def batches(self):
        return [(wide[:, :-1], wide[:, 1:], y) for wide, y in self.wide()]

    def wide(self):
        return [(torch.cat([x, x[:, :1]], 1), y) for x, y in super().batches()]

    def training_step(self, batch, batch_idx):
        x, shifted, y = batch
        shifted[:, :2] = 0.5
        return self.loss((x, y)) + shifted.mean()


@pytest.mark.parametrize(
    "kind", [FillsAMemory, GivesOneTwice, BatchOfOneTwice, ChangesOneOfTwo, PutsIntoArguments, MasksLater, ChangesViews]
)
def test_as_without_us(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None)
    (outcome,) = worlds(1).run(train, kind, ALONE, 1)
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(outcome.parameters[name], value, rtol=1e-4, atol=1e-6, msg=name)
