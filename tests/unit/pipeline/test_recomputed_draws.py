"""What a forward has drawn is not drawn again, whatever draws it and however much is recomputed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.mesh import ParallelMesh

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal of numbers": lambda x: torch.normal(1.0, 0.5, size=x.shape),
    "normal of means": lambda x: torch.normal(x.detach(), 0.5),
    "normal of deviations": lambda x: torch.normal(1.0, x.detach().abs()),
    "randint_like": lambda x: torch.randint_like(x, 1, 1000),
    "random_": lambda x: torch.empty_like(x).random_(1, 1000),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.1),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "poisson": lambda x: torch.poisson(x.detach().abs() * 10),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 50.0), torch.full_like(x, 0.5)),
    "gamma": lambda x: torch._standard_gamma(x.detach().abs() + 1),
    "rrelu": lambda x: F.rrelu(-x.detach().abs(), 0.1, 0.9, training=True),
    "dropout": lambda x: F.dropout(torch.ones_like(x)),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)) + 0.1,
}


class Weighed(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.tensor(2.0)), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x) * self.weight * x


class Block(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weighed = Weighed(draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.weighed(x).sum()


class Net(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(draw) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(block(x) for block in self.blocks)


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("name", DRAWS)
def test_the_backward_reads_what_the_forward_has_drawn(name: str, policy: str, fake_mesh: Callable[..., ParallelMesh]):
    """The loss is linear in the weights: the sum of gradients times weights is the loss, of the same draws only."""
    torch.manual_seed(0)
    net, rows = Net(DRAWS[name]), torch.rand(4, 8) + 0.5
    made = parallelize(net, (rows,), fake_mesh(dp_shard=1), "ddp", activation_checkpointing=policy, compile=False)
    losses = []
    for _ in range(2):
        net.zero_grad()
        loss = made(rows)
        loss.backward()
        weighed = [float(p.grad.full_tensor() * p.detach().full_tensor()) for p in net.parameters()]
        assert sum(weighed) == pytest.approx(loss.item(), rel=1e-4)
        losses.append(loss.item())
    assert losses[0] != losses[1], "each step draws anew"
