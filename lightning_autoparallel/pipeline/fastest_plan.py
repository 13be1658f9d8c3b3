"""Of the plans that a solver thinks best, the one that is predicted to be fastest once passes have rewritten its step.

Every rank takes the same plans through the passes, since the one that is taken is compiled as they leave it; rank 0's
figures decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import Explanation, MemoryShare, PartitionedGraph, PassReport, SolvedProblem
from lightning_autoparallel.cost import HardwareSpec

# As fast: then the one of fewer launches, which predictions say least of, then the leaner. Measured rates are of one
# machine, whose samples differ from them by several percent; a datasheet's are for comparing plans of any machine.
_ALIKE, _ALIKE_MEASURED = 1.005, 1.02
_AS_LEAN = 1.01  # as are bytes: of those the faster one
FOR_SPEED = 0.9  # of the budget may be used by what needs no memory but is faster by it: predictions are not exact
KEEPING = 1.03  # as much longer may a step take that gathers again, in less memory


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan as base and rules, as document, and what is to be said of it; rank 0 may know how to explain it.

    By the solver's reckoning ``stays_bytes`` are on a rank through a step, and ``exposed_share`` of it sends parameters
    that nothing hides; infinite, and all of it, where no solver has looked, which has not ``solved`` anything either.
    """

    spec: PlanSpec
    document: Mapping[str, Any]
    notes: tuple[str, ...]
    solved: SolvedProblem | None = None
    explain: Callable[[str], Explanation] | None = None
    stays_bytes: float = math.inf
    exposed_share: float = 1.0

    def to_tell(self) -> Answer:
        """What other ranks are told."""
        return replace(self, explain=None)


@dataclass(frozen=True, kw_only=True)
class RewrittenStep:
    """What passes have made of a planned step on this rank; ``warnings`` are yet to be said, ``timings`` in seconds."""

    partitioned: PartitionedGraph
    passes: tuple[PassReport, ...]
    warnings: tuple[str, ...]
    timings: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a step takes after the passes: ``time_us`` with the optimizer's, None where a cost is unknown.

    It starts so many ``launches``. ``peak_bytes`` are those beside parameters and the optimizer's state, ``lean_bytes``
    those before passes have used what there is room for, ``largest`` the values that take most of the peak. ``step`` is
    what was looked at, where it may be taken as it is: then every rank has it.
    """

    time_us: float | None
    peak_bytes: float
    lean_bytes: float = math.inf
    launches: int = 0
    step: RewrittenStep | None = None
    largest: tuple[MemoryShare, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A plan that was taken through the passes, and the bytes that a rank's allocator needs for it.

    ``kept_bytes`` are alive, of parameters and the optimizer's state.
    """

    answer: Answer
    forecast: Forecast
    kept_bytes: float
    needed_bytes: float

    @property
    def weighed_us(self) -> float | None:
        """Its time beside that of others."""
        return None if self.forecast.time_us is None else self.forecast.time_us * weight_of(self.answer.document)

    @property
    def lean_bytes(self) -> float:
        """What would be alive on a rank if passes used no room that is left."""
        return self.kept_bytes + min(self.forecast.lean_bytes, self.forecast.peak_bytes)


def alike(hardware: HardwareSpec) -> float:
    """Times of another plan, as a factor, that are no reason to take this one."""
    return _ALIKE if hardware.optimizer_gb_per_s is None else _ALIKE_MEASURED


def fits(contender: Contender, budget_bytes: float) -> bool:
    """Whether a rank has room for it, and some to spare where it could do with less."""
    return contender.needed_bytes <= budget_bytes * (FOR_SPEED if keeps_gathered(contender.answer.document) else 1.0)


def weight_of(document: Mapping[str, Any]) -> float:
    """What the time of a document's plan is taken times: keeping what is gathered has to be worth the memory."""
    return KEEPING if keeps_gathered(document) else 1.0


def keeps_gathered(document: Mapping[str, Any]) -> bool:
    """Whether what its plan gathers for the forward stays so until the backward."""
    return bool(document.get("keeps_gathered"))


def alike_to_look_at(hardware: HardwareSpec) -> float:
    """The same for a plan that is not through the passes: fewer launches are worth it where rates are measured."""
    return 1.0 if hardware.optimizer_gb_per_s is None else _ALIKE_MEASURED


