"""What the strategy tells: the mesh while the model is built, progress and a summary on rank 0, graphs on disk."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_autoparallel import CollectiveMonitor, PeakMemoryMonitor, PlanReportCallback, plan
from tests.distributed.jobs import MESH, Net, Outcome, train
from tests.numerics.training import local_rows
from tests.worlds import Worlds

# what planning without a world must say too
PLANNED = ("plan", "mesh", "forward", "backward", "parameters_bytes", "gradients_bytes", "parameters")
STAGES = ("capture", "plan", "apply", "passes", "predict", "compile")
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


def run(directory: str) -> tuple[Outcome, list[str]]:
    """One training with everything on, and what Lightning's logger was told."""
    told, logger = _Told(), logging.getLogger("lightning.pytorch")
    previous, level = logger.level, logging.INFO
    logger.addHandler(told)
    logger.setLevel(level)
    try:
        kind = type("InDirectory", (Reported,), {"strategy": {"dump_dir": f"{directory}/dump"}})
        kind.trainer_options = {"default_root_dir": directory}
        return train(kind, MESH), told.lines
    finally:
        logger.setLevel(previous)
        logger.removeHandler(told)


def planned_alone() -> dict[str, Any]:
    """What `plan` says of the same training, in this process."""
    (batch, *_) = Reported().batches()
    report = json.loads(json.dumps(plan(Reported(), local_rows(batch, 0, 2), MESH, world_size=2).as_json()))
    for parameter in report["parameters"].values():
        assert parameter["optimizer_bytes"] == 0  # plain SGD keeps nothing
        parameter["optimizer_bytes"] = None  # as training reports it, which does not ask the optimizer
    return without_predictions(report)


def without_predictions(report: dict[str, Any]) -> dict[str, Any]:
    for graph in ("forward", "backward"):
        for figure in PREDICTED:
            assert report[graph].pop(figure)
    return {key: report[key] for key in PLANNED}


def test_everything_is_reported(worlds: Worlds, tmp_path: Path):
    (first, told), (second, told_there) = worlds(2).run(run, str(tmp_path))
    assert first.extra == second.extra == ("dp_shard", "2")

    ours = [line for line in told if line.startswith("autoparallel: ")]
    assert [line.split()[1] for line in ours[: len(STAGES)]] == list(STAGES)
    assert ours[len(STAGES)].startswith("autoparallel: mesh {dp_shard: 2}, plan fsdp, collectives per step: ")
    assert not any(line.startswith("autoparallel: ") for line in told_there)

    launches = {row["autoparallel/launches/total"] for row in first.logged if "autoparallel/launches/total" in row}
    (report_file,) = tmp_path.rglob("autoparallel/training_step.report.json")
    report = json.loads(report_file.read_text())
    tables = [report[graph]["collectives"] for graph in ("forward", "backward")]
    counted = sum(entry["count"] for table in tables for axes in table.values() for entry in axes.values())
    assert launches == {float(counted)}
    assert report["hardware"]["name"] == "cpu"
    assert planned_alone() == without_predictions(report)
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
