"""Which whole numbers of a batch are positions among its rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_autoparallel.capture.growth import Call, Recording
from lightning_autoparallel.capture.picked_rows import check_picked_rows
from lightning_autoparallel.capture.picks_in_graph import may_pick_rows
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode

Step = Callable[[Tensor, Tensor], object]
TABLE = torch.randn(4, 3)


def _recorded(step: Step, x: Tensor, own: Tensor) -> list[Call]:
    with Recording() as recording:
        step(x, own)
    return recording.calls


def check(step: Step) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):  # as captures do
        x, own = torch.randn(4, 3), torch.arange(4)
        once, twice = _recorded(step, x, own), _recorded(step, torch.cat([x, x]), torch.cat([own, own]))
    check_picked_rows("training_step", "here.py:1", once, twice, {id(own): ("own", own)})


def may_pick(step: Callable[..., object], *state: Tensor) -> bool:
    """What a graph alone says; ``state`` are further arguments of the step."""
    graph = make_fx(step, tracing_mode="fake")(torch.randn(4, 3), torch.arange(4), *state).graph
    _, own, *others = graph.find_nodes(op="placeholder")
    return may_pick_rows(graph, [own], others)


POSITIONS: dict[str, Step] = {
    "index": lambda x, own: x[own],
    "of a part": lambda x, own: x[own[:2]],
    "converted": lambda x, own: x.index_select(0, own.to(torch.int32).long()),
    "shifted": lambda x, own: x[(own + 1).clamp(max=3)],
    "chosen of": lambda x, own: x[torch.where(x[:, 0] > 0, own, 0)],
    "masked": lambda x, own: x[own.masked_fill(x[:, 0] > 0, 1)],
    "sorted with rows": lambda x, own: x[own[x[:, 0].argsort()]],
    "gather": lambda x, own: x.T.gather(1, own[None].expand(3, -1)),
    "scatter": lambda x, own: torch.zeros(len(x)).scatter(0, own, x[:, 0]),
    "index_add": lambda x, own: torch.zeros_like(x).index_add(0, own // 2, x),
    "index_put": lambda x, own: torch.zeros_like(x).index_put((own,), x),
    "take": lambda x, own: x.take(own),
    "one hot": lambda x, own: torch.zeros(len(x), len(x)).scatter(1, own[:, None], 1.0),
    "cross entropy": lambda x, own: F.cross_entropy(x @ x.T, own),
    "nll of pictures": lambda x, own: F.nll_loss((x @ x.T)[None, :, :], own[None]),
    "embedding": lambda x, own: F.embedding(own, x),
    "flattened": lambda x, own: x.reshape(-1)[own * 3],
    "flattened, with columns": lambda x, own: x.reshape(-1)[own[:, None] * 3 + torch.arange(3)],
    "the next": lambda x, own: x[(own + 1) % len(x)],
    "of a pair": lambda x, own: x[own ^ 1],
    "from behind": lambda x, own: x[len(x) - 1 - own],
    "negative": lambda x, own: x[-own],
    "absolute": lambda x, own: x[own.abs()],
    "rounded": lambda x, own: x[own.float().round().long()],
    "the largest": lambda x, own: x[torch.stack([own, own - 1]).amax(0)],
    "values that are sorted": lambda x, own: x[own[:, None].expand(-1, 2).sort(1)[0][:, 0]],
    "inverse": lambda x, own: x[torch.zeros_like(own).scatter(0, x[:, 0].argsort(), own)],
    "take_along_dim": lambda x, own: torch.take_along_dim(x, own[:, None].expand_as(x), 0),
    "one_hot": lambda x, own: F.one_hot(own, len(x)).float() * (x @ x.T),
    "compared with numbers": lambda x, own: (own[:, None] == torch.arange(len(x))).float() * (x @ x.T),
    "compared with what was retrieved": lambda x, own: ((x @ x.T).argmax(1) == own).float().mean(),
    "compared with places": lambda x, own: (torch.sort(x, dim=0, stable=True)[1] == own[:, None]).float() * x,
    "margin": lambda x, own: F.multi_margin_loss(x @ x.T, own),
}
OTHERS: dict[str, Step] = {
    "of a table": lambda x, own: TABLE[own] + F.embedding(own, TABLE),
    "classes": lambda x, own: F.cross_entropy(torch.cat([x, x], 1), own),
    "columns": lambda x, own: x.gather(1, own[:, None].clamp(max=2)),
    "found among all": lambda x, own: x[own.argsort()] + x[torch.arange(len(own))],
    "numbered in the step": lambda x, own: x.reshape(-1)[torch.arange(len(x)) * 3 + own.clamp(max=2)],
    "counted": lambda x, own: x[own.cumsum(0) % 2],
    "compared": lambda x, own: (own > 1).float() * x[:, 0],
    "values": lambda x, own: own.float() * x[:, 0],
    "accuracy": lambda x, own: (x.argmax(1) == own).float().mean(),
    "one hot of classes": lambda x, own: F.one_hot(own, 5).float().mean(),
    "lengths": lambda x, own: (torch.arange(3) < own[:, None]).float() * x,
    "the last of each": lambda x, own: x[torch.arange(len(x)), own.clamp(max=2)],
    "sums of lengths": lambda x, own: x[own.cumsum(0) % 4],
}


@pytest.mark.parametrize("step", POSITIONS.values(), ids=POSITIONS.keys())
def test_positions_of_a_batch_among_its_rows_are_refused(step: Step) -> None:
    assert may_pick(step)
    with pytest.raises(CaptureError, match=r"here\.py:1: training_step takes whole numbers of the batch \('own'\)"):
        check(step)


@pytest.mark.parametrize("step", OTHERS.values(), ids=OTHERS.keys())
def test_other_whole_numbers_are_not(step: Step) -> None:
    check(step)


def _deep(x: Tensor) -> Tensor:
    for _ in range(1200):
        x = x + 1
    return x


OF_STATE: dict[str, Callable[..., object]] = {
    "table": lambda x, own, w: F.embedding(own, w) + w[own],
    "linear": lambda x, own, w: F.cross_entropy(F.linear(x, w), own),
    "linear with bias": lambda x, own, w: F.cross_entropy(F.linear(x, w, w[:, 0]).float() * 2, own),
    "of tokens": lambda x, own, w: F.cross_entropy(F.linear(x[None], w)[:, :3].reshape(-1, 5), own[:3]),
    "pictures": lambda x, own, w: F.cross_entropy(F.conv1d(x[:, :, None], w[:, :, None]), own[:, None]),
    "transposed": lambda x, own, w: F.cross_entropy(F.linear(x[:, None], w).transpose(1, 2), own[:, None]),
    "two heads": lambda x, own, w: F.cross_entropy(torch.cat([F.linear(x, w), F.linear(x, w)], -1), own),
    "accuracy": lambda x, own, w: (F.linear(x, w).argmax(-1) == own).float().mean(),
    "deep": lambda x, own, w: F.cross_entropy(_deep(F.linear(x, w)), own),
    "chosen": lambda x, own, w: torch.log_softmax(x @ w.T, -1).gather(1, own[:, None]),
}


@pytest.mark.parametrize("step", OF_STATE.values(), ids=OF_STATE.keys())
def test_dims_of_parameters_need_no_second_run(step: Callable[..., object]) -> None:
    weight = torch.randn(5, 3)
    assert not may_pick(step, weight)
    check(lambda x, own: step(x, own, weight))


def test_dims_of_rows_do() -> None:
    assert may_pick(lambda x, own, w: F.cross_entropy(F.linear(x, w) @ F.linear(x, w).T, own), torch.randn(5, 3))
    assert may_pick(lambda x, own, w: F.linear(x, w)[own], torch.randn(5, 3))
    assert may_pick(lambda x, own, w: (w @ x.T).gather(1, own[None]), torch.randn(5, 3))
