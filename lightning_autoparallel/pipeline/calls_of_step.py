"""The captured calls of one training step that runs its own Python: what its plan is found for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lightning_autoparallel.contracts import CapturedGraph

_MOST_OF_ONE = 8  # calls of one graph in a step: more of them would only make the problem larger, not another one


@dataclass
class CallsOfStep:
    """Graphs in the order of their calls, of the training step that began last, at optimizer step ``at``."""

    at: int | None = None
    graphs: list[CapturedGraph] = field(default_factory=list)
    _counts: Counter[int] = field(default_factory=Counter)

    def add(self, captured: CapturedGraph) -> None:
        """One of them runs."""
        self._counts[id(captured)] += 1
        if self._counts[id(captured)] <= _MOST_OF_ONE:
            self.graphs.append(captured)

    def begin(self, step: int) -> tuple[CapturedGraph, ...] | None:
        """A training step begins; those of the last one, where an optimizer has stepped since, else None."""
        before, ended = tuple(self.graphs), self.at is not None and step > self.at
        self.forget()
        self.at = None if ended else step
        return before if ended else None

    def forget(self) -> None:
        """Let go of the graphs."""
        self.graphs.clear()
        self._counts.clear()
