"""Which steps take rows apart by the order in which they were put into the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_autoparallel.capture.cut_rows import check_cut_rows, may_cut_rows
from lightning_autoparallel.capture.growth import Call, Recording
from lightning_autoparallel.errors import CaptureError

Step = Callable[[Tensor], object]
ROWS = 8


def _recorded(step: Step, x: Tensor) -> list[Call]:
    with Recording() as recording:
        step(x)
    return recording.calls


def check(step: Step, is_single: bool = False) -> None:
    x = torch.randn(ROWS, 3, 4)
    once, twice = _recorded(step, x), _recorded(step, torch.cat([x, x]))
    check_cut_rows("training_step", "here.py:1", once, twice, [x], ROWS, is_single)


def may_cut(step: Step, is_single: bool = False) -> bool:
    return may_cut_rows(make_fx(step, tracing_mode="fake")(torch.randn(ROWS, 3, 4)).graph, ROWS, is_single)


def _halves(x: Tensor) -> Tensor:
    one, other = x.chunk(2)
    return one - other


def _joined_halves(x: Tensor) -> Tensor:
    return _halves(torch.cat([x, x * 2]))


APART: dict[str, Step] = {
    "chunk": _halves,
    "slice": lambda x: x[: len(x) // 2].mean() + x[len(x) // 2 :].mean(),
    "the second half": lambda x: x[len(x) // 2 :].mean(),
    "split": lambda x: x.split([len(x) // 4, len(x) - len(x) // 4])[0],
    "computed with first": lambda x: _halves(torch.tanh(F.layer_norm(x, [4]))),
    "tokens of all rows": lambda x: _halves(x.flatten(0, 1)),
    "episodes": lambda x: x.view(2, -1, 3, 4).mean(1),
    "episodes, flattened": lambda x: x.reshape(2, -1),
    "unflatten": lambda x: x.unflatten(0, (4, -1)),
}
TOGETHER: dict[str, Step] = {
    "neighbours": lambda x: x.view(-1, 2, 3, 4).sum(1),
    "every second": lambda x: x[::2] + x[1::2],
    "the first": lambda x: x[:3].mean() + x[0].mean(),
    "all but the first": lambda x: x[1:] - x[:-1],
    "pieces of one size": lambda x: torch.stack([piece.mean() for piece in x[:4].split(2)]),
    "all": lambda x: x[: len(x)].mean() + x.split(len(x))[0].mean() + x.chunk(1)[0].mean(),
    "another dim": lambda x: x.chunk(2, -1)[0] + x[:, : x.shape[1] // 2].sum(),
    "joined here": _joined_halves,
    "heads": lambda x: x.view(len(x), 3, 2, 2).transpose(1, 2),
    "merged and back": lambda x: F.linear(x, torch.ones(5, 4)).view(len(x), -1),
    "a column": lambda x: x.mean((1, 2)).view(-1, 1).expand(-1, 2).reshape(1, -1),
}


@pytest.mark.parametrize("step", APART.values(), ids=APART.keys())
def test_rows_that_are_taken_apart_are_refused(step: Step) -> None:
    assert may_cut(step)
    with pytest.raises(CaptureError, match=r"here\.py:1: training_step takes the batch.s rows apart"):
        check(step)


@pytest.mark.parametrize("step", TOGETHER.values(), ids=TOGETHER.keys())
def test_rows_that_stay_together_are_not(step: Step) -> None:
    check(step)


@pytest.mark.parametrize("name", ["all", "another dim", "heads", "merged and back", "a column"])
def test_most_steps_need_no_second_run(name: str) -> None:
    assert not may_cut(TOGETHER[name])


SINGLE: dict[str, Step] = {
    "index": lambda x: x[0].mean(),
    "squeeze": lambda x: x.squeeze(0).softmax(0),
    "squeeze of all": lambda x: torch.tanh(x).squeeze(),
    "select": lambda x: x.relu().select(0, -1),
}


@pytest.mark.parametrize("step", SINGLE.values(), ids=SINGLE.keys())
def test_a_row_that_is_taken_out_of_a_batch_of_one_is_refused(step: Step) -> None:
    """Of several rows of a rank it is one like others."""
    assert may_cut(step, is_single=True) and not may_cut(step)
    check(step)
    with pytest.raises(CaptureError, match="takes the batch's rows apart"):
        check(step, is_single=True)


def test_other_dims_of_a_batch_of_one_may_go() -> None:
    def step(x: Tensor) -> Tensor:
        return x[:, 0].mean(-1) + x.mean((1, 2), keepdim=True).squeeze(-1).squeeze(1)

    assert not may_cut(step, is_single=True)
    check(step, is_single=True)
