"""Which of several plans is fastest behind the passes, without taking all of them through all passes.

Each is begun: applied and partitioned, with passes over the joint graph behind it. What it hardly takes less than is
known then, and says well what it will take. So the plan of which that is least goes through the other passes first, and
another one goes no further if it would have to come twice as near to it as any before to be faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.contracts import CapturedGraph, PartitionedGraph, ShardingPlan
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.memory import predict_step_memory
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.pipeline.fastest_plan import Answer, Contender, Forecast, alike_to_look_at, fits, weight_of
from lightning_autoparallel.pipeline.predict import forecast_of, step_update_us
from lightning_autoparallel.pipeline.progress import StageProgress
from lightning_autoparallel.pipeline.rank_memory import kept_bytes
from lightning_autoparallel.pipeline.rewriting import StepRewriting
from lightning_autoparallel.torch_compat.tracing import collection_paused

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext

_NEARER = 0.5  # the part of what another plan's step takes above the least that passes may leave of this one's
_MOST_ABOVE = 0.25  # what that is at most, as a share of the least: what is far above it moves what this one may hide


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A plan whose step is at the first passes; it takes hardly less than ``least_us``, with the optimizer's."""

    place: int  # among those of the solver, whose best is 0
    answer: Answer
    plan: ShardingPlan
    rewriting: StepRewriting
    least_us: float


class Contest:
    """Takes plans for one step through the passes; every rank calls it alike, and rank 0's figures decide.

    A rank may use ``budget_bytes``. ``left_out`` are notes on the plans that are no contenders.
    """

    def __init__(self, captured: CapturedGraph, context: StageContext, costs: CostModel, budget_bytes: float) -> None:
        self.left_out: list[str] = []
        self._captured, self._context, self._costs, self._budget_bytes = captured, context, costs, budget_bytes
        self._through: dict[int, tuple[float, Contender]] = {}  # by their place, with what they hardly take less than

    def contenders(self, candidates: Sequence[tuple[Answer, ShardingPlan]]) -> list[Contender]:
        """Those that went through all passes, in their order; the first of ``candidates`` is the solver's best.

        Raises:
            AutoParallelError: that one cannot be rewritten. Another one is left out for that.
        """
        for one in sorted(self._all_begun(candidates), key=lambda one: one.least_us):
            reason = self._reason_against(one)
            if reason is not None:
                self._leave_out(one.place, reason)
                continue
            self._context.progress.advance(f"plan {one.place + 1} of {len(candidates)} through the passes")
            try:
                self._through[one.place] = one.least_us, self._finished(one)
            except Exception as error:  # on all ranks alike
                if one.place == 0:
                    raise
                self._leave_out(one.place, f"{type(error).__name__}: {error}")
        return [self._through[place][1] for place in sorted(self._through)]

    def _all_begun(self, candidates: Sequence[tuple[Answer, ShardingPlan]]) -> list[_Begun]:
        begun = []
        for place, (answer, plan) in enumerate(candidates):
            self._context.progress.advance(f"plan {place + 1} of {len(candidates)} into the passes")
            try:
                begun.append(self._begun(place, answer, plan))
            except Exception as error:  # on all ranks alike
                if place == 0:
                    raise
                self._leave_out(place, f"{type(error).__name__}: {error}")
        return begun

    def _begun(self, place: int, answer: Answer, plan: ShardingPlan) -> _Begun:
        silent = replace(self._context, progress=StageProgress())
        rewriting = StepRewriting(self._captured.name, silent, self._costs, ArtifactWriter(None))
        with collection_paused():  # graphs are large, and what is thrown away of them goes between plans
            rewriting.begin(self._captured, plan)
            least_us = rewriting.least_us()
        least_us += step_update_us(self._captured, plan, self._costs, self._context.found.state)
        return _Begun(place=place, answer=answer, plan=plan, rewriting=rewriting, least_us=least_us)

    def _reason_against(self, one: _Begun) -> str | None:
        """Why a plan need not go further; None where it may be the fastest of those that fit."""
        fitting = [(least_us, each) for least_us, each in self._through.values() if fits(each, self._budget_bytes)]
        times = [(least_us, each.forecast.time_us, each.weighed_us) for least_us, each in fitting]
        known = [(least, time, weighed) for least, time, weighed in times if time is not None and weighed is not None]
        if not fitting or len(known) < len(fitting):
            return None
        nearest = min(time / least_us if least_us else 1.0 for least_us, time, _ in known)
        above = min(max(nearest - 1, 0.0), _MOST_ABOVE)
        expected_us = one.least_us * (1 + above * _NEARER) * weight_of(one.answer.document)
        if expected_us > min(weighed for _, _, weighed in known) * alike_to_look_at(self._costs.hardware):
            return f"it takes hardly less than {one.least_us / 1e3:.4g} ms a step"
        return None

    def _finished(self, one: _Begun) -> Contender:
        with collection_paused():
            forecast = self._forecast(one)
        kept = kept_bytes(self._captured, one.plan, self._context.found.state)
        needed = self._costs.hardware.reserved_bytes(kept + forecast.peak_bytes)
        return Contender(answer=one.answer, forecast=forecast, kept_bytes=kept, needed_bytes=needed)

    def _forecast(self, one: _Begun) -> Forecast:
        """What the step takes behind all passes, as rank 0 finds."""
        context, lean_bytes = self._context, _peak_bytes(one.rewriting.partitioned)
        step = one.rewriting.finish()
        error: Exception | None = None
        forecast: Forecast | None = None
        try:
            forecast = forecast_of(self._captured, one.plan, step.partitioned, self._costs, context.found.state)
            forecast = replace(forecast, lean_bytes=lean_bytes)
        except Exception as caught:  # raised again below, once every rank knows
            error = caught
        context.control.raise_together(error)
        told = context.control.gather((forecast, context.config.dump_dir is None))
        first: Forecast = told[0][0]
        # What is to be dumped is made once more, with its passes' graphs.
        return replace(first, step=step) if all(is_quiet for _, is_quiet in told) else first

    def _leave_out(self, place: int, reason: str) -> None:
        which = "another plan" if place else "the solver's best"
        self.left_out.append(f"plan auto: {which} was left out: {reason}")


def _peak_bytes(partitioned: PartitionedGraph) -> float:
    """The predicted peak of a step; infinite where it is not known."""
    try:
        return float(predict_step_memory(partitioned).peak_bytes)
    except UnsupportedOpError:
        return math.inf
