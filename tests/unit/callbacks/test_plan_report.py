"""PlanReportCallback: which files it writes, when, and what they hold."""

import json
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_autoparallel.callbacks import PlanReportCallback
from lightning_autoparallel.errors import ConfigError


def _directory(trainer):
    return Path(trainer.log_dir) / "autoparallel"


def _files(trainer):
    return sorted(file.name for file in _directory(trainer).iterdir())


class _Watch(Callback):
    """Notes the files there are after the first step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.files = _files(trainer)


def test_each_captured_step_has_its_two_files(run):
    watch = _Watch()
    trainer = run(PlanReportCallback(), watch)
    training = ["training_step.report.json", "training_step.report.txt"]
    assert watch.files == training
    assert _files(trainer) == [*training, "validation_step.report.json", "validation_step.report.txt"]


def test_the_json_has_the_keys_of_the_plan_command(run):
    trainer = run(PlanReportCallback())
    report = json.loads((_directory(trainer) / "training_step.report.json").read_text())
    assert (report["graph"], report["plan"], report["mesh"]) == (
        "training_step",
        "hsdp",
        {"dp_replicate": 2, "dp_shard": 4},
    )
    assert report["forward"]["collectives"]["all_gather"]["dp_shard"] == {"count": 2, "bytes": 3072}
    assert report["backward"]["collectives"]["all_reduce"]["dp_replicate,dp_shard"] == {"count": 1, "bytes": 4}
    assert (report["forward"]["saved_bytes"], report["backward"]["saved_bytes"]) == (2048, 0)
    assert (report["parameters_bytes"], report["gradients_bytes"]) == (3 * 1024**2, 2 * 1024**2)
    assert report["optimizer_bytes"] is None
    assert report["passes"][0]["notes"] == ["3 merged"]
    assert report["passes"][0]["before"] == {"all_gather": {"dp_shard": {"count": 5, "bytes": 20}}}
    assert report["predicted_peak_bytes"] is None


def test_the_text_can_be_read(run, reporting):
    trainer = run(PlanReportCallback(), strategy=reporting(peak=2**30))
    text = (_directory(trainer) / "training_step.report.txt").read_text()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for expected in (
        "plan hsdp",
        "mesh dp_replicate=2, dp_shard=4",
        "parameters on one rank 3.0 MiB",
        "gradients on one rank 2.0 MiB",
        "saved for backward on one rank 2.0 KiB",
        "peak memory (predicted) 1.0 GiB",
        "time capture 0.50 s",
        "Collectives of one step on one rank, counted in the final graphs (predicted)",
        "Memory of one rank by kind of module, all modules of a kind together (predicted)",
        "backward all_reduce dp_replicate,dp_shard 1 4 B",
        "merge_identical_collectives training_step all_gather 5 -> 2 90 -> 87 5 -> 2 0.25 s",
        "merge_identical_collectives: 3 merged",
    ):
        assert expected in lines, text


def test_a_step_captured_anew_is_written_anew(run, reporting):
    strategy = reporting()
    trainer = run(PlanReportCallback(), strategy=strategy)
    file = _directory(trainer) / "training_step.report.json"
    file.unlink()
    callback = next(callback for callback in trainer.callbacks if isinstance(callback, PlanReportCallback))
    callback.on_validation_end(trainer, trainer.lightning_module)
    assert not file.exists()
    strategy.reports["training_step"] = strategy.reports["validation_step"]
    callback.on_train_end(trainer, trainer.lightning_module)
    assert json.loads(file.read_text())["graph"] == "validation_step"


def test_validation_alone_is_reported(run):
    trainer = run(PlanReportCallback(), fit=False)
    trainer.validate(BoringModel(), verbose=False)
    assert "validation_step.report.txt" in _files(trainer)


def test_other_ranks_write_nothing(run, reporting, monkeypatch):
    strategy, callback = reporting(), PlanReportCallback()
    trainer = run(callback, strategy=strategy, fit=False)
    strategy.reports["training_step"] = strategy._to_capture["training_step"]
    callback.setup(trainer, None, "fit")
    monkeypatch.setattr(type(strategy), "is_global_zero", False)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert not _directory(trainer).exists()


def test_another_strategy_is_refused(run):
    with pytest.raises(ConfigError, match=r"PlanReportCallback reads .* strategy is SingleDeviceStrategy; use"):
        run(PlanReportCallback(), strategy="auto")
