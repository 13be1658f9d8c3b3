"""A training that plan ``auto`` has found a plan for goes on from its checkpoint by the same plan, without a search."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.jobs import Losses, make_strategy, make_trainer
from tests.distributed.test_checkpoint import ALL, HALF, Resumable
from tests.numerics.training import full
from tests.support.slow_memory import SLOW_MEMORY
from tests.support.worlds import Worlds

MESH = {"dp_shard": 2, "tp": 2}
SAME = "as it was found before the checkpoint"


class Deeper(Resumable):
    """Two products that tp can share out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))


class Scaled(Deeper):
    """The same parameters in another step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * 2


def fit(
    steps: int,
    save_to: str | None,
    resume_from: str | None,
    options: Mapping[str, Any] = MappingProxyType({}),
    kind: type[Deeper] = Deeper,
) -> dict[str, Any]:
    """Train to step `steps`, from a checkpoint or from the start."""
    torch.manual_seed(0)
    module = kind()
    if resume_from is not None:
        torch.nn.init.zeros_(module.net[0].weight)  # what is not restored will show
    strategy = make_strategy(MESH, {"plan": "auto", "hardware": dict(SLOW_MEMORY), "memory_budget_gib": 1, **options})
    losses = Losses()
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, 4, max_steps=steps, max_epochs=-1, callbacks=[losses])
        trainer.fit(module, ckpt_path=resume_from, weights_only=True)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
    (report,) = [report for name, report in strategy.reports.items() if name.startswith("training_step")]
    return {
        "losses": losses.values,
        "state": {name: full(tensor) for name, tensor in module.named_parameters()},
        "notes": report.notes,
        "placed": {name: one.placements for name, one in report.parameters.items()},
    }


@pytest.mark.parametrize("folders", [True, pytest.param(False, marks=pytest.mark.matrix)], ids=["folder", "file"])
def test_resuming_goes_on_by_the_plan_that_was_found(folders: bool, worlds: Worlds, tmp_path: Path) -> None:
    place, kind = str(tmp_path / "half.ckpt"), {"save_distributed_checkpoint": folders}
    whole = worlds(4).run(fit, ALL, None, None)
    first = worlds(4).run(fit, HALF, place, None, kind)
    second = worlds(4).run(fit, ALL, None, place, kind)
    for rank in range(4):
        assert first[rank]["losses"] + second[rank]["losses"] == whole[rank]["losses"]
        torch.testing.assert_close(second[rank]["state"], whole[rank]["state"], rtol=0, atol=0)
        assert second[rank]["placed"] == first[rank]["placed"]
        assert any(SAME in note for note in second[rank]["notes"])
        assert not any(SAME in note for note in first[rank]["notes"])


def test_what_changes_the_answer_has_it_looked_for_anew(worlds: Worlds, tmp_path: Path) -> None:
    place = str(tmp_path / "half.ckpt")
    worlds(4).run(fit, HALF, place, None)
    pinned = {"base": "auto", "rules": {"net.0.weight": {"tp": "R"}}}
    changed = [{"memory_budget_gib": 2}, {"plan": pinned}, {"hardware": {"base": "h100"}}]
    for options in changed:
        second = worlds(4).run(fit, ALL, None, place, options)
        assert not any(SAME in note for rank in second for note in rank["notes"]), options


def test_another_step_has_it_looked_for_anew(worlds: Worlds, tmp_path: Path) -> None:
    place = str(tmp_path / "half.ckpt")
    worlds(4).run(fit, HALF, place, None)
    second = worlds(4).run(fit, ALL, None, place, {}, Scaled)
    assert not any(SAME in note for rank in second for note in rank["notes"])


@pytest.mark.matrix
def test_in_forward_mode_too(worlds: Worlds, tmp_path: Path) -> None:
    """Where the first step after it is computed with parameters as they lay before any plan."""
    place, options = str(tmp_path / "half.ckpt"), {"capture": "forward"}
    whole = worlds(4).run(fit, ALL, None, None, options)
    first = worlds(4).run(fit, HALF, place, None, options)
    second = worlds(4).run(fit, ALL, None, place, options)
    for rank in range(4):
        torch.testing.assert_close(first[rank]["losses"] + second[rank]["losses"], whole[rank]["losses"])
        torch.testing.assert_close(second[rank]["state"], whole[rank]["state"], rtol=1e-5, atol=1e-6)
        assert second[rank]["placed"] == first[rank]["placed"] == whole[rank]["placed"]
        assert any(SAME in note for note in second[rank]["notes"]), second[rank]["notes"]
