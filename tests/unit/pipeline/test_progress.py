"""What is shown of stages that take long, where, and that nothing is left of it: with a clock that is set by hand."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress, RichProgressBar
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_autoparallel.pipeline.progress import StageProgress, terminal_display, ticking

WIPED, CURSOR = "\x1b[2K", "\x1b[?25h"


class Terminal(io.StringIO):
    """A stream that says it is a terminal; ``take`` gives what was written to it since."""

    def isatty(self) -> bool:
        return True

    def take(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class Watched:
    """Stages with a clock and a ticker in the hands of the test."""

    def __init__(self, is_on: bool = True, has_terminal: bool = True) -> None:
        self.now_s, self.told, self.noted, self.ticking = 0.0, [], [], 0
        self.screen = Terminal()
        self.progress = StageProgress(
            is_on=lambda: is_on,
            display=self.display if has_terminal else lambda: None,
            tell=self.tell,
            note=self.noted.append,
            clock=lambda: self.now_s,
            ticker=self.ticker,
        )

    def display(self) -> Progress:
        console = Console(file=self.screen, force_terminal=True, width=120, _environ={"TERM": "xterm"})
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        return Progress(
            *columns, console=console, auto_refresh=False, transient=True, get_time=lambda: 1000 + self.now_s
        )

    def tell(self, line: str) -> None:
        self.told.append(line)
        self.screen.write(f"{line}\n")

    @contextlib.contextmanager
    def ticker(self, tick: Callable[[], None]) -> Iterator[None]:
        self.ticking += 1
        try:
            yield
        finally:
            self.ticking -= 1

    def after(self, seconds: float) -> str:
        """What is drawn after so many more seconds."""
        self.now_s += seconds
        self.screen.take()
        self.progress.tick()
        return self.screen.take()


def test_what_is_over_within_two_seconds_is_only_noted():
    watched = Watched()
    with watched.progress.stage("capture training_step"):
        assert watched.after(1.99) == ""
    assert watched.told == [] and watched.noted == ["autoparallel: capture training_step: 1.99 s"]
    assert watched.screen.take() == ""


def test_what_takes_longer_is_shown_with_its_seconds_and_told_at_its_end():
    watched = Watched()
    with watched.progress.stage("capture training_step") as stage:
        assert watched.ticking == 1
        first = watched.after(2.0)
        assert "autoparallel: capture training_step" in first and "0:00:02" in first
        assert "0:01:05" in watched.after(63)
    assert stage.seconds == 65 and watched.ticking == 0
    assert watched.told == ["autoparallel: capture training_step: 65.00 s"] and watched.noted == []
    before, line, after = watched.screen.take().partition(watched.told[0])
    # the row is wiped away, and the cursor shown again, before the line is written
    assert WIPED in before and before.index(CURSOR) > before.index(WIPED) and line and after == "\n"
    assert watched.after(1) == ""


def test_steps_are_counted_where_their_number_is_known():
    watched = Watched()
    with watched.progress.stage("search for a mesh", total=3) as search:
        search.advance("{dp_shard: 8}")
        assert "search for a mesh, 0 of 3: {dp_shard: 8}" in watched.after(2)
        search.advance("{dp_shard: 4, tp: 2}")
        assert "search for a mesh, 1 of 3: {dp_shard: 4, tp: 2}" in watched.after(0)
    with watched.progress.stage("passes training_step"):
        for name in ("join_biases", "tag_collectives", "sink_waits"):
            watched.progress.advance(name)
        assert "passes training_step, 2 done: sink_waits" in watched.after(2)


def test_names_with_brackets_are_shown_as_they_are():
    watched = Watched()
    with watched.progress.stage("capture blocks[bold]"):
        assert "capture blocks[bold]" in watched.after(2)


def test_a_stage_within_another_has_its_own_row_and_seconds():
    watched = Watched()
    with watched.progress.stage("search for a mesh", total=2):
        assert "search for a mesh" in watched.after(3)
        with watched.progress.stage("plan training_step"):
            assert watched.ticking == 1
            assert "plan training_step" not in watched.after(1)
            both = watched.after(1)
            assert both.index("search for a mesh") < both.index("plan training_step")
            assert "0:00:05" in both and "0:00:02" in both
        assert watched.told == ["autoparallel: plan training_step: 2.00 s"]
        alone = watched.after(0)
        assert "search for a mesh" in alone and "plan training_step" not in alone
        watched.progress.advance("of the outer one again")
        assert "of the outer one again" in watched.after(0)
    assert watched.told[1:] == ["autoparallel: search for a mesh: 5.00 s"]


def test_modules_one_after_the_other_are_each_shown():
    watched = Watched()
    for name in ("encoder", "head"):
        with watched.progress.stage(f"capture {name}"):
            assert f"capture {name}" in watched.after(2)
    assert watched.told == ["autoparallel: capture encoder: 2.00 s", "autoparallel: capture head: 2.00 s"]


def test_without_a_terminal_one_line_is_told_and_nothing_ticks():
    watched = Watched(has_terminal=False)
    with watched.progress.stage("plan training_step"):
        assert watched.ticking == 0 and watched.after(30) == ""
    assert watched.screen.take() == "autoparallel: plan training_step: 30.00 s\n"


def test_where_it_is_off_long_stages_are_noted_only():
    watched = Watched(is_on=False)
    with watched.progress.stage("plan training_step"):
        assert watched.ticking == 0 and watched.after(30) == ""
    assert watched.told == [] and watched.noted == ["autoparallel: plan training_step: 30.00 s"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stage_that_raises_is_wiped_away_without_a_word(depth: int):
    watched = Watched()
    with pytest.raises(ValueError, match="no"), contextlib.ExitStack() as stack:
        for i in range(depth):
            stack.enter_context(watched.progress.stage(f"stage {i}"))
        assert f"stage {depth - 1}" in watched.after(2)
        raise ValueError("no")
    assert watched.told == watched.noted == [] and watched.ticking == 0
    left = watched.screen.take()
    assert WIPED in left and CURSOR in left and watched.after(1) == ""
    with watched.progress.stage("the next"):
        assert "the next" in watched.after(2)


def test_ticks_come_from_a_thread_that_ends_with_the_stage():
    ticked, before = threading.Event(), threading.active_count()
    with pytest.raises(ValueError, match="no"), ticking(ticked.set):
        assert ticked.wait(60)
        assert threading.active_count() == before + 1
        raise ValueError("no")
    assert threading.active_count() == before


def test_rows_are_drawn_within_lightnings_bar_where_that_is_up():
    watched = Watched()
    bar = RichProgressBar()
    console = Console(file=watched.screen, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    columns = bar.configure_columns(None)
    display = CustomProgress(
        *columns, auto_refresh=False, console=console, redirect_stdout=False, redirect_stderr=False
    )
    watched.progress._open = lambda: display
    with display:
        epoch = display.add_task("Epoch 0", total=10)
        with watched.progress.stage("plan training_step"):
            drawn = watched.after(2)
            assert "Epoch 0" in drawn and "plan training_step" in drawn
        assert display.live.is_started
        assert [task.description for task in display.tasks if task.visible] == ["Epoch 0"]
        # Lightning looks its own rows up by their positions
        later = display.add_task("Validation", total=2)
        assert display.tasks[later].description == "Validation" and display.tasks[epoch].description == "Epoch 0"


def test_a_terminal_is_drawn_on_unless_another_display_has_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    display = terminal_display()
    assert display is not None and display.console.file is sys.stderr
    monkeypatch.setattr(sys, "stderr", FileProxy(Console(), Terminal()))
    assert sys.stderr.isatty() and terminal_display() is None


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_no_log_file_is_drawn_on(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, "1")  # by which rich takes any stream for a terminal
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert terminal_display() is None


def test_a_dumb_terminal_is_not_drawn_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert terminal_display() is None
