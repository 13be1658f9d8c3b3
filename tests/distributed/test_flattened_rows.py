"""Rows that a step flattens (tokens of all rows, pairs of views) are the rank's own wherever hooks see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.jobs import MESH, Validated, train
from tests.support.worlds import Worlds

TOKENS, ROWS = 3, 8 * 4  # each row's 6 numbers are 3 tokens of 2; an epoch's rows


class Flattened(Validated):
    """Kept and returned by the validation, and collected over ranks by hooks."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 5)
        self.seen: list[Tensor] = []
        self.counted = torch.zeros(5, dtype=torch.int64)
        self.told: dict[str, int] = {}

    def tokens(self, batch: Any) -> Tensor:
        return self.net(batch[0].unflatten(1, (TOKENS, 2)))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.tokens(batch).flatten(0, 1), batch[1].repeat_interleave(TOKENS))

    def rows_of(self, batch: Any) -> Tensor:
        return self.tokens(batch).argmax(-1).flatten()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.rows_of(batch)
        self.seen.append(rows)
        return {"rows": rows}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.counted += torch.bincount(outputs["rows"], minlength=5)

    def on_validation_epoch_end(self) -> None:
        mine, self.seen = torch.cat(self.seen), []
        joined, counted = self.all_gather(mine), self.all_gather(self.counted)
        self.told = {"own": mine.numel(), "joined": joined.numel(), "counted": int(counted.sum())}
        self.counted = torch.zeros_like(self.counted)

    def extra(self) -> Any:
        return self.told


class BothViews(Flattened):
    """Rows behind each other, those of one view and those of the other."""

    def rows_of(self, batch: Any) -> Tensor:
        tokens = self.tokens(batch).argmax(-1)
        return torch.cat([tokens[:, 0], tokens[:, 1], tokens[:, 2]])


class TimeFirst(Flattened):
    def rows_of(self, batch: Any) -> Tensor:
        return self.tokens(batch).argmax(-1).T.reshape(-1)


@pytest.mark.parametrize("kind", [Flattened, BothViews, TimeFirst], ids=lambda kind: kind.__name__)
def test_each_rank_has_its_own(kind: type[Flattened], worlds: Worlds) -> None:
    alone, ranks = train(kind, None), worlds(2).run(train, kind, MESH, 2)
    total = ROWS * TOKENS
    assert alone.extra == {"own": total, "joined": total, "counted": total}
    for rank in ranks:
        assert rank.extra == {"own": total // 2, "joined": total, "counted": total}
        torch.testing.assert_close(rank.parameters, alone.parameters)
    assert ranks[0].said("validation_step runs in forward mode") == 1
    assert not ranks[0].said("training_step runs in forward mode")
