"""What the console script does beside `main`."""

from __future__ import annotations

import gc
import sys

import pytest

from lightning_autoparallel.cli import main as cli


@pytest.mark.parametrize(("command", "frozen"), [("plan", 1), ("fit", 0)])
def test_what_was_planned_goes_with_the_process(command: str, frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is that of `main`; trainings let go of processes and files as ever."""
    asked: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: asked.append(command))
    monkeypatch.setattr(sys, "argv", ["lightning-autoparallel", command])
    monkeypatch.setattr(cli, "main", lambda: 3)
    assert cli.console() == 3
    assert len(asked) == frozen
