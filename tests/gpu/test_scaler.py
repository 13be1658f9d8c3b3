"""Half precision with a scaler: what overflows is skipped, and what is not is one device's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.jobs import Net, make_strategy, make_trainer
from tests.numerics.training import full

pytestmark = pytest.mark.gpu

STEPS = 6


class Overflowing(Net):
    """The third batch is too large for half precision."""

    steps = STEPS

    def batches(self) -> list[Any]:
        return [(x * (1e6 if index == 2 else 1), y) for index, (x, y) in enumerate(super().batches())]


def scaled(ours: bool, compiled: bool, accelerator: str) -> dict[str, Any]:
    """Weights, the scale at the end, and whether each step moved the weights."""
    torch.manual_seed(0)
    module, moved = Overflowing(), []
    strategy = make_strategy({"dp_shard": 1}, {"compile": compiled}) if ours else None
    module.train_dataloader = lambda: module.loader(0, 1)
    last = [full(module.net[0].weight)]

    def note(*_: Any) -> None:
        moved.append(not torch.equal(full(module.net[0].weight), last[0]))
        last[0] = full(module.net[0].weight)

    module.on_train_batch_end = note
    trainer = make_trainer(strategy, 1, accelerator=accelerator, precision="16-mixed")
    trainer.fit(module)
    weights = {name: full(parameter) for name, parameter in module.named_parameters()}
    modes = strategy.modes if strategy is not None else {}
    scale = trainer.precision_plugin.scaler.get_scale()
    return {"weights": weights, "scale": scale, "moved": moved, "modes": modes}


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_an_overflow_is_skipped(compiled: bool, accelerator: str, gpu_world):
    if accelerator == "cpu":
        pytest.skip("Lightning scales on GPUs only")
    ours = gpu_world().run(scaled, True, compiled, accelerator)[0]
    theirs = gpu_world().run(scaled, False, False, accelerator)[0]
    assert ours["modes"] == {"training_step": "step"}
    assert ours["moved"] == theirs["moved"] == [index != 2 for index in range(STEPS)]
    assert ours["scale"] == theirs["scale"]
    torch.testing.assert_close(ours["weights"], theirs["weights"], rtol=0, atol=2e-3)
