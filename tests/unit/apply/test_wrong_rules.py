"""Operators whose rules in torch are wrong: as one device, whatever follows them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.unit.apply.test_lower import check_together

Step = Callable[[nn.Module, Tensor], Tensor]
STEPS: dict[str, Step] = {
    "a flag as a number": lambda m, x: m.wide(x).square().mean() + 0.1 * (x > -5).any().float(),
    "a flag beside a partial sum": lambda m, x: (
        m.wide(x).square().sum(0) + (x > -5).any().float() * m.wide.bias
    ).sum(),
    "flags that are counted": lambda m, x: m.one(x).mean() + (x > 0.5).any(0).repeat(8).sum(),
    "the share of what is used": lambda m, x: m.one(x).mean() + (m.wide(x) > -50).any(0).float().mean(),
    "whether a sum is anything": lambda m, x: m.one(x).mean() + (x - x.flip(0)).sum(0).any(0).float(),
    "all along rows": lambda m, x: m.one(x).mean() + (x > 0).all(0, keepdim=True).float().sum() + (x < 9).all(),
    "the last dim's sum of exponents": lambda m, x: m.one(x).squeeze(-1).logcumsumexp(-1).sum(),
    "a product along rows": lambda m, x: m.wide(x).sigmoid().cumprod(-2).sum(),
    "a product along rows that are last": lambda m, x: m.wide(x).sigmoid().t().cumprod(-1).sum(),
    "a product along features": lambda m, x: m.wide(x).sigmoid().cumprod(1).sum(),
    "the bits of a sum": lambda m, x: m.one(x).mean() + (x.round().sum(0).view(torch.int32) % 1024).float().mean(),
    "a sum of what is a number": lambda m, x: m.one(x).mean() + torch.where(x > 1, torch.nan, x).sum(0).nansum(),
}


class Model(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.wide, self.one, self.step = nn.Linear(6, 64), nn.Linear(6, 1), step

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.step(self, x)}


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", STEPS)
def test_as_one_device(fake_mesh, name: str, plan: str):
    torch.manual_seed(0)
    check_together(fake_mesh, Model(STEPS[name]), torch.randn(8, 6), plan, size=2)
