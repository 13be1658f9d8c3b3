"""Why a plan places parameters and calls as it does: what was taken, and what else would cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from lightning_autoparallel.config import PlanRule
from lightning_autoparallel.contracts import CapturedGraph, Explained, Explanation, OtherWay, PlanAxis
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import placed_text, placement_text
from lightning_autoparallel.plan.automatic import Search
from lightning_autoparallel.plan.explain_rules import matching, placing_rule
from lightning_autoparallel.plan.parameter_alternatives import FreeParameter, Lying, rule_against
from lightning_autoparallel.plan.what_if import MOST_SOLVES, OtherSolutions

_SHOWN = 3  # alternatives of each choice


@dataclass(frozen=True, kw_only=True)
class SearchedAxis:
    """What was solved on ``axis``, and how parameters might lie there before rules said of some: ``every``."""

    captured: CapturedGraph
    search: Search
    every: Mapping[fx.Node, FreeParameter]
    rules: Sequence[PlanRule]
    axes: Sequence[PlanAxis]
    axis: PlanAxis

    @cached_property
    def staying_bytes(self) -> float:
        """Of parameters that were free, with what is kept of them, and of what the backward reads."""
        return self.staying_with(self.search.taken)

    def staying_with(self, taken: Sequence[int]) -> float:
        """The same in another solution."""
        return sum(limit.staying_bytes(taken) for limit in self.search.problem.limits)

    def ways(self, node: fx.Node) -> tuple[int, list[str]]:
        """The number of a node's choice, and its alternatives as text; equal ones differ in what nobody asks for."""
        number, candidates = self.search.choices.alternatives(node)
        if node in self.search.choices.free:
            return number, [self.lying_text(way) for way in self.search.choices.free[node].ways]
        return number, [placed_text(candidate.inputs, candidate.outputs) for candidate in candidates]

    def lying_text(self, way: Lying) -> str:
        """``computed R on tp, kept {dp_shard: S(0), tp: S(0)}``."""
        kept = {axis.name: f"S({way.stored[axis.name]})" if axis.name in way.stored else "R" for axis in self.axes}
        if not self.axis.shards_batch and self.axis.name not in way.stored:
            kept[self.axis.name] = placement_text(way.computed)
        computed = "" if self.axis.shards_batch else f"computed {placement_text(way.computed)} on {self.axis.name}, "
        return f"{computed}kept {{{', '.join(f'{name}: {text}' for name, text in kept.items())}}}"


def explain_found(searched: SearchedAxis, pattern: str, most_solves: int = MOST_SOLVES) -> Explanation:
    """What was taken for parameters and calls that ``pattern`` matches, and what the runners-up would cost more.

    Raises:
        ConfigError: it matches nothing.
    """
    parameters, calls = matching(searched.captured, pattern)
    others = OtherSolutions(searched.search.problem, searched.search.taken, most_solves)
    free = [node for node in parameters if node in searched.search.choices.free]
    pinned = [node for node in parameters if node not in searched.search.choices.free]
    explained = [_explained(searched, others, what, group) for what, group in _groups(searched, free, parameters)]
    explained += _pinned(searched, {node: parameters[node] for node in pinned})
    costly = sorted(_groups(searched, calls, {}), key=lambda group: -_time_us(searched, group[1]))
    explained += [_explained(searched, others, what, group) for what, group in costly]
    cut_off = f", cut off after {most_solves}: name fewer" if others.is_spent else ""
    rows = [axis.name for axis in searched.axes if axis.shards_batch and axis is not searched.axis]
    settled = f"; over {', '.join(rows)} every call computes a rank's rows" if rows else ""
    taken = "" if searched.search.is_best else " as the solver reckons, and was taken behind the passes"
    note = (
        f"on {searched.axis.name}: each alternative is fixed and everything else solved again ({others.asked} solves"
        f"{cut_off}); times of one step on one rank (predicted), bytes kept of parameters, gradients, moments, and "
        f"activations that the backward reads; the plan itself takes at most {searched.search.solved.gap_us:.1f} us "
        f"more than the best{taken}{settled}"
    )
    return Explanation(pattern=pattern, choices=tuple(explained), note=note)


