"""Where a plan places everything, and why it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts.step_graphs import Placements, PlanAxis


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """Placements a node computes with: one entry per tensor argument, one per output (None: not a tensor)."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]


@dataclass(frozen=True, kw_only=True)
class OtherWay:
    """An alternative that was not taken: what the best plan with it costs more, or what rules it out.

    ``more_bytes`` stay on a rank: of parameters, gradients, moments, and what the backward reads. Where that is not
    ``proved`` it costs at most so much more, as the solver's time was up, or less by no more than its gap.
    """

    way: str
    more_us: float = math.inf
    more_bytes: float = 0.0
    ruled_out: str = ""
    proved: bool = True


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What was taken for equal parameters or calls, ``count`` of them, and what else there was, the cheapest first.

    Beside those listed there are ``further`` alternatives, none of them cheaper, and ``unsolved`` ones.
    """

    what: str
    count: int
    taken: str
    others: tuple[OtherWay, ...] = ()
    further: int = 0
    unsolved: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan places what ``pattern`` matches as it does; ``note`` says how the figures came about."""

    pattern: str
    choices: tuple[Explained, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class SolvedProblem:
    """What ``plan="auto"`` was solved as, on ``axis``: a programme of ``columns`` and ``rows``, in ``seconds``.

    By its reckoning the plan takes ``time_us`` of computing and moving on one rank, and none less than ``bound_us``.
    """

    axis: str
    time_us: float
    bound_us: float
    columns: int
    rows: int
    seconds: float

    @property
    def gap_us(self) -> float:
        """By how much it may be slower than the best, at most."""
        return max(self.time_us - self.bound_us, 0.0)

    @property
    def gap(self) -> float:
        """The same as a share of its time."""
        return self.gap_us / self.time_us if self.time_us else 0.0


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """A placement for every node of one captured graph, and for every parameter its storage placement.

    ``joint_axes`` are groups of several. ``found`` is base and rules where no person wrote them, ``notes`` and what was
    ``solved`` say how, ``explain`` why. The solver reckons ``stays_bytes`` on a rank, and ``exposed_share`` of the step
    to send parameters.
    """

    name: str
    axes: tuple[PlanAxis, ...]
    nodes: Mapping[str, NodePlacement]
    parameters: Mapping[str, Placements]
    outputs: tuple[Placements | None, ...]
    joint_axes: tuple[PlanAxis, ...] = ()
    found: PlanSpec | None = None
    notes: tuple[str, ...] = ()
    solved: SolvedProblem | None = None
    explain: Callable[[str], Explanation] | None = None
    stays_bytes: float = math.inf
    exposed_share: float = 1.0
    keeps_gathered: bool = False  # what is gathered stays so until the backward
