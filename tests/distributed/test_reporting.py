"""What the strategy tells: the mesh while the model is built, progress and a summary on rank 0, graphs on disk."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_autoparallel import CollectiveMonitor, PeakMemoryMonitor, PlanReportCallback, plan
from tests.distributed.jobs import MESH, Net, Outcome, train
from tests.numerics.training import local_rows
from tests.support.worlds import Worlds

# what planning without a world must say too
PLANNED = ("plan", "mesh", "forward", "backward", "parameters_bytes", "gradients_bytes", "parameters")
STAGES = ("capture", "plan", "apply", "passes", "predict", "compile")
# before them, where the plan is found: it is captured for that, and parameters move
FOUND = {"fsdp": (), "auto": ("capture", "find", "move")}
# what depends on the order of calls, which gloo changes, and on the device
PREDICTED = ("time_us", "compute_us", "communication_us", "exposed_us", "peak_memory_bytes", "largest_at_peak")


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Reported(Net):
    """Notes the mesh in `configure_model`, and what all callbacks log."""

    dims: tuple[str, ...] = ()

    def configure_model(self):
        self.dims = (*self.trainer.strategy.device_mesh.mesh_dim_names, *map(str, self.device_mesh.shape))

    def callbacks(self) -> list[Callback]:
        return [CollectiveMonitor(), PeakMemoryMonitor(), PlanReportCallback()]

    def extra(self) -> Any:
        return self.dims


def run(directory: str, plan: str) -> tuple[Outcome, list[str]]:
    """One training with everything on, and what Lightning's logger was told."""
    told, logger = _Told(), logging.getLogger("lightning.pytorch")
    previous, level = logger.level, logging.DEBUG  # what takes less than 2 s is told to those who ask for details
    logger.addHandler(told)
    logger.setLevel(level)
    try:
        kind = type("InDirectory", (Reported,), {"strategy": {"plan": plan, "dump_dir": f"{directory}/dump"}})
        kind.trainer_options = {"default_root_dir": directory}
        return train(kind, MESH), told.lines
    finally:
        logger.setLevel(previous)
        logger.removeHandler(told)


def planned_alone(name: str) -> dict[str, Any]:
    """What `plan` says of the same training, in this process."""
    (batch, *_) = Reported().batches()
    report = json.loads(
        json.dumps(plan(Reported(), local_rows(batch, 0, 2), MESH, name, world_size=2, hardware="cpu").as_json())
    )
    for parameter in report["parameters"].values():
        assert parameter["optimizer_bytes"] == 0  # plain SGD keeps nothing
        parameter["optimizer_bytes"] = None  # as training reports it, which does not ask the optimizer
    return without_predictions(report)


def without_predictions(report: dict[str, Any]) -> dict[str, Any]:
    for graph in ("forward", "backward"):
        for figure in PREDICTED:
            assert report[graph].pop(figure)
    return {key: report[key] for key in PLANNED}


class TwoVariants(Net):
    """Every other step launches more: it has a norm over a sharded weight in its loss."""

    def callbacks(self) -> list[Callback]:
        self.monitor = CollectiveMonitor()
        return [self.monitor]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + self.net[0].weight.pow(2).mean() if batch_idx % 2 else loss


class Interfering(TwoVariants):
    """Communicates in the strategy's own group in the backward of one step."""

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        if self.global_step == 2:
            dist.all_reduce(torch.ones(1), group=self.trainer.strategy.device_mesh["dp_shard"].get_group())


@pytest.mark.parametrize("kind", [TwoVariants, Interfering])
def test_every_step_is_compared_with_the_variant_that_ran(kind: type[Net], worlds: Worlds):
    outcome, _ = worlds(2).run(train, kind, MESH)
    measured, predicted = (
        [row[f"autoparallel/{counts}/dp_shard"] for row in outcome.logged if f"autoparallel/{counts}/dp_shard" in row]
        for counts in ("launches", "predicted_launches")
    )
    assert len(predicted) == 4 and predicted[0] < predicted[1] and predicted[:2] == predicted[2:]
    extra = 1 if kind is Interfering else 0
    assert [ours - theirs for ours, theirs in zip(measured, predicted, strict=True)] == [0, 0, extra, 0]
    warned = [warning for warning in outcome.warnings if "final graphs" in warning]
    told = f"training step 2 did not launch the collectives counted in its final graphs (dp_shard: {measured[2]:.0f} "
    assert len(warned) == extra and all(warning.startswith(told) for warning in warned)


@pytest.mark.parametrize("name", FOUND)
def test_everything_is_reported(name: str, worlds: Worlds, tmp_path: Path):
    (first, told), (second, told_there) = worlds(2).run(run, str(tmp_path), name)
    assert first.extra == second.extra == ("dp_shard", "2")

    placing, *ours = [line for line in told if line.startswith("autoparallel: ")]
    assert placing.startswith("autoparallel: place parameters: ")
    stages = (*FOUND[name], *STAGES)
    assert [line.split()[1] for line in ours[: len(stages)]] == list(stages)
    assert ours[len(stages)].startswith(f"autoparallel: mesh {{dp_shard: 2}}, plan {name}, collectives per step: ")
    assert not any(line.startswith("autoparallel: ") for line in told_there)

    launches = {row["autoparallel/launches/total"] for row in first.logged if "autoparallel/launches/total" in row}
    (report_file,) = tmp_path.rglob("autoparallel/training_step.report.json")
    report = json.loads(report_file.read_text())
    tables = [report[graph]["collectives"] for graph in ("forward", "backward")]
    counted = sum(entry["count"] for table in tables for axes in table.values() for entry in axes.values())
    assert launches == {float(counted)}
    assert report["hardware"]["name"] == "cpu"
    assert planned_alone(name) == without_predictions(report)
    assert any("autoparallel/peak_memory_bytes" in row for row in first.logged)

    dumped = {
        path.relative_to(tmp_path / "dump").as_posix() for path in (tmp_path / "dump").rglob("*") if path.is_file()
    }
    assert {
        "training_step/captured.py.txt",
        "training_step/forward.py.txt",
        "training_step/backward.py.txt",
        "training_step/report.json",
        "training_step/merge_identical_collectives.before.py.txt",
        "training_step.backward/sink_waits.after.py.txt",
    } <= dumped
