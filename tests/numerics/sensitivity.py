"""How far rounding alone carries a training: one device, no package of ours, weights changed in their last bit.

    python -m tests.numerics.sensitivity [MODEL]

Prints the relative difference of the losses of 20 steps in float32 with SGD(lr=1e-2) and AdamW(lr=1e-3, eps=1e-5).
"""

from __future__ import annotations

import sys

import torch

from tests.numerics.models import make_batches, make_model
from tests.numerics.training import optimizer_of


def losses(model: str, optimizer_name: str, relative_change: float) -> list[float]:
    """The losses of 20 steps after changing every weight by about `relative_change`."""
    module = make_model(model).float()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + relative_change * torch.randn(parameter.shape, generator=generator))
    optimizer = optimizer_of(module, optimizer_name)
    values = []
    for index, batch in enumerate(make_batches(model, 20, 12)):
        optimizer.zero_grad()
        loss = module.training_step(batch, index)
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    return values


def main(model: str) -> None:
    """Print both optimizers' relative differences."""
    for name in ("sgd", "adamw"):
        pairs = zip(losses(model, name, 0.0), losses(model, name, 6e-8), strict=True)
        print(name, " ".join(f"{abs(a - b) / abs(a):.0e}" for a, b in pairs))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "transformer")
