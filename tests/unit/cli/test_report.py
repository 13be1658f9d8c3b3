"""Exit status and message after an error."""

from __future__ import annotations

import pytest

from lightning_autoparallel.cli.report import TRACEBACK_VARIABLE, report_errors
from lightning_autoparallel.errors import CaptureError


def fail() -> None:
    raise CaptureError("step.py:3: .item() reads a value")


def fail_below_a_compiler() -> None:
    try:
        fail()
    except CaptureError as error:
        raise RuntimeError("backend failed") from error


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in (TRACEBACK_VARIABLE, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_success_is_status_0():
    assert report_errors(lambda: None) == 0


@pytest.mark.parametrize("run", [fail, fail_below_a_compiler])
def test_an_own_error_is_one_message_and_status_1(run, capsys):
    assert report_errors(run) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("CaptureError: step.py:3: .item() reads a value\n")
    assert "Traceback" not in printed


@pytest.mark.parametrize(("name", "prefix"), [("RANK", "[rank 5] "), ("LOCAL_RANK", "[rank 5] ")])
def test_other_ranks_say_which_they_are(name, prefix, monkeypatch, capsys):
    monkeypatch.setenv(name, "5")
    assert report_errors(fail) == 1
    assert all(line.startswith(prefix) for line in capsys.readouterr().err.splitlines())


def test_the_traceback_can_be_had(monkeypatch):
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    with pytest.raises(CaptureError):
        report_errors(fail)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        report_errors(lambda: 1 / 0)
