"""What a pattern matches in a graph, and which rule or base plan places parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import fx

from lightning_autoparallel.config import STORED, PlanRule, PlanSpec
from lightning_autoparallel.contracts import CapturedGraph, Explained, Explanation, PlanAxis, ShardingPlan
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import placement_text
from lightning_autoparallel.plan.parameter_storage import rule_placement

_NAMED = 6  # examples in an error


def matching(captured: CapturedGraph, pattern: str) -> tuple[dict[fx.Node, str], list[fx.Node]]:
    """Parameters by their placeholders, and calls by their own name or their module's path, that a glob matches.

    Raises:
        ConfigError: there are none.
    """
    graph = captured.graph_module.graph
    inputs = zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    names = {node: item.name for node, item in inputs if item.kind == "parameter"}
    called = [node for node in graph.nodes if node.op == "call_function" and not fxn.is_getitem(node)]
    parameters = {node: name for node, name in names.items() if fnmatchcase(name, pattern)}
    calls = [n for n in called if any(fnmatchcase(each, pattern) for each in (n.name, fxn.module_path(n)) if each)]
    if not parameters and not calls:
        paths = (fxn.module_path(node) for node in called)
        kinds = dict.fromkeys(fxn.kind_of(name) for name in (*names.values(), *paths) if name)
        raise ConfigError(
            f"--explain {pattern!r} matches no parameter, no module and no call of {captured.name}: give a glob over "
            f"names such as {', '.join(list(kinds)[:_NAMED])}, or {called[0].name if called else 'the name of a call'}"
        )
    return parameters, calls


def placing_rule(
    rules: Sequence[PlanRule], kind: str, name: str, shape: Sequence[int], axis: PlanAxis
) -> PlanRule | None:
    """The rule of a kind that says how ``name`` lies on ``axis``: the last one that matches."""
    said = rule_placement([rule for rule in rules if rule.kind == kind], name, shape, axis)
    return None if said is None else said[1]


def explain_rules(captured: CapturedGraph, plan: ShardingPlan, spec: PlanSpec, pattern: str) -> Explanation:
    """Which rule, or the base plan, places each parameter that ``pattern`` matches, on every axis.

    Raises:
        ConfigError: it matches nothing.
    """
    parameters, calls = matching(captured, pattern)
    counted: Counter[tuple[str, str, str]] = Counter()
    for node, name in parameters.items():
        shape = tuple(node.meta["val"].shape)
        pairs = list(zip(plan.axes, plan.parameters[name], strict=True))
        kept = ", ".join(f"{axis.name}: {placement_text(placement)}" for axis, placement in pairs)
        because = "; ".join(f"{axis.name}: {_placed_by(spec, name, shape, axis)}" for axis in plan.axes)
        counted[fxn.kind_of(name), f"kept {{{kept}}}", because or "one process: nothing is cut"] += 1
    choices = tuple(
        Explained(what=kind, count=count, taken=kept, note=because) for (kind, kept, because), count in counted.items()
    )
    said_by = "rules and base place parameters" if spec.file is None else f"{spec.file} says where parameters lie"
    note = f"plan {plan.name} is not searched for: {said_by}"
    if calls:
        note += f", and each of {len(calls)} calls that match does what takes least time with them"
    return Explanation(pattern=pattern, choices=choices, note=note)


def _placed_by(spec: PlanSpec, name: str, shape: Sequence[int], axis: PlanAxis) -> str:
    found = [placing_rule(spec.rules, kind, name, shape, axis) for kind in ("parameter", STORED)]
    keys = " and ".join(f"rule '{rule.key}'" for rule in found if rule is not None)
    return keys or f"base plan '{spec.base}'"
