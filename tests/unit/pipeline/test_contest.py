"""Which plans go through all passes, in which order, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.pipeline.contest import Contest, _Begun
from lightning_autoparallel.pipeline.fastest_plan import Answer, Contender, Forecast
from lightning_autoparallel.pipeline.progress import StageProgress

BUDGET = 10.0
MEASURED = {"base": "cpu", "optimizer_gb_per_s": 10.0}


def held(
    monkeypatch: pytest.MonkeyPatch, plans: list[dict[str, Any]], hardware: Any = "h100"
) -> tuple[list[int], Contest, list[Contender]]:
    """Places of the plans that went through the passes in turn, the contest, and its contenders.

    Of a plan ``least`` and ``time`` are milliseconds, ``needs`` bytes; ``fails`` says where it raises.
    """
    turns: list[int] = []

    def begun(self: Contest, place: int, answer: Answer, plan: Any) -> _Begun:
        if plan.get("fails") == "begin":
            raise RuntimeError("no")
        least_us = plan["least"] * 1e3
        return _Begun(place=place, answer=answer, plan=plan, rewriting=None, least_us=least_us)  # type: ignore[arg-type]

    def finished(self: Contest, one: _Begun) -> Contender:
        plan: Any = one.plan
        turns.append(one.place)
        if plan.get("fails") == "finish":
            raise RuntimeError("no")
        time_us = None if plan["time"] is None else plan["time"] * 1e3
        forecast = Forecast(time_us=time_us, peak_bytes=plan.get("needs", 1.0))
        needed = plan.get("needs", 1.0)
        return Contender(answer=one.answer, forecast=forecast, kept_bytes=0.0, needed_bytes=needed)

    monkeypatch.setattr(Contest, "_begun", begun)
    monkeypatch.setattr(Contest, "_finished", finished)
    context: Any = SimpleNamespace(progress=StageProgress())
    costs: Any = SimpleNamespace(hardware=hardware_from(hardware))
    contest = Contest(None, context, costs, BUDGET)  # type: ignore[arg-type]
    answers = [Answer(spec=PlanSpec(base="fsdp"), document={}, notes=()) for _ in plans]
    contenders = contest.contenders(list(zip(answers, plans, strict=True)))  # type: ignore[arg-type]
    return turns, contest, contenders


def test_what_takes_least_at_least_goes_first_and_the_solver_s_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [{"least": 90, "time": 99}, {"least": 80, "time": 98}, {"least": 85, "time": 97}]
    turns, contest, contenders = held(monkeypatch, plans)
    assert turns == [1, 2, 0] and not contest.left_out
    assert [each.forecast.time_us for each in contenders] == [99e3, 98e3, 97e3]


@pytest.mark.parametrize(
    ("plans", "turns"),
    [
        # 100 of 80 are 1.25 times the least: another one may come to 1.125 times its own
        ([{"least": 80, "time": 100}, {"least": 88, "time": 100}], [0, 1]),
        ([{"least": 80, "time": 100}, {"least": 89, "time": 100}], [0]),
        ([{"least": 101, "time": 100}, {"least": 80, "time": 100}], [1]),  # the solver's best is no exception
        # one came nearer than the one before it
        ([{"least": 80, "time": 120}, {"least": 90, "time": 99}, {"least": 95, "time": 98}], [0, 1]),
        ([{"least": 80, "time": 100, "needs": 11.0}, {"least": 101, "time": 102}], [0, 1]),  # what does not fit
        ([{"least": 80, "time": None}, {"least": 200, "time": 300}], [0, 1]),  # a cost is unknown
        ([{"least": 0, "time": None}, {"least": 0, "time": None}], [0, 1]),
        # what shows most of its moves says little of one that may hide them
        ([{"least": 100, "time": 195}, {"least": 140, "time": 150}], [0, 1]),
        ([{"least": 100, "time": 195}, {"least": 174, "time": 180}], [0]),
    ],
)
def test_a_plan_that_cannot_be_the_fastest_goes_no_further(
    monkeypatch: pytest.MonkeyPatch, plans: list[dict[str, Any]], turns: list[int]
) -> None:
    taken, contest, _ = held(monkeypatch, plans)
    assert taken == turns
    left_out = [plan for place, plan in enumerate(plans) if place not in turns]
    assert len(contest.left_out) == len(left_out)
    for plan, said in zip(left_out, contest.left_out, strict=True):
        which = "the solver's best" if plan is plans[0] else "another plan"
        assert said == f"plan auto: {which} was left out: it takes hardly less than {plan['least']} ms a step"


@pytest.mark.parametrize(("hardware", "turns"), [("h100", [0]), (MEASURED, [0, 1])])
def test_where_rates_are_measured_fewer_launches_may_decide(
    monkeypatch: pytest.MonkeyPatch, hardware: Any, turns: list[int]
) -> None:
    assert held(monkeypatch, [{"least": 100, "time": 100}, {"least": 101, "time": 101}], hardware)[0] == turns


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_the_solver_s_best_must_go_through(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    fine = {"least": 80, "time": 100}
    _, contest, contenders = held(monkeypatch, [fine, {**fine, "fails": where}])
    assert len(contenders) == 1
    assert contest.left_out == ["plan auto: another plan was left out: RuntimeError: no"]
    with pytest.raises(RuntimeError, match="no"):
        held(monkeypatch, [{**fine, "fails": where}, fine])