def _groups(
    searched: SearchedAxis, nodes: Sequence[fx.Node], names: Mapping[fx.Node, str]
) -> list[tuple[str, list[fx.Node]]]:
    """Nodes that are alike in all blocks and are placed alike, and what to call them."""
    seen: Counter[Hashable] = Counter()
    found: dict[Hashable, list[fx.Node]] = {}
    for node in nodes:
        number, ways = searched.ways(node)
        path = names.get(node) or fxn.module_path(node) or ""
        call = "" if node in names else fxn.call_of(node)
        place = path, call, fxn.is_backward(node)
        what = f"{fxn.kind_of(path)} {call}{' (backward)' if place[2] else ''}".strip()
        found.setdefault((what, seen[place], tuple(ways), ways[searched.search.taken[number]]), []).append(node)
        seen[place] += 1
    return [(str(key[0]), group) for key, group in found.items()]  # type: ignore[index]


def _time_us(searched: SearchedAxis, nodes: Sequence[fx.Node]) -> float:
    numbers = {searched.ways(node)[0] for node in nodes}
    return sum(searched.search.problem.choices[number].times_us[searched.search.taken[number]] for number in numbers)


def _only(searched: SearchedAxis, node: fx.Node) -> str:
    """Why a choice has one alternative."""
    computes_rows = searched.axis.shards_batch and node not in searched.search.choices.free
    return "every call computes a rank's rows" if computes_rows else "there is no other way"


def _explained(searched: SearchedAxis, others: OtherSolutions, what: str, nodes: Sequence[fx.Node]) -> Explained:
    number, ways = searched.ways(nodes[0])
    taken = ways[searched.search.taken[number]]
    found: list[OtherWay] = []
    unsolved = 0
    for way in dict.fromkeys(ways):
        if way == taken:
            continue
        fixed = {choice: {k for k, each in enumerate(own) if each == way} for choice, own in map(searched.ways, nodes)}
        other = others.with_fixed(fixed)
        if other is None:
            unsolved += 1
        elif other.taken is None:
            found.append(OtherWay(way=way, ruled_out=other.ruled_out))
        else:
            more_bytes = searched.staying_with(other.taken) - searched.staying_bytes
            proved = other.proved and not (other.more_us < 0 and searched.search.is_best)  # that is the solver's gap
            found.append(OtherWay(way=way, more_us=other.more_us, more_bytes=more_bytes, proved=proved))
    found.sort(key=lambda one: one.more_us)
    found += _against_rules(searched, nodes[0])
    note = _edge_note(searched, nodes[0]) or ("" if found or unsolved else _only(searched, nodes[0]))
    return Explained(
        what=what,
        count=len(nodes),
        taken=taken,
        others=tuple(found[:_SHOWN]),
        further=len(found[_SHOWN:]),
        unsolved=unsolved,
        note=note,
    )


def _against_rules(searched: SearchedAxis, node: fx.Node) -> Iterator[OtherWay]:
    """Ways of a parameter that rules do not leave it."""
    if node in searched.every:
        parameter, shape = searched.every[node], tuple(node.meta["val"].shape)
        for text, way in {searched.lying_text(way): way for way in parameter.ways}.items():
            rule = rule_against(way, parameter.name, shape, searched.rules, searched.axes)
            if rule is not None:
                yield OtherWay(way=text, ruled_out=f"pinned by rule '{rule.key}'")


def _edge_note(searched: SearchedAxis, node: fx.Node) -> str:
    """The rule that pins a value at the edge of a module, if any does."""
    edge = fxn.edge_of(node) if node.op == "call_function" else None
    if edge is None or node not in searched.search.choices.axis.pins:
        return ""
    kind, _, path = edge.partition(":")
    rule = placing_rule(searched.rules, kind, path, tuple(node.meta["val"].shape), searched.axis)
    return "" if rule is None else f"pinned by rule '{rule.key}'"


def _pinned(searched: SearchedAxis, names: Mapping[fx.Node, str]) -> Iterator[Explained]:
    """Parameters that rules leave no choice."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for node, name in names.items():
        pin = searched.search.choices.axis.pins[node]
        shape = tuple(node.meta["val"].shape)
        kinds = ("parameter", "stored")
        said = [(a.name, placing_rule(searched.rules, k, name, shape, a)) for a in searched.axes for k in kinds]
        rules = [(axis, rule) for axis, rule in said if rule is not None]
        keys = ", ".join(dict.fromkeys(f"'{rule.key}'" for _, rule in rules))
        stored = ", ".join(f"{axis}: {dict(r.placements)[axis]}" for axis, r in rules if r.kind == "stored")
        kept = f", kept {{{stored}}}" if stored else ""
        text = f"computed {placement_text(pin)} on {searched.axis.name}{kept}"
        counted[fxn.kind_of(name), text, f"pinned by rule {keys}"] += 1
    for (kind, text, note), count in counted.items():
        yield Explained(what=kind, count=count, taken=text, note=note)
