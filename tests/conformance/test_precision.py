"""Every precision trains as on one device; what one rank finds infinite, all ranks skip."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from tests.distributed.jobs import MESH, Net, make_strategy, make_trainer, train
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

MESHES = {1: {"dp_shard": 1}, 2: MESH, 4: {"dp_replicate": 2, "dp_shard": 2}}
BAD_STEP, HUGE = 3, 1e20


class Double(Net):
    steps = 6
    trainer_options: ClassVar[Mapping[str, Any]] = {"precision": "64-true"}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Half(Double):
    """Gradients of float16 are summed in parts: the optimizer has no step that depends on a sign alone."""

    trainer_options: ClassVar[Mapping[str, Any]] = {"precision": "16-true"}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MixedClipped(Double):
    trainer_options: ClassVar[Mapping[str, Any]] = {"precision": "bf16-mixed", "gradient_clip_val": 0.05}
    fused = False

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-1, fused=self.fused)


class MixedClippedFused(MixedClipped):
    """Is clipped: nothing is scaled in bfloat16, though Lightning refuses it on one device."""

    fused = True


class Scaled(Net):
    """Float16 with a scaler that doubles its scale after two good steps; in one step one rank's element overflows."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}
    steps = 8
    fused = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 7))
        self.table = nn.Parameter(torch.zeros(4, 7))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        self.trainer_options = {"plugins": [MixedPrecision("16-mixed", "cpu", self.scaler)]}

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x).float() + self.table.sum(0), y)

    def batches(self) -> list[Any]:
        return [(*pair, torch.tensor([float(i == BAD_STEP)]).expand(8)) for i, pair in enumerate(super().batches())]

    def training_step(self, batch, batch_idx):
        x, y, bad = batch
        return self.loss((x, y)) + self.table[3, 0] * (bad.mean() * HUGE) * HUGE

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-1, fused=self.fused)

    def extra(self) -> Any:
        return self.scaler.state_dict()


class ScaledClipped(Scaled):
    """Clips what is unscaled."""

    def __init__(self) -> None:
        super().__init__()
        self.trainer_options["gradient_clip_val"] = 0.05


class ScaledFused(Scaled):
    """The optimizer unscales by itself."""

    fused = True


class ScaledReplicated(Scaled):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


class ScaledAndTold(Scaled):
    """Looks at the scale, which moves."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale())
        return loss


class ScaledAndSkipped(Scaled):
    """A step that gives no loss is no step of the scaler."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


TOLERANCE = {
    Double: 1e-12,
    Half: 1e-2,
    MixedClipped: 4e-3,
    MixedClippedFused: 4e-3,
    **dict.fromkeys((Scaled, ScaledClipped, ScaledFused, ScaledReplicated, ScaledAndTold, ScaledAndSkipped), 2e-3),
}
QUICK = {(Double, 2), (MixedClippedFused, 2), (ScaledClipped, 2)}
CASES = [(kind, world) for kind in TOLERANCE for world in MESHES]


@pytest.mark.parametrize(("kind", "world"), tiered(CASES, QUICK.__contains__))
def test_training_is_that_of_one_device(kind: type[Net], world: int, worlds: Worlds) -> None:
    expected, tolerance = train(kind if kind is not MixedClippedFused else MixedClipped, None), TOLERANCE[kind]
    outcomes = worlds(world).run(train, kind, MESHES[world], world)
    # a step that runs its own Python returns the loss of the rank's rows
    losses = torch.tensor([outcome.losses for outcome in outcomes], dtype=torch.float64).mean(0).tolist()
    torch.testing.assert_close(losses, expected.losses, rtol=tolerance, atol=0, equal_nan=True)
    for outcome in outcomes:
        assert [row.get("scale") for row in outcome.logged] == [row.get("scale") for row in expected.logged]
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=0, atol=tolerance)
        assert outcome.extra == expected.extra


def scale_after(path: str, mesh: Mapping[str, int] | None, resume: bool) -> dict[str, Any]:
    """The scaler's state after three steps, which are saved, or of a run that resumes there and takes none."""
    torch.manual_seed(0)
    module = Scaled()
    strategy = make_strategy(mesh, {}) if mesh else None
    trainer = make_trainer(strategy, 1, max_steps=3, max_epochs=-1, **module.trainer_options)
    trainer.fit(module, module.loader(0, 1), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return module.scaler.state_dict()


@pytest.mark.parametrize(("before", "after"), [(MESHES[1], None), (None, MESHES[1]), (MESHES[1], MESHES[1])])
def test_the_scale_is_saved_and_resumed(before, after, worlds: Worlds, tmp_path: Path) -> None:
    path, plain = str(tmp_path / "run.ckpt"), str(tmp_path / "plain.ckpt")
    scale_after(plain, None, False)
    expected = scale_after(plain, None, True)
    run = worlds(1).run
    _ = run(scale_after, path, before, False) if before else scale_after(path, None, False)
    found = run(scale_after, path, after, True)[0] if after else scale_after(path, None, True)
    assert found == expected != Scaled().scaler.state_dict()
