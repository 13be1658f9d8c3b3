"""``plan="auto"``: where parameters lie, and how everything is computed on an axis, as one problem."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from types import MappingProxyType

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.config import STORED, PlanRule, PlanSpec
from lightning_autoparallel.contracts import PlanAxis, SolvedProblem
from lightning_autoparallel.cost import CostModel, HardwareSpec
from lightning_autoparallel.cost.compute import unrated_dtypes
from lightning_autoparallel.errors import InfeasiblePlanError, SearchTimeError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import placement_text, rule_text
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.plan.axis import AxisToPlan, Producer
from lightning_autoparallel.plan.axis_choices import AxisChoices
from lightning_autoparallel.plan.axis_times import AxisTimes
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.plan.integer_programme import Solution
from lightning_autoparallel.plan.memory_room import best_that_fits, check_room, leaner, stays_bytes
from lightning_autoparallel.plan.other_plans import other_plans
from lightning_autoparallel.plan.parameter_alternatives import FreeParameter, Lying
from lightning_autoparallel.plan.problem import Problem
from lightning_autoparallel.plan.what_if import blocked

Named = tuple[tuple[str, str], ...]  # axes and placements
_INSTEAD = "change or leave out the rule that has it lie so"
BASE = "fsdp"  # what parameters do that no rule names


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was solved for an axis, and the alternative that was taken of every choice, by which it is ``solved``.

    It ``is_best`` of all, or one of those that are nearly as good.
    """

    choices: AxisChoices
    problem: Problem
    taken: tuple[int, ...]
    solved: SolvedProblem
    is_best: bool = True


@dataclass(frozen=True, kw_only=True)
class FoundAxis:
    """What is done on an axis: by every call, and with every parameter whose placement was to be found."""

    choices: Mapping[fx.Node, Candidate]
    parameters: Mapping[str, Lying]
    note: str
    search: Search
    stays_bytes: float
    exposed_share: float


def find_axis(
    to_plan: AxisToPlan,
    axis: PlanAxis,
    free: Mapping[fx.Node, FreeParameter],
    costs: CostModel,
    fixed: Mapping[fx.Node, Candidate] | None = None,
    room_bytes: float = math.inf,
    with_others: bool = False,
    saved: Sequence[Producer] = (),
    recomputed: Sequence[Sequence[Producer]] = (),
) -> tuple[FoundAxis, ...]:
    """The best of all combinations on one axis, or of all ways to keep parameters where what calls do is ``fixed``.

    Of combinations that are as fast it is the one that takes least memory. ``with_others`` it is followed by unlike
    ones that are nearly as good, the fastest among them.

    Raises:
        InfeasiblePlanError: none goes together, or none leaves what stays on a rank, with what is ``saved`` for the
            backward and the largest set of what is ``recomputed`` in it, in ``room_bytes``.
    """
    check_room(free, room_bytes)
    group = costs.groups[axis.group_name]
    times = AxisTimes(to_plan.graph, axis.size, to_plan.cut_already, group, costs.hardware)
    pins = {node: pin for node, pin in to_plan.pins.items() if node not in free}
    known = dataclasses.replace(to_plan, pins=pins)
    choices = AxisChoices(known, times, free, fixed, room_bytes, tuple(saved), tuple(map(tuple, recomputed)))
    all_choices = choices.problem()
    try:
        solution = best_that_fits(all_choices)
    except SearchTimeError:
        raise
    except InfeasiblePlanError as error:
        why = blocked(all_choices) if type(error) is InfeasiblePlanError else ""
        raise (InfeasiblePlanError(f"{why} ({error}): {_INSTEAD}") if why else error) from error
    best = leaner(all_choices, solution)
    others = other_plans(choices, all_choices, best, solution.taken) if with_others else []
    assumed = _taken_for(unrated_dtypes(to_plan.graph, costs.hardware), costs.hardware)
    return tuple(
        FoundAxis(
            choices=chosen,
            parameters=choices.lying(taken),
            note=_note(solved) + assumed + _idle(axis, chosen),
            stays_bytes=stays_bytes(all_choices, taken),
            exposed_share=_exposed_share(all_choices, taken),
            search=Search(
                choices=choices,
                problem=all_choices,
                taken=taken,
                solved=solved,
                is_best=taken is best,
            ),
        )
        for taken in (best, *others)
        for chosen in [choices.chosen(taken) if fixed is None else fixed]
        for solved in [_solved(axis, solution, all_choices.time_us(taken))]
    )


def _exposed_share(problem: Problem, taken: Sequence[int]) -> float:
    """Of the time, what is sent of parameters that nothing hides."""
    moved = [value.time_us(taken) for value in problem.values]
    time_us = problem.time_us(taken)
    return sum(overlap.time_us(taken, moved) for overlap in problem.overlaps) / time_us if time_us else 0.0


def first_spec(spec: PlanSpec, mesh: ParallelMesh) -> PlanSpec:
    """Where parameters lie until a plan is found: in shards over all ranks, and steps compute with whole ones."""
    named = spec.axes()
    others = [name for name in mesh.active(mesh.spec.names) if name not in mesh.data_parallel_axes]
    whole = {name: "R" for name in others if name not in named}
    stored = {name: "S(0)" for name in mesh.active(mesh.spec.names) if name not in named}
    rules = [_rule("", "*", whole)] if whole else []
    rules += [_rule(f"{STORED}:", "*", stored)] if stored else []
    return PlanSpec(base=BASE, rules=(*rules, *spec.rules))


