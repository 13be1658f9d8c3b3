"""A training by a plan file: the first capture of a step is that of the file, later ones are planned by its rules."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autoparallel.capture import NoEffects
from lightning_autoparallel.config import EngineConfig, MeshSpec, PlanSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.pipeline import ControlGroup, StepCall, StepEngine
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.plan import read_plan
from lightning_autoparallel.torch_compat.collectives import init_fake_world
from tests.unit.pipeline._steps import Net, Told, assert_equal, run_captured, run_plainly


class Varied(Net):
    """The last batch is smaller, one parameter trains later than the others, and a number changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.linear.bias.requires_grad_(False)

    def between(self, i: int) -> None:
        self.scale = 1.0 + (i > 2)
        self.linear.bias.requires_grad_(i > 1)

    def loss(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * self.scale

    def batch(self, i: int) -> Tensor:
        return super().batch(i)[: 2 if i == 5 else 4]


class Wider(Varied):
    """Another step than that of the file."""

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x).exp()


def trained(kind: type[Net], folder: Path | None, plan: str) -> tuple[list[Any], Told]:
    torch.manual_seed(0)
    told = Told()
    dump_dir = None if folder is None else str(folder)
    return run_captured(kind(), told, plan=PlanSpec.parse(plan), dump_dir=dump_dir), told


def test_the_file_of_a_training_is_that_of_its_first_capture_and_trains_once_more(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plainly = run_plainly(Varied())
    first, told = trained(Varied, tmp_path, "fsdp")
    assert told.captures == 4
    folder = tmp_path / "step"
    documents = [read_plan(path) for path in sorted(folder.glob("plan*.json"))]
    file = read_plan(folder / "plan.json")
    assert len({document["fingerprint"] for document in documents}) == told.captures
    assert json.dumps(file["nodes"]).count("[4, 3]") > 0, "rows of a full batch"
    again, told_again = trained(Varied, None, str(folder / "plan.json"))
    assert told_again.captures == told.captures
    assert_equal(first, plainly)
    assert_equal(again, plainly)


def test_a_first_capture_unlike_that_of_the_file_is_refused(tmp_path: Path) -> None:
    trained(Varied, tmp_path, "fsdp")
    with pytest.raises(ConfigError, match="made for another graph"):
        trained(Wider, None, str(tmp_path / "step" / "plan.json"))


def test_a_file_of_steps_whose_gradients_wait_has_them_reduced(tmp_path: Path) -> None:
    """Whether they wait is each training's own: with the file another one may step after every batch."""
    module = Net()
    init_fake_world(2)
    try:
        context = StageContext(
            mesh=build_mesh(MeshSpec.from_mapping({"dp_shard": 2}), "cpu"),
            config=EngineConfig(compile=False, plan=PlanSpec.parse("ddp"), dump_dir=str(tmp_path)),
            control=ControlGroup(timedelta(minutes=1)),
            warn=lambda message: None,
        )
        engine = StepEngine(module=module, context=context, device=torch.device("cpu"))
        engine.shard_parameters()
        engine.deferred.active = True
        assert len(engine.deferred.waiting()) == 2
        call = StepCall(
            name="step",
            run=lambda batch, watcher: module.loss(batch),
            effects=lambda watcher: NoEffects(),
            training=True,
        )
        report = engine.prepare(call, module.batch(0), {})
    finally:
        dist.destroy_process_group()
    gradients = [texts for texts in read_plan(tmp_path / "step" / "plan.json")["outputs"] if texts is not None]
    assert sum(report.launches().values()) == 1, "only the loss is reduced"
    assert ["P(sum)"] not in gradients and ["P(avg)"] not in gradients and len(gradients) >= 2
