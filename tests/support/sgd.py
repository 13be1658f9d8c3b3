"""Plain gradient descent on one batch, for modules that return their loss: what comparisons of a few steps run."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sgd_losses(module: nn.Module, steps: int, *batch: Tensor) -> list[float]:
    """The loss of each step, before it is taken; ``module(*batch)`` is the loss."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = module(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
