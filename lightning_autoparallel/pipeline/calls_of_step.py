"""The captured calls of one training step that runs its own Python: what its plan is found for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lightning_autoparallel.contracts import CapturedGraph

_MOST_OF_ONE = 8  # calls of one graph in a step: more of them would only make the problem larger, not another one
_MOST_EMPTY = 3  # steps without captured calls, as those that are skipped


@dataclass
class CallsOfStep:
    """Graphs in the order of their calls, of the training step that began last, at optimizer step ``at``.

    So many training steps have ``begun`` at it, and ``empty`` ones have made no call.
    """

    at: int | None = None
    begun: int = 0
    empty: int = 0
    graphs: list[CapturedGraph] = field(default_factory=list)
    _counts: Counter[int] = field(default_factory=Counter)

    def add(self, captured: CapturedGraph) -> None:
        """One of them runs."""
        self._counts[id(captured)] += 1
        if self._counts[id(captured)] <= _MOST_OF_ONE:
            self.graphs.append(captured)

    def is_over(self, step: int) -> bool:
        """Whether an optimizer has stepped since the last training step began, which made calls or will make none."""
        if self.at is None or step <= self.at:
            return False
        return bool(self.graphs) or self.empty + 1 >= _MOST_EMPTY

    def begin(self, step: int) -> None:
        """A training step begins."""
        moved = self.at is not None and step > self.at
        self.empty += moved and not self.graphs
        self.begun = 1 if moved or self.at is None else self.begun + 1
        self.at = step
        self.graphs.clear()
        self._counts.clear()

    def forget(self) -> None:
        """Nothing has begun: another training follows."""
        self.graphs.clear()
        self._counts.clear()
        self.at, self.begun, self.empty = None, 0, 0
