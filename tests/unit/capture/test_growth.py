"""Growth of what is computed on rows: beside the value itself, on the rows and on the same rows twice."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autoparallel.capture.growth import Recording, growths
from lightning_autoparallel.capture.growth_rules import Growth
from lightning_autoparallel.torch_compat.tracing import fake_tracing

ROWS, CLASSES = 6, 4
Computed = Callable[[Tensor, Tensor], Tensor]

KNOWN: dict[str, tuple[float, Computed]] = {
    "mean": (0, lambda x, y: x.mean()),
    "sum": (1, lambda x, y: x.sum()),
    "sum of each row's features": (0, lambda x, y: x.sum(1)),
    "sum over rows": (1, lambda x, y: x.sum(0)),
    "sum by the number of rows": (0, lambda x, y: x.sum() / len(x)),
    "sum by a tensor of the number of rows": (0, lambda x, y: x.sum() / torch.tensor(len(x))),
    "sum by a constant": (1, lambda x, y: x.sum() / 4),
    "sum of rows folded by a constant": (1, lambda x, y: x.reshape(2, -1).sum(1).mean()),
    "hits": (1, lambda x, y: (x.argmax(1) == y).sum()),
    "share of hits": (0, lambda x, y: (x.argmax(1) == y).float().mean()),
    "hits by count": (0, lambda x, y: (x.argmax(1) == y).sum() / torch.ones_like(y).sum().clamp(min=1)),
    "hits in a zero": (1, lambda x, y: torch.zeros(()).add_((x.argmax(1) == y).sum())),
    "hits of one class in zeros": (1, lambda x, y: _in_zeros((y == 1).sum())),
    "cross entropy": (0, lambda x, y: F.cross_entropy(x, y)),
    "summed cross entropy": (1, lambda x, y: F.cross_entropy(x, y, reduction="sum")),
    "mean of each row's cross entropy": (0, lambda x, y: F.cross_entropy(x, y, reduction="none").mean()),
    "summed squares": (1, lambda x, y: F.mse_loss(x, torch.zeros_like(x), reduction="sum")),
    "mean square": (0, lambda x, y: F.mse_loss(x, torch.zeros_like(x))),
    "norm": (0.5, lambda x, y: x.square().sum().sqrt()),
    "covariance": (1, lambda x, y: x.T @ x),
    "covariance by rows": (0, lambda x, y: x.T @ x / len(x)),
    "pairs": (2, lambda x, y: (x @ x.T).sum()),
    "distances of pairs": (2, lambda x, y: torch.cdist(x, x).sum()),
    "counts by index_add": (1, lambda x, y: torch.zeros(CLASSES).index_add_(0, y, torch.ones(len(y)))),
    "counts by one hot": (1, lambda x, y: F.one_hot(y, CLASSES).sum(0)),
    "counts scattered into zeros": (1, lambda x, y: torch.zeros(2).scatter(0, torch.tensor([1]), x.sum().reshape(1))),
    "largest": (0, lambda x, y: x.amax(0)),
    "first row": (0, lambda x, y: x[0]),
    "hits in a number": (1, lambda x, y: torch.tensor(0.0).add_((x.argmax(1) == y).sum())),
    "number of rows": (1, lambda x, y: torch.tensor(len(x))),
    "both": (1, lambda x, y: torch.stack([x.sum(), x.abs().sum()])),
    "chosen": (1, lambda x, y: torch.where(x.sum() > 0, x.sum(), -x.sum())),
}
UNKNOWN: dict[str, Computed] = {
    "less than a mean, and a sum": lambda x, y: torch.minimum(x.sum(), x.mean()),
    "whether a sum is more than a mean": lambda x, y: (x.sum() > x.mean()).float(),
    "logarithm of a sum": lambda x, y: x.exp().sum().log(),
    "softmax over rows": lambda x, y: x.softmax(0).sum(),
    "product": lambda x, y: x.prod(),
    "no features": lambda x, y: torch.stack([(x[:, :0] @ x[:, :0].T).sum(), x.sum()]),
}


def _in_zeros(value: Tensor) -> Tensor:
    found = torch.zeros(3, dtype=value.dtype)
    found[1] += value
    return found


def grown(computed: Computed) -> tuple[float | str | None, Tensor, Tensor]:
    """Growth, and the value on rows and on twice the same rows."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,))
    xs, ys = torch.cat([x, x]), torch.cat([y, y])
    return _growth(computed, (x, y), (xs, ys)), computed(x, y), computed(xs, ys)


def _growth(computed: Computed, rows: tuple[Tensor, Tensor], twice_the_rows: tuple[Tensor, Tensor]) -> Growth:
    """As a capture finds it: on fake tensors, and while these are what torch makes."""
    with fake_tracing():
        fake, twice_fake = (tuple(map(torch.empty_like, tensors)) for tensors in (rows, twice_the_rows))
        with Recording() as once:
            value = computed(*fake)
        with Recording() as twice:
            again = computed(*twice_fake)
        return growths(once.calls, twice.calls, [(value, again)])[0]


@pytest.mark.parametrize("name", KNOWN)
def test_as_the_value_grows_where_every_row_is_there_twice(name: str):
    expected, computed = KNOWN[name]
    growth, value, again = grown(computed)
    assert growth == expected
    first = again if again.shape == value.shape else again[: len(value)]
    torch.testing.assert_close(first.double(), value.double() * math.pow(2, expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_claimed_where_the_calls_do_not_tell(name: str):
    assert grown(UNKNOWN[name])[0] is None


OF_PARTS: dict[str, tuple[float, Computed]] = {
    "a sum and a mean": (1, lambda x, y: x.sum() + x.mean()),
    "a sum and a number": (1, lambda x, y: x.sum() + 1.0),
    "a sum, a bit more, by a count": (0, lambda x, y: (x.sum() + 1e-8) / torch.tensor(len(x)).add(1e-8)),
    "a count that is one at least": (1, lambda x, y: torch.tensor(len(x)).maximum(torch.tensor(1))),
    "a mean beside a count": (1, lambda x, y: torch.stack([x.mean(), torch.tensor(float(len(x)))])),
    "a sum in one of several places": (1, lambda x, y: _in_ones(x.sum())),
}


def _in_ones(value: Tensor) -> Tensor:
    found = torch.ones(3, dtype=value.dtype)
    found[1] = value
    return found


@pytest.mark.parametrize("name", OF_PARTS)
def test_what_is_added_to_a_total_is_a_part_of_it(name: str):
    expected, computed = OF_PARTS[name]
    assert grown(computed)[0] == expected


def test_what_is_kept_grows_as_what_is_added():
    total = torch.ones(())

    def counted(rows: int) -> tuple[Recording, Tensor]:
        with Recording() as recording:
            found = total + torch.ones(rows).sum()
        return recording, found

    (once, value), (twice, again) = counted(3), counted(6)
    assert growths(once.calls, twice.calls, [(value, again), (total, total)]) == (1.0, 0.0)
    assert growths(once.calls, twice.calls, [(value, again), (total, total)], kept={id(total)}) == (1.0, "zero")


def test_asking_a_tensor_where_it_is_computes_nothing() -> None:
    """Of two runs of a deep module it is asked more often in one, though they compute the same."""
    with fake_tracing():
        x = torch.ones(ROWS, CLASSES)
        with Recording() as recording:
            assert torch.ops.prim.device.default(x).type == "cpu"
            x.sum()
    assert [str(call.operator) for call in recording.calls] == ["aten.sum.default"]
