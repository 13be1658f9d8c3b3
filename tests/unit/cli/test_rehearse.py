"""The subcommand `rehearse`: a real rank 0 of a world that is not there, beside what is predicted of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_autoparallel.cli.main import main
from lightning_autoparallel.cli.rehearse import rehearsing_options
from lightning_autoparallel.cli.rehearse.rehearsal_clock import RehearsalClock, Rehearsed
from lightning_autoparallel.cli.rehearse.rehearsal_table import predicted_peak_bytes
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.models import Llama3Module
from lightning_autoparallel.strategy.one_rank import alone
from lightning_autoparallel.strategy.rehearsal import RehearsalStrategy
from tests.numerics.models import make_batches, make_model
from tests.numerics.rules import RULES

RECIPE = {
    "seed_everything": 0,
    "strategy": {"mesh": {"dp_shard": -1}, "plan": "fsdp", "compile": False},
    "trainer": {"accelerator": "cpu", "max_steps": 2},
    "model": {"class_path": "lightning_autoparallel.models.Llama3Module", "init_args": {"size": "debug"}},
    "data": {
        "class_path": "lightning_autoparallel.models.TextDataModule",
        "init_args": {"seq_len": 64, "batch_size": 4, "max_bytes": 200_000},
    },
}

GIVEN = {"accelerator": "cpu", "plugins": None}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-autoparallel"])


def rehearse(folder, *arguments: str, **sections: Any) -> int:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **sections}))
    return main(["rehearse", "--config", "recipe.yaml", "--warmup", "1", "--steps", "2", *arguments])


def rehearsed(
    module: LightningModule, batches: list[Any], micro_batches: int = 1, **options: Any
) -> tuple[Rehearsed, PlanReport]:
    """What one rank was measured to take, and what was predicted of it."""
    strategy = RehearsalStrategy(**{"world_size": 8, "mesh": {"dp_shard": 8}, "plan": "fsdp", **options})
    given = rehearsing_options({**GIVEN, "max_steps": -1, "max_epochs": 1}, 1, 1)
    given["accumulate_grad_batches"] = micro_batches
    (clock,) = given["callbacks"]
    assert isinstance(clock, RehearsalClock)
    module.train_dataloader = lambda: DataLoader(batches, batch_size=None)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())
    with alone():
        Trainer(**given, accelerator="cpu", strategy=strategy).fit(module)
    return clock.result(), strategy.reports["training_step"]


def test_what_is_printed(tmp_path, capsys):
    assert rehearse(tmp_path, "--world-size", "64", "--output", "out/figures.json") == 0
    printed = capsys.readouterr().out
    assert "Rank 0 of 64, mesh {dp_shard: 64}, plan fsdp" in printed
    assert "predicted for cpu" in printed and "collectives move nothing" in printed
    figures = json.loads((tmp_path / "out/figures.json").read_text())
    measured, predicted = figures["measured"], figures["predicted"]
    assert measured["parameters_bytes"] == predicted["parameters_bytes"]
    assert measured["optimizer_bytes"] == pytest.approx(2 * measured["parameters_bytes"], rel=0.01)  # AdamW, and steps
    assert measured["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.05)
    assert len(measured["step_ms"]) == 2 and min(measured["step_ms"]) > 0
    assert not dist.is_initialized()


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", ["tied", "hf_gpt2"])
def test_peaks_are_as_predicted(name: str, plan: str):
    measured, report = rehearsed(make_model(name), make_batches(name, 5, 8), plan=plan, compile=False)
    assert measured.peak_bytes == pytest.approx(predicted_peak_bytes(measured, report), rel=0.05)
    batches = make_batches(name, 10, 8)
    adding, report = rehearsed(make_model(name), batches, 2, plan=plan, compile=False)
    assert adding.peak_bytes == pytest.approx(predicted_peak_bytes(adding, report), rel=0.05)
    assert adding.peak_bytes - measured.peak_bytes == pytest.approx(report.gradients_bytes, rel=0.1)


def test_an_epoch_of_one_batch_is_repeated_and_micro_batches_make_one_step(tmp_path):
    given = rehearsing_options({**GIVEN, "max_steps": -1, "max_epochs": 1}, 2, 3)
    assert given["max_epochs"] == 7 and given["max_steps"] == -1  # two more for memory
    trainer = {**RECIPE["trainer"], "accumulate_grad_batches": 2, "limit_train_batches": 4}
    assert rehearse(tmp_path, "--world-size", "8", "--output", "figures.json", trainer=trainer) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["measured"]["step_ms"]) == 2
    predicted, report = figures["predicted"], figures["report"]
    assert figures["measured"]["peak_bytes"] == pytest.approx(predicted["peak_bytes"], rel=0.05)
    halves = [report[half] for half in ("forward", "backward")]
    one = sum(half["time_us"] - half["exposed_us"] for half in halves) / 1e3
    assert predicted["computing_ms"] == pytest.approx(2 * one + (report["around_us"] or 0.0) / 1e3, rel=1e-6)


class KeepsCheckpoints(Llama3Module):
    """Brings what writes, skips one batch, and speaks to its logger."""

    def configure_callbacks(self) -> list[Callback]:
        return [ModelCheckpoint(dirpath="kept", save_last=True, every_n_train_steps=1), LearningRateMonitor()]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        assert self.logger is not None
        self.logger.log_metrics({"seen": 1.0})
        super().on_train_batch_start(batch, batch_idx)
        return -1 if batch_idx == 2 else None


def test_nothing_is_written_and_a_skipped_batch_is_no_step(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/last.ckpt").write_text("precious")
    model = {"class_path": f"{__name__}.KeepsCheckpoints", "init_args": {"size": "debug"}}
    assert rehearse(tmp_path, "--world-size", "8", "--output", "figures.json", model=model) == 0
    assert (tmp_path / "kept/last.ckpt").read_text() == "precious"
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["last.ckpt"]
    assert len(json.loads((tmp_path / "figures.json").read_text())["measured"]["step_ms"]) == 2


def test_batches_of_two_shapes_are_refused():
    module, batches = make_model("tied"), [*make_batches("tied", 1, 8), *make_batches("tied", 4, 4)]
    with pytest.raises(ConfigError, match="drop what is shorter"):
        rehearsed(module, batches, world_size=1, mesh={"dp_shard": 1})


def test_a_rank_of_tensor_parallelism_runs_as_its_job_would(tmp_path, capsys):
    """Products in parts are sent by permutes, which gloo is not asked for; GPUs' times are not this device's."""
    plan = {"base": "fsdp", "rules": RULES["llama3"]}
    strategy = {"mesh": {"dp_shard": 4, "tp": 2}, "plan": plan, "hardware": "h100", "decompose_matmuls": "always"}
    assert rehearse(tmp_path, "--world-size", "8", "--output", "figures.json", strategy=strategy) == 0
    printed = capsys.readouterr().out
    assert "predicted for h100" in printed and "a step on 8 ranks" not in printed
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["measured"]["peak_bytes"] == pytest.approx(figures["predicted"]["peak_bytes"], rel=0.15)
    assert "tp" in figures["report"]["forward"]["collectives"]["permute"]


class AsksItsRows(Llama3Module):
    """Its training step does what only runs in forward mode."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss.detach()) < 1e9 else loss * 2


@pytest.mark.parametrize(
    ("arguments", "sections", "said"),
    [
        (["--world-size", "6"], {"strategy": {"mesh": {"dp_shard": 4}}}, "needs 4 ranks, but world_size=6"),
        (["--world-size", "8", "--steps", "0"], {}, "must both be at least 1"),
        (["--world-size", "8", "--output", "."], {}, "is a folder"),
        (
            ["--world-size", "8"],
            {"model": {"class_path": f"{__name__}.AsksItsRows", "init_args": {"size": "debug"}}},
            "only steps that are captured whole are rehearsed",
        ),
        (["--world-size", "8"], {"strategy": {"capture": "forward"}}, "only steps that are captured whole"),
        (["--world-size", "8", "--trainer.accelerator", "gpu"], {}, "add --trainer.accelerator cpu"),
    ],
)
def test_what_is_refused(arguments, sections, said, tmp_path, capsys):
    assert rehearse(tmp_path, *arguments, **sections) == 1
    assert said in capsys.readouterr().err
