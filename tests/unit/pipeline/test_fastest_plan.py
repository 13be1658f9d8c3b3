"""Which plan is taken of those that passes have rewritten."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.pipeline.fastest_plan import Answer, Contender, Forecast, alike, choice_note, fastest

ANSWER = Answer(spec=PlanSpec(base="fsdp"), document={}, notes=(), explain=lambda pattern: pytest.fail(pattern))


def contender(time_us: float | None, needed_bytes: float) -> Contender:
    forecast = Forecast(time_us=time_us, peak_bytes=needed_bytes / 2)
    return Contender(answer=ANSWER, forecast=forecast, kept_bytes=needed_bytes / 2, needed_bytes=needed_bytes)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([(100.0, 8.0), (90.0, 9.0), (95.0, 1.0)], 1),
        ([(100.0, 8.0), (90.0, 11.0), (95.0, 1.0)], 2),  # the fastest does not fit
        ([(90.1, 8.0), (90.0, 9.0), (95.0, 1.0)], 0),  # as fast, in less memory
        ([(90.1, 8.0), (90.0, 8.05), (95.0, 1.0)], 1),  # as lean: the faster one
        ([(100.0, 8.0), (None, 9.0), (95.0, 1.0)], 0),  # a cost is unknown: as the solver has it
        ([(100.0, 11.0), (None, 9.0)], 1),
        ([(100.0, 11.0), (90.0, 12.0)], None),
    ],
)
def test_the_fastest_that_fits_is_taken(given: list[Any], taken: int | None) -> None:
    contenders = [contender(*each) for each in given]
    assert fastest(contenders, budget_bytes=10.0) is (None if taken is None else contenders[taken])


def test_of_equally_fast_ones_that_of_fewer_launches() -> None:
    """Predicted times are not good to half a percent; what many launches really take they know least."""
    many, few = contender(100.0, 5.0), contender(100.4, 9.0)
    many, few = (
        replace(each, forecast=replace(each.forecast, launches=count)) for each, count in ((many, 6), (few, 1))
    )
    assert fastest([many, few], budget_bytes=10.0) is few
    assert fastest([many, few], budget_bytes=8.0) is many
    (note,) = choice_note([many, few], few, budget_bytes=10.0)
    assert note.endswith("that of 0.1004 ms, which predictions do not tell from 0.1 ms, with 1 launches for 6")
    assert "do not tell" not in choice_note([many, few], many, budget_bytes=10.0)[0]


def test_of_equally_fast_ones_the_leaner_is_told_as_such() -> None:
    fast, lean = contender(100.0, 3 * 2.0**30), contender(100.4, 2 * 2.0**30)
    (note,) = choice_note([fast, lean], lean, budget_bytes=4 * 2.0**30)
    assert note.endswith("do not tell from 0.1 ms, with 2 GiB for 3")


def test_measured_rates_tell_less_apart() -> None:
    one, other = contender(100.0, 9.0), contender(101.5, 5.0)
    measured = hardware_from({"base": "cpu", "optimizer_gb_per_s": 10.0})
    assert fastest([one, other], budget_bytes=10.0, alike=alike(hardware_from("h100"))) is one
    assert fastest([one, other], budget_bytes=10.0, alike=alike(measured)) is other


def test_a_choice_is_told_with_its_times() -> None:
    several = [contender(100e3, 8.0), contender(90e3, 9.0)]
    (note,) = choice_note(several, several[1], budget_bytes=10.0)
    assert "2 plans were taken through the passes, in the solver's order: 100, 90 ms" in note
    assert note.endswith("taken is that of 90 ms")
    assert choice_note(several[:1], several[0], budget_bytes=10.0) == ()


def test_it_is_told_that_a_faster_one_keeps_too_much_gathered() -> None:
    gib = 2.0**30
    slower, keeping = contender(100e3, 8 * gib), contender(90e3, 9.5 * gib)
    answer = replace(ANSWER, document={"keeps_gathered": True})
    several = [slower, replace(keeping, answer=answer)]
    assert fastest(several, budget_bytes=10 * gib) is slower
    (note,) = choice_note(several, slower, budget_bytes=10 * gib)
    assert "as that of 90 ms takes 9.5 GiB of a rank" in note and "may take 9, 0.9 of its memory" in note
    assert "as that of" not in choice_note(several, slower, budget_bytes=11 * gib)[0]


def test_other_ranks_are_not_told_what_only_rank_0_can_explain() -> None:
    assert ANSWER.to_tell().explain is None
    assert ANSWER.to_tell().spec is ANSWER.spec


@pytest.mark.parametrize(("before_bytes", "lean_bytes"), [(4.0, 5.0), (12.0, 11.0), (math.inf, 11.0)])
def test_what_passes_use_of_the_room_is_not_what_a_plan_needs(before_bytes: float, lean_bytes: float) -> None:
    forecast = Forecast(time_us=1.0, peak_bytes=10.0, lean_bytes=before_bytes)
    contender = Contender(answer=ANSWER, forecast=forecast, kept_bytes=1.0, needed_bytes=11.0)
    assert contender.lean_bytes == lean_bytes


KEEPING = replace(ANSWER, document={"keeps_gathered": True})


@pytest.mark.parametrize(("keeping_us", "is_taken"), [(96.0, True), (98.0, False)])
def test_what_keeps_parameters_gathered_must_be_worth_the_memory(keeping_us: float, is_taken: bool) -> None:
    lean, keeping = contender(100.0, 10.0), replace(contender(keeping_us, 20.0), answer=KEEPING)
    assert fastest([lean, keeping], 30.0) is (keeping if is_taken else lean)
    assert fastest([lean, keeping], 15.0) is fastest([lean, keeping], 22.0) is lean  # a tenth stays free
    assert fastest([replace(lean, needed_bytes=40.0), keeping], 30.0) is keeping
    assert fastest([replace(lean, needed_bytes=40.0), keeping], 21.0) is keeping  # nothing does with less
    fewer = replace(keeping, forecast=replace(keeping.forecast, launches=-1))
    assert fastest([lean, fewer], 30.0) is (fewer if is_taken else lean)
