"""What takes more than 2 s says so: by a row on the terminal while it runs, by a line in the log at its end."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

LONG_S = 2.0
_REFRESH_S = 0.25

Tell = Callable[[str], None]
Ticker = Callable[[Callable[[], None]], contextlib.AbstractContextManager[None]]


@dataclass(kw_only=True)
class Stage:
    """One stage: ``step`` is the one of ``begun`` that it is at, of ``total`` if that is known.

    ``began_s`` is a time of the clock, ``seconds`` what it has taken, known at its end; ``row`` shows it.
    """

    name: str
    began_s: float
    total: int | None = None
    begun: int = 0
    step: str = ""
    seconds: float = 0.0
    row: TaskID | None = None

    def advance(self, step: str) -> None:
        """Its next step begins, so that those before it are done."""
        self.begun, self.step = self.begun + 1, step

    @property
    def done(self) -> int:
        """Steps that are over."""
        return max(self.begun - 1, 0)

    @property
    def text(self) -> str:
        """As it is shown while it runs."""
        of = f", {self.done} of {self.total}" if self.total is not None else f", {self.done} done" if self.done else ""
        return f"autoparallel: {self.name}{of}" + (f": {self.step}" if self.step else "")


class StageProgress:
    """Shows stages that take more than 2 s; by itself, it shows none.

    A stage may run within another; each has its row. Where there is nothing to draw on there is no thread either.

    Args:
        is_on: whether long stages are shown at all: asked where one begins and ends.
        display: where to draw, either one that is up, or a new one that is started and stopped here; None for nowhere.
        tell: says how long a long stage has taken.
        note: the same for all others, and for all of them where ``is_on`` says no.
        clock: seconds, from any start.
        ticker: has what it is given called again and again while it is entered.
    """

    def __init__(
        self,
        *,
        is_on: Callable[[], bool] = lambda: False,
        display: Callable[[], Progress | None] = lambda: None,
        tell: Tell = lambda line: None,
        note: Tell = lambda line: None,
        clock: Callable[[], float] = time.perf_counter,
        ticker: Ticker | None = None,
    ) -> None:
        self._is_on, self._open, self._tell, self._note = is_on, display, tell, note
        self._clock, self._ticker = clock, ticker or ticking
        self._lock = threading.RLock()
        self._stages: list[Stage] = []
        self._display: Progress | None = None
        self._is_ours = False

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        """Around a stage of ``total`` steps, if they can be counted; one that raises ends without a word."""
        stage = Stage(name=name, total=total, began_s=self._clock())
        with self._refreshed(), self._listed(stage):
            yield stage
            stage.seconds = self._clock() - stage.began_s
        line = f"autoparallel: {name}: {stage.seconds:.2f} s"
        if stage.seconds < LONG_S or not self._is_on():
            self._note(line)
            return
        with self._lock:
            shown = self._clear()  # rows of stages around this one; the next tick draws them below the line
            self._tell(line)
            self._display = self._open() if shown else None

    def advance(self, step: str) -> None:
        """The next step of the innermost stage begins."""
        if self._stages:
            self._stages[-1].advance(step)

    def tick(self) -> None:
        """Draw the stages that have taken long by now."""
        with self._lock:
            display, now = self._display, self._clock()
            if display is None:
                return
            for stage in self._stages:
                if stage.row is None and now - stage.began_s >= LONG_S:
                    stage.row = self._add(display, stage, now - stage.began_s)
                if stage.row is not None:
                    # a total of None is none to change
                    display.update(stage.row, description=escape(stage.text), completed=stage.done, total=stage.total)
            if any(stage.row is not None for stage in self._stages):
                display.refresh()

    @contextlib.contextmanager
    def _refreshed(self) -> Iterator[None]:
        if self._stages or not self._is_on():
            yield
            return
        self._display = self._open()
        if self._display is None:
            yield
            return
        try:
            with self._ticker(self.tick):
                yield
        finally:
            self._clear()

    @contextlib.contextmanager
    def _listed(self, stage: Stage) -> Iterator[None]:
        with self._lock:
            self._stages.append(stage)
        try:
            yield
        finally:
            with self._lock:
                self._stages.remove(stage)
                if stage.row is not None:
                    self._remove(stage.row)

    def _add(self, display: Progress, stage: Stage, elapsed_s: float) -> TaskID:
        is_up = display.live.is_started
        unknown = math.inf if is_up else None  # Lightning's bar takes no None, and rich draws no infinity
        total = unknown if stage.total is None else stage.total
        row = display.add_task(escape(stage.text), total=total, visible=False)
        for task in display.tasks:
            if task.id == row:
                task.start_time = display.get_time() - elapsed_s
                task.visible = True
        if not is_up:
            display.start()
            self._is_ours = True
        return row

    def _remove(self, row: TaskID) -> None:
        if self._display is None:
            return
        if self._is_ours:
            self._display.remove_task(row)
        else:  # hidden: who else has rows there may find them by their positions
            self._display.update(row, visible=False)
        self._display.refresh()

    def _clear(self) -> bool:
        """Draw no more, and leave nothing behind; whether anything was being drawn."""
        with self._lock:
            display = self._display
            if display is None:
                return False
            for stage in self._stages:
                if stage.row is not None:
                    self._remove(stage.row)
                    stage.row = None
            self._display = None
            if self._is_ours:
                self._is_ours = False
                display.stop()
            return True


@contextlib.contextmanager
def ticking(tick: Callable[[], None]) -> Iterator[None]:
    """Call ``tick`` four times a second, in a thread that ends with this context."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_REFRESH_S):
            tick()

    thread = threading.Thread(target=run, name="autoparallel-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def terminal_display() -> Progress | None:
    """A display on standard error; None if that is no terminal, or one that another display has already."""
    if not sys.stderr.isatty() or isinstance(sys.stderr, FileProxy):
        return None
    console = Console(stderr=True)
    if console.is_dumb_terminal:
        return None
    # Streams stay as they are: they would be swapped by a thread, below code that may swap them, too.
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


StageClock = Callable[[str], contextlib.AbstractContextManager[None]]


def stage_clock(graph: str, timings: dict[str, float], progress: StageProgress) -> StageClock:
    """Stages of a graph, each shown while it runs; ``timings`` are told its seconds, those of its parts together."""

    @contextlib.contextmanager
    def clock(stage: str) -> Iterator[None]:
        with progress.stage(f"{stage} {graph}") as running:
            yield
        timings[stage] = timings.get(stage, 0.0) + running.seconds

    return clock
