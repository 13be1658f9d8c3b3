"""What a step draws on a GPU is drawn at every step: nothing of the capture's is kept as a constant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.jobs import Net, make_strategy, make_trainer

pytestmark = pytest.mark.gpu

STEPS = 5


class Drawing(Net):
    """Noise that is made out of nothing but numbers, and a decision by a constant beside it."""

    steps = STEPS

    def __init__(self) -> None:
        super().__init__()
        self.noise: list[Tensor] = []

    def training_step(self, batch, batch_idx):
        noise = torch.randn(4, device=self.device)
        if torch.ones(3, device=self.device).sum() > 2:
            noise = noise + 1
        return {"loss": F.cross_entropy(self.net(batch[0]), batch[1]), "noise": noise}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.noise.append(outputs["noise"].cpu())


def drawn(compiled: bool, accelerator: str) -> tuple[list[Tensor], dict[str, str]]:
    """The noise of each step, and how steps ran."""
    torch.manual_seed(0)
    module, strategy = Drawing(), make_strategy({"dp_shard": 1}, {"compile": compiled})
    module.train_dataloader = lambda: module.loader(0, 1)
    make_trainer(strategy, 1, accelerator=accelerator).fit(module)
    return module.noise, strategy.modes


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_noise_is_new_at_every_step(compiled: bool, accelerator: str, gpu_world):
    noise, modes = gpu_world().run(drawn, compiled, accelerator)[0]
    assert len(noise) == STEPS
    assert len({tuple(values.tolist()) for values in noise}) == STEPS
    assert modes == {"training_step": "step"}