def fastest(contenders: Sequence[Contender], budget_bytes: float, alike: float = _ALIKE) -> Contender | None:
    """The fastest of those that fit, the first of them where a time is unknown; None where none fits."""
    within = [each for each in contenders if each.needed_bytes <= budget_bytes]
    fitting = [each for each in within if fits(each, budget_bytes)] or within
    times = [each.weighed_us for each in fitting]
    known = [time for time in times if time is not None]
    if not fitting or len(known) < len(times):
        return fitting[0] if fitting else None
    leaner = [time for each, time in zip(fitting, known, strict=True) if not keeps_gathered(each.answer.document)]
    most_us = min(known) * alike
    most_keeping_us = min([most_us, *leaner])  # fewer launches are no reason to take the memory
    timed = [
        (each, time)
        for each, time in zip(fitting, known, strict=True)
        if time <= (most_keeping_us if keeps_gathered(each.answer.document) else most_us)
    ]
    fewest = min(each.forecast.launches for each, _ in timed)
    timed = [(each, time) for each, time in timed if each.forecast.launches == fewest]
    leanest_bytes = min(each.needed_bytes for each, _ in timed)
    return min((one for one in timed if one[0].needed_bytes <= leanest_bytes * _AS_LEAN), key=lambda one: one[1])[0]


def choice_note(contenders: Sequence[Contender], taken: Contender, budget_bytes: float) -> tuple[str, ...]:
    """What is to be said of the choice; nothing where there was none."""
    if len(contenders) < 2 or taken.forecast.time_us is None:
        return ()
    times = [each.forecast.time_us for each in contenders]
    keeps = any(keeps_gathered(each.answer.document) for each in contenders)
    keeping = f" (counted {KEEPING} times where what is gathered stays so)" if keeps else ""
    texts = ", ".join("unknown" if time is None else f"{time / 1e3:.4g}" for time in times)
    return (
        f"plan auto: {len(contenders)} plans were taken through the passes, in the solver's order: {texts} ms a step "
        f"with the optimizer{keeping}; taken is that of {taken.forecast.time_us / 1e3:.4g} ms"
        f"{_taken_for_one_as_fast(contenders, taken, budget_bytes)}{_left_for_memory(contenders, taken, budget_bytes)}",
    )


def _taken_for_one_as_fast(contenders: Sequence[Contender], taken: Contender, budget_bytes: float) -> str:
    """Why it is not the fastest one that fits: predictions do not tell them apart."""
    fitting = [each for each in contenders if fits(each, budget_bytes) and each.weighed_us is not None]
    best = min(fitting, key=lambda each: each.weighed_us or 0.0, default=taken)
    if best.weighed_us is None or taken.weighed_us is None or best.weighed_us >= taken.weighed_us:
        return ""
    fewer = f"{taken.forecast.launches} launches for {best.forecast.launches}"
    leaner = f"{taken.needed_bytes / 2**30:.3g} GiB for {best.needed_bytes / 2**30:.3g}"
    why = fewer if taken.forecast.launches < best.forecast.launches else leaner
    return f", which predictions do not tell from {(best.forecast.time_us or 0.0) / 1e3:.4g} ms, with {why}"


def _left_for_memory(contenders: Sequence[Contender], taken: Contender, budget_bytes: float) -> str:
    """The fastest that is faster than the one ``taken``, and had been taken with more memory to spare."""
    faster = [each for each in contenders if not fits(each, budget_bytes) and _is_faster(each, taken)]
    if not faster:
        return ""
    best = min(faster, key=lambda each: each.forecast.time_us or math.inf)
    gib, most_gib = best.needed_bytes / 2**30, FOR_SPEED * budget_bytes / 2**30
    time_ms = (best.forecast.time_us or math.nan) / 1e3
    return (
        f", as that of {time_ms:.4g} ms takes {gib:.3g} GiB of a rank, and a plan that keeps what it gathers may take "
        f"{most_gib:.3g}, {FOR_SPEED} of its memory (reshard_after_forward=False asks for one)"
    )


def _is_faster(one: Contender, other: Contender) -> bool:
    if one.weighed_us is None or other.weighed_us is None:
        return False
    return keeps_gathered(one.answer.document) and one.weighed_us < other.weighed_us
