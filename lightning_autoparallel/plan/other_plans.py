"""Plans unlike the best, and nearly as good by the solver's objective: passes and the timeline may prefer one of them.

The objective knows nothing of buckets, fused kernels or an order of launches. So the problem is solved again with all
parameters lying alike, in each way that there is, with none of them computed in parts, and with nothing hidden
beside moves, or at all. What takes more than ``_WITHIN`` of the best, or was found before, is dropped. Passes take time
that grows with the graph: of large ones fewer are looked at. Nor are those that are as fast as one before, and no
leaner: behind the passes they differ by less than what predictions are good to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.plan.axis_choices import AxisChoices
from lightning_autoparallel.plan.integer_programme import solve
from lightning_autoparallel.plan.parameter_alternatives import Lying
from lightning_autoparallel.plan.problem import Overlap, Problem, restricted

MOST = 3  # with the best four, as many as of 70B; none of 8B that came fifth was ever the fastest
_MOST_NODES = 64_000  # of all plans together, which the passes go through in a minute or two: four plans of 70B
_WITHIN = 1.15  # of the best objective, which passes may change by as much
_HARDLY_MORE = 1.05  # bytes than the leanest
_HOPELESS = 1.25  # times the room, where nothing was found that fits: by no other reckoning will anything
_AS_FAST, _AS_LEAN = 1e-3, 2e-2  # by as much may plans differ that are taken for one
_MOST_ROUNDS = 12  # of the solver; not seconds, which would find other plans on a busy machine
_TIME_LIMIT_S = 20.0

_Figures = tuple[float, ...]  # microseconds of a plan, then its bytes in each limit


def other_plans(
    choices: AxisChoices, problem: Problem, best: Sequence[int], fastest: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The alternative of every choice in other plans, the best first: ``MOST`` of them, fewer of a large graph.

    ``fastest`` by the objective is among them, where ``best`` is a leaner one that is slower by more than what plans
    may differ by that are taken for one. Where the best does not fit, nor anything else, others may take hardly more:
    what a rank needs is known behind the passes. Where it is far from that, there are none.
    """
    if not problem.fits(best) and any(
        limit.size_bytes(best) > _HOPELESS * limit.most_bytes for limit in problem.limits
    ):
        return []
    most_us = problem.time_us(best) * _WITHIN
    seen = {_decided(choices, best)}
    found: list[tuple[_Figures, tuple[int, ...]]] = []
    within = problem if problem.fits(best) else _hardly_more(problem, best)
    for taken in (fastest, *_solved(_variants(choices, within, is_wider=within is not problem), most_us)):
        figures = _figures(problem, taken)
        if figures[0] <= most_us and within.fits(taken) and _decided(choices, taken) not in seen:
            seen.add(_decided(choices, taken))
            found.append((figures, taken))
    most = min(MOST, max(_MOST_NODES // len(choices.nodes) - 1, 1))
    return _unlike(_figures(problem, best), found)[:most]


def _unlike(best: _Figures, found: Sequence[tuple[_Figures, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """The fastest first, without what takes the time of the best or of one before, and is no leaner."""
    known = [best]
    unlike: list[tuple[int, ...]] = []
    for figures, taken in sorted(found):
        if not any(_is_no_better(figures, other) for other in known):
            unlike.append(taken)
            known.append(figures)
    return unlike


def _figures(problem: Problem, taken: Sequence[int]) -> _Figures:
    return problem.time_us(taken), *(limit.size_bytes(taken) for limit in problem.limits)


def _is_no_better(one: _Figures, other: _Figures) -> bool:
    as_fast = math.isclose(one[0], other[0], rel_tol=_AS_FAST)
    return as_fast and all(size >= least * (1 - _AS_LEAN) for size, least in zip(one[1:], other[1:], strict=True))


def _hardly_more(problem: Problem, taken: Sequence[int]) -> Problem:
    """The problem with room for what ``taken`` has, and a little more."""
    limits = [
        dataclasses.replace(limit, most_bytes=max(limit.most_bytes, limit.size_bytes(taken) * _HARDLY_MORE))
        for limit in problem.limits
    ]
    return dataclasses.replace(problem, limits=tuple(limits))


def _solved(variants: Iterator[tuple[Problem, bool]], most_us: float) -> Iterator[tuple[int, ...]]:
    for variant, is_as_timed in variants:
        with contextlib.suppress(InfeasiblePlanError):
            most = most_us if is_as_timed else math.inf
            yield solve(variant, _TIME_LIMIT_S, most_rounds=_MOST_ROUNDS, most_us=most).taken


def _decided(choices: AxisChoices, taken: Sequence[int]) -> tuple[int, ...]:
    """What a solution says of calls and parameters, without the choices that only stand for where values leave."""
    return tuple(taken[: choices.own])


def _variants(choices: AxisChoices, problem: Problem, is_wider: bool) -> Iterator[tuple[Problem, bool]]:
    """Each with whether plans take the time there that they take in ``problem``."""
    if is_wider:
        yield problem, True
    for stored in _stored_sets(choices):
        yield _with(choices, problem, partial(_is_cut_by, stored)), True
    if not choices.axis.is_batch_axis:
        yield _with(choices, problem, lambda way: way.computed.is_replicate()), True
    if problem.overlaps:
        yield dataclasses.replace(problem, overlaps=tuple(map(_beside_computing, problem.overlaps))), False
        yield dataclasses.replace(problem, overlaps=tuple(map(_in_the_open, problem.overlaps))), False


def _stored_sets(choices: AxisChoices) -> list[frozenset[str]]:
    """The sets of axes that parameters may be cut by between steps."""
    return list(dict.fromkeys(frozenset(way.stored) for free in choices.free.values() for way in free.ways))


def _is_cut_by(axes: frozenset[str], way: Lying) -> bool:
    return axes == frozenset(way.stored)


def _with(choices: AxisChoices, problem: Problem, is_wanted: Callable[[Lying], bool]) -> Problem:
    """Parameters lie as is wanted, where they can."""
    left = {}
    for node, parameter in choices.free.items():
        wanted = [k for k, way in enumerate(parameter.ways) if is_wanted(way)]
        if wanted:
            left[choices.alternatives(node)[0]] = wanted
    return restricted(problem, left)


def _beside_computing(overlap: Overlap) -> Overlap:
    return dataclasses.replace(overlap, moves={})


def _in_the_open(overlap: Overlap) -> Overlap:
    return dataclasses.replace(overlap, computed_us={}, moves={})