def found_spec(
    spec: PlanSpec,
    axis: PlanAxis,
    batch_axes: Sequence[PlanAxis],
    found: Mapping[str, Lying],
    others: Mapping[str, Mapping[str, Placement]] = MappingProxyType({}),
) -> PlanSpec:
    """Base and rules that place parameters as was found: for a kind of them, and for each parameter beside it.

    ``others`` were not free, and lie so on the axes that share out the batch.
    """
    names = [each.name for each in batch_axes]
    planned = [] if axis.shards_batch else [axis.name]
    computed = {name: {each: placement_text(lying.computed) for each in planned} for name, lying in found.items()}
    stored = {
        name: {**{each: _stored_text(lying, each) for each in [*names, *planned]}, **_cut(computed[name])}
        for name, lying in found.items()
    }
    alike = next(iter(stored.values()), {}) if len(set(map(_named, stored.values()))) == 1 else {}
    rules = [*_rules(computed, "", dict.fromkeys(planned, "R")), *_rules(stored, f"{STORED}:", alike, others)]
    for name, lies in others.items():
        texts = {each: rule_text(placement) for each, placement in lies.items()}
        rules += [_rule(f"{STORED}:", escape(name), texts)] if texts else []
    return PlanSpec(base=BASE, rules=(*rules, *spec.rules), found=True)


def _cut(computed: Mapping[str, str]) -> dict[str, str]:
    """The axes on which a parameter lies as it is computed with."""
    return {axis: text for axis, text in computed.items() if text != "R"}


def _stored_text(lying: Lying, axis: str) -> str:
    return f"S({lying.stored[axis]})" if axis in lying.stored else "R"


def _rules(
    by_name: Mapping[str, dict[str, str]], prefix: str, usual: dict[str, str], others: Collection[str] = ()
) -> list[PlanRule]:
    """Rules for all, for kinds that differ from that, and for parameters that differ from their kind.

    The last rule that matches counts. No pattern matches ``others``.
    """
    kinds: dict[str, Counter[Named]] = {}
    for name, placements in by_name.items():
        kinds.setdefault(fxn.kind_of(name), Counter())[_named(placements)] += 1
    usual = {} if others else usual
    of_kind = {_of_kind(kind): dict(counted.most_common(1)[0][0]) for kind, counted in kinds.items()}
    of_kind = {kind: own for kind, own in of_kind.items() if not any(fnmatchcase(name, kind) for name in others)}
    rules = [_rule(prefix, "*", usual)] if usual else []
    rules += [_rule(prefix, kind, placements) for kind, placements in of_kind.items() if placements != usual]
    # A kind's pattern may match names of another kind, whose parts may hold dots.
    return [*rules, *(_rule(prefix, escape(name), own) for name, own in by_name.items() if own != _last(rules, name))]


def _of_kind(kind: str) -> str:
    """The pattern of a kind, whose numbers are asterisks: what else patterns know may be part of names."""
    return escape(kind).replace("[*]", "*")


def _last(rules: Sequence[PlanRule], name: str) -> dict[str, str]:
    """What the rules say of a parameter, on each axis the last of them that matches."""
    found: dict[str, str] = {}
    for rule in rules:
        if fnmatchcase(name, rule.pattern):
            found.update(rule.placements)
    return found


def _named(placements: Mapping[str, str]) -> Named:
    return tuple(placements.items())


def _rule(prefix: str, pattern: str, placements: Mapping[str, str]) -> PlanRule:
    kind = prefix.removesuffix(":") or "parameter"
    return PlanRule(key=prefix + pattern, kind=kind, pattern=pattern, placements=tuple(placements.items()))


def _solved(axis: PlanAxis, solution: Solution, time_us: float) -> SolvedProblem:
    """For a plan of ``time_us``, the solver's best or another."""
    return SolvedProblem(
        axis=axis.name,
        time_us=time_us,
        bound_us=solution.bound_us,
        columns=solution.columns,
        rows=solution.rows,
        seconds=solution.seconds,
    )


def _note(solved: SolvedProblem) -> str:
    return (
        f"plan auto on {solved.axis}: {solved.time_us / 1e3:.2f} ms of computing and moving on one rank (predicted), "
        f"at most {100 * solved.gap:.2f} % above the best; {solved.columns} columns and {solved.rows} rows, "
        f"solved in {solved.seconds:.1f} s"
    )


def _idle(axis: PlanAxis, chosen: Mapping[fx.Node, Candidate]) -> str:
    """What is to be said where cutting anything would take longer than to compute it on each rank."""
    placements = (lies for each in chosen.values() for lies in (*each.inputs, *each.outputs) if lies is not None)
    if axis.shards_batch or not all(lies.is_replicate() for lies in placements):
        return ""
    return (
        f"; nothing is cut by {axis.name}, each of its {axis.size} ranks computes the same: as ranks of dp_shard they "
        "would take rows of their own"
    )


def _taken_for(unrated: Sequence[torch.dtype], hardware: HardwareSpec) -> str:
    """What was assumed of products in dtypes without a peak."""
    pairs = [f"in {dtype} to be as fast as in {hardware.rated_dtype(dtype)}" for dtype in unrated]
    named = ", ".join(pairs).replace("torch.", "")
    return f"; {hardware.name} has no peak for some products: taken {named}" if named else ""
