"""Where long stages of a training and of planning are shown, and that standard output knows nothing of them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from rich.console import Console

from lightning_autoparallel.cli.main import main
from lightning_autoparallel.pipeline.progress import StageProgress
from lightning_autoparallel.strategy import shown_stages
from lightning_autoparallel.strategy.shown_stages import training_progress

RECIPE = {
    "strategy": {"mesh": {"dp_shard": -1}, "plan": "fsdp"},
    "model": {"class_path": "lightning_autoparallel.models.Llama3Module", "init_args": {"size": "debug"}},
    "data": {
        "class_path": "lightning_autoparallel.models.TextDataModule",
        "init_args": {"seq_len": 32, "batch_size": 2, "max_bytes": 100_000},
    },
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Slow(StageProgress):
    """Every look at its clock is 3 s after the one before, and it draws whenever a step begins."""

    def __init__(self, **how: Any) -> None:
        seconds = itertools.count(0.0, 3.0)
        quiet = {"clock": lambda: next(seconds), "ticker": lambda tick: contextlib.nullcontext()}
        super().__init__(**{**how, **quiet})

    def advance(self, step: str) -> None:
        super().advance(step)
        self.tick()


class Told(logging.Handler):
    """Keeps what Lightning's logger is told by this package, by level."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, list[str]] = {"INFO": [], "DEBUG": []}

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("autoparallel: "):
            self.lines[record.levelname].append(record.getMessage())


@pytest.fixture
def told() -> Iterator[dict[str, list[str]]]:
    handler, logger = Told(), logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal, and stages that take long; not a fixture, as pytest has its own streams then."""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(shown_stages, "StageProgress", Slow)
    return stream


def trainer(**options: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **options)


def draws(trained: Trainer) -> bool:
    """Whether a stage of a training draws anything on standard error."""
    progress = training_progress(lambda: trained)
    assert isinstance(progress, Slow)
    before = len(sys.stderr.getvalue())
    with progress.stage("plan training_step"):
        progress.advance("a step")
    return "plan training_step" in sys.stderr.getvalue()[before:]


def test_a_training_shows_stages_where_it_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, list[str]]
) -> None:
    use_terminal(monkeypatch)
    assert draws(trainer())
    assert told.pop("INFO") == ["autoparallel: plan training_step: 6.00 s"] and told["DEBUG"] == []
    told["INFO"] = []
    assert not draws(trainer(enable_progress_bar=False))
    assert told == {"INFO": [], "DEBUG": ["autoparallel: plan training_step: 6.00 s"]}


def test_only_rank_0_shows_stages(monkeypatch: pytest.MonkeyPatch, told: dict[str, list[str]]) -> None:
    use_terminal(monkeypatch)
    other = trainer()
    monkeypatch.setattr(type(other), "is_global_zero", property(lambda self: False))
    assert not draws(other)
    assert told["INFO"] == []


def test_beside_a_bar_that_is_not_richs_a_line_is_all(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, list[str]]
) -> None:
    use_terminal(monkeypatch)
    assert not draws(trainer(callbacks=[TQDMProgressBar()]))
    assert told["INFO"] == ["autoparallel: plan training_step: 6.00 s"]


def test_stages_are_rows_of_the_trainers_bar_while_that_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    use_terminal(monkeypatch)
    screen = Terminal()
    trained = trainer(callbacks=[bar := RichProgressBar()])
    console = Console(file=screen, force_terminal=True, width=150, _environ={"TERM": "xterm"})
    bar.progress = shown = shown_stages.Progress("{task.description}", console=console, auto_refresh=False)
    with shown:
        assert not draws(trained)
    assert "plan training_step" in screen.getvalue()
    assert draws(trained)  # once it is down


def planned(folder: Path, capsys: pytest.CaptureFixture[str], *options: str, **trainer: Any) -> tuple[list[str], Any]:
    """What `plan` prints but for seconds, and its report without them."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "trainer": trainer}))
    assert main(["plan", "--config", str(folder / "recipe.yaml"), "--output", str(folder / "r.json"), *options]) == 0
    report = json.loads((folder / "r.json").read_text())
    report.pop("timings_s")
    for done in report["passes"]:
        done.pop("seconds")
    lines = capsys.readouterr().out.splitlines()[:-2]
    return [" ".join(re.sub(r"\d+\.\d+ m?s\b", "", line).split()) for line in lines], report


@pytest.mark.parametrize("options", [("--world-size", "16"), ("--world-size", "4", "--strategy.mesh", "auto")])
def test_what_plan_prints_is_the_same_with_a_bar(
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    told: dict[str, list[str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-autoparallel"])
    monkeypatch.setattr(shown_stages, "StageProgress", Slow)
    without = planned(tmp_path, capsys, *options, enable_progress_bar=False)
    assert told["INFO"] == [] and any(line.startswith("autoparallel: passes training") for line in told["DEBUG"])
    screen = use_terminal(monkeypatch)
    assert planned(tmp_path, capsys, *options) == without
    assert "autoparallel: passes training_step, 3 done: " in screen.getvalue()
    assert any(line.startswith("autoparallel: passes training_step: ") for line in told["INFO"])
    searched = [line for line in told["INFO"] if line.startswith("autoparallel: search for a mesh: ")]
    assert len(searched) == options.count("auto") and ("search for a mesh, 0 of " in screen.getvalue()) == bool(
        searched
    )
