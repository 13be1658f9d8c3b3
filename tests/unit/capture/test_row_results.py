"""Which dim of a result is the batch follows from the step, not from a length that happens to be the batch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.errors import CaptureError
from tests.unit._graphs import captured

ROWS, SHARDS = 4, 2  # of one rank
GLOBAL = ROWS * SHARDS
X = torch.randn(ROWS, 3)


class Classes(nn.Module):
    """As many classes as the global batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, GLOBAL)

    def forward(self, x: Tensor) -> list[Tensor]:
        scores = self.linear(x)
        per_class, rows = scores.sum(0), scores.flip(0).amax(1)
        flat = scores.unsqueeze(1).expand(-1, 2, -1).reshape(-1, GLOBAL)
        return [scores, scores.t(), per_class, self.linear.bias * 2, rows, flat, scores.sum()]


def dims(module: nn.Module, step=None, **options) -> list[int | None]:
    graph = captured(module, X, step, shards=SHARDS, training=False, **options)
    return [item.batch_dim for item in graph.outputs if item.kind in ("output", "log")]


def test_rows_columns_and_what_is_neither():
    assert dims(Classes()) == [0, 1, None, None, 0, None, None]


def test_a_batch_that_is_not_divided_needs_no_answer():
    graph = captured(Classes(), X, training=False)
    assert {item.batch_dim for item in graph.outputs} == {None}


def test_a_step_for_one_number_of_rows_only():
    module = Classes()
    with pytest.raises(CaptureError, match=rf"result 0 of step has shape \[{GLOBAL}, 3\].*take sizes from the batch"):
        dims(module, lambda x: x.view(GLOBAL, 3) * 2)
    assert dims(module, lambda x: x.view(GLOBAL, 3).sum()) == [None]
