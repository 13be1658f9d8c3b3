"""``plan="auto"``: where parameters lie on an axis, and how everything is computed there, as one problem."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.config import PlanRule, PlanSpec
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import placement_text
from lightning_autoparallel.plan.axis_choices import AxisChoices
from lightning_autoparallel.plan.axis_times import AxisTimes
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.plan.integer_programme import Solution, solve
from lightning_autoparallel.plan.parameter_alternatives import FreeParameter
from lightning_autoparallel.plan.solve import AxisProblem

BASE = "fsdp"  # what parameters do on the axes that share out the batch


@dataclass(frozen=True, kw_only=True)
class FoundAxis:
    """What is done on an axis: by every call, and with every parameter whose placement was to be found."""

    choices: Mapping[fx.Node, Candidate]
    parameters: Mapping[str, Placement]
    note: str


def find_axis(
    problem: AxisProblem, axis: PlanAxis, free: Mapping[fx.Node, FreeParameter], costs: CostModel
) -> FoundAxis:
    """The best of all combinations on one axis.

    Raises:
        InfeasiblePlanError: none goes together.
    """
    group = costs.groups[axis.group_name]
    times = AxisTimes(problem.graph, axis.size, problem.cut_already, group, costs.hardware)
    pins = {node: pin for node, pin in problem.pins.items() if node not in free}
    known = dataclasses.replace(problem, pins=pins)
    choices = AxisChoices(known, times, free)
    solution = solve(choices.problem())
    chosen = choices.chosen(solution.taken)
    placed: dict[str, Placement] = {}
    for node, parameter in free.items():
        (placement,) = chosen[node].outputs
        assert placement is not None
        placed[parameter.name] = placement
    return FoundAxis(choices=chosen, parameters=placed, note=_note(axis, solution))


def found_spec(spec: PlanSpec, found: Sequence[tuple[PlanAxis, FoundAxis]]) -> PlanSpec:
    """Base and rules that place parameters as was found: one rule for a kind, and one for each parameter beside it."""
    by_name: dict[str, dict[str, str]] = {}
    for axis, one in found:
        for name, placement in one.parameters.items():
            by_name.setdefault(name, {})[axis.name] = placement_text(placement)
    kinds: dict[str, Counter[tuple[tuple[str, str], ...]]] = {}
    for name, placements in by_name.items():
        kinds.setdefault(fxn.kind_of(name), Counter())[tuple(placements.items())] += 1
    usual = {kind: dict(counted.most_common(1)[0][0]) for kind, counted in kinds.items()}
    # The last rule that matches counts; the first one names the axes.
    whole = {axis.name: "R" for axis, _ in found}
    rules = [_rule("*", whole)] if whole else []
    rules += [_rule(kind, placements) for kind, placements in usual.items() if placements != whole]
    rules += [_rule(name, own) for name, own in by_name.items() if own != usual[fxn.kind_of(name)]]
    return PlanSpec(base=BASE, rules=(*rules, *spec.rules))


def _rule(pattern: str, placements: Mapping[str, str]) -> PlanRule:
    return PlanRule(key=pattern, kind="parameter", pattern=pattern, placements=tuple(placements.items()))


def _note(axis: PlanAxis, solution: Solution) -> str:
    gap = (solution.time_us - solution.bound_us) / solution.time_us if solution.time_us else 0.0
    return (
        f"plan auto on {axis.name}: {solution.time_us / 1e3:.2f} ms of computing and moving on one rank (predicted), "
        f"at most {100 * max(gap, 0.0):.2f} % above the best; {solution.columns} columns and {solution.rows} rows, "
        f"solved in {solution.seconds:.1f} s"
    )
