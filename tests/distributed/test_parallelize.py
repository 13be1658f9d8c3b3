"""`parallelize` without a Trainer: the loss, the gradients and the updates of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_autoparallel import MeshSpec, parallelize
from lightning_autoparallel.errors import AutoParallelError
from tests.numerics.training import full
from tests.support.worlds import Worlds


class Loss(nn.Module):
    """Returns its loss, a mean over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3))

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


class Scores(Loss):
    """Returns scores by row, and their number on the side."""

    def forward(self, x, *, scale=1.0):
        scores = self.net(x) * scale
        return {"scores": scores, "mean": scores.mean()}


def data(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def made(kind: type[Loss]) -> Loss:
    torch.manual_seed(0)
    return kind()


def _mine(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.chunk(2)[torch.distributed.get_rank()] for tensor in tensors]


def train_loss(plan: str, mesh: Any, steps: int) -> tuple[list[float], list[torch.Tensor], float, str]:
    """Losses of some steps, parameters afterwards, the loss without gradients, and the mesh that was planned for."""
    module, batch = made(Loss), data()
    parallel = parallelize(module, batch, mesh, plan=plan, compile=False)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01, eps=1e-5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = parallel(*_mine(*batch))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    with torch.no_grad():
        last = parallel(*_mine(*batch))
    assert not last.requires_grad
    return losses, [full(parameter) for parameter in parallel.parameters()], float(last), str(parallel.report.mesh)


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, MeshSpec(axes=(("dp_replicate", 2), ("dp_shard", 1)))], ids=str)
def test_a_module_that_returns_its_loss(plan, mesh, worlds: Worlds) -> None:
    module, batch = made(Loss), data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-5)
    expected = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    for losses, parameters, last, _ in worlds(2).run(train_loss, plan, mesh, 5):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(parameters, [p.detach() for p in module.parameters()], rtol=0, atol=1e-5)
        assert last == pytest.approx(float(module(*batch)), rel=1e-5)


def external_loss(plan: str, rows_only: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """This rank's scores, and gradients of a sum over rows that is computed outside of the module."""
    x, y = data()
    parallel = parallelize(made(Scores), (x,), {"dp_shard": 2}, plan=plan, compile=False)
    mine, labels = _mine(x, y)
    result = parallel(mine)
    loss = F.cross_entropy(result["scores"], labels, reduction="sum")
    (loss if rows_only else loss + result["mean"]).backward()
    return result["scores"].detach(), [full(parameter.grad) for parameter in parallel.parameters()]


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
@pytest.mark.parametrize("rows_only", [True, False])
def test_a_loss_outside_of_the_module(plan, rows_only, worlds: Worlds) -> None:
    module, (x, y) = made(Scores), data()
    result = module(x)
    loss = F.cross_entropy(result["scores"], y, reduction="sum")
    (loss if rows_only else loss + result["mean"]).backward()
    for rank, (scores, gradients) in enumerate(worlds(2).run(external_loss, plan, rows_only)):
        torch.testing.assert_close(scores, result["scores"].detach().chunk(2)[rank])
        torch.testing.assert_close(gradients, [p.grad for p in module.parameters()], rtol=1e-5, atol=1e-6)


def keywords() -> torch.Tensor:
    """Scores with a keyword argument that the sample did not have."""
    parallel = parallelize(made(Scores), (data()[0],), {"dp_shard": 2}, compile=False)
    (mine,) = _mine(data()[0])
    return parallel(mine, scale=3.0)["scores"].detach()


def test_keyword_arguments(worlds: Worlds) -> None:
    expected = made(Scores)(data()[0], scale=3.0)["scores"].detach()
    torch.testing.assert_close(torch.cat(worlds(2).run(keywords)), expected)


def error_of(rows: int, mesh: dict[str, int]) -> str:
    try:
        parallelize(made(Loss), data(rows), mesh, compile=False)
    except AutoParallelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_does_not_fit(worlds: Worlds) -> None:
    for text in worlds(2).run(error_of, 7, {"dp_shard": 2}):
        assert text == ("ConfigError: the sample has 7 rows, which 2 batch shards cannot share: give a multiple of 2")
    for text in worlds(2).run(error_of, 8, {"dp_shard": 3}):
        assert text.startswith("ConfigError: mesh {dp_shard: 3} needs 3 processes")


def test_no_process_group() -> None:
    assert error_of(8, {"dp_shard": 1}) == (
        "ConfigError: parallelize needs a process group: call torch.distributed.init_process_group first"
    )
