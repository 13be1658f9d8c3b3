"""One axis of a graph as a ``Problem``: candidates of calls and placements of parameters, over equal blocks at once."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import is_shard, placement_text
from lightning_autoparallel.plan.axis import (
    AxisToPlan,
    Producer,
    may_leave,
    parameter_may_move,
    producer_of,
    split_factors,
)
from lightning_autoparallel.plan.axis_times import AxisTimes
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.plan.parameter_alternatives import FreeParameter, Lying
from lightning_autoparallel.plan.problem import Choice, Limit, Overlap, Problem, Reader, Value
from lightning_autoparallel.plan.strided_reach import reached
from lightning_autoparallel.plan.tied_blocks import Class, Part, Repeats, repeats

# The part of moves that computing waits for beside which parameters are sent. What lies beside longer sending is not
# free: it would be no matter how much of it there is.
_HIDES = 0.95
# What the last move of a block takes more than one before all of it: of two that are alike, more is computed behind the
# earlier one that may hide it.
_LATER = 1e-2
_MOST_SETS = 3  # of what a block recomputes, that are looked at
# Why a value never goes from one placement to another, though something leads there.
_LEAVES = "what leaves the step is gathered or reduced, not turned from one dim to another"
_STAYS = "what depends on parameters only stays as they lie"
_SUMMED_LATE = "ranks add it up behind its cast, in the wider type"


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Who wants a value, before nodes that decide alike are one: ``never`` holds placements, not numbers, and why."""

    reader: Class
    wants: tuple[Placement, ...]
    never: frozenset[tuple[Placement, Placement, str]]


@dataclass
class AxisChoices:
    """The problem of an axis, and what its alternatives mean.

    ``free`` are placeholders that ``axis.pins`` does not fix. Where ``fixed`` says what every call does, parameters are
    all that there is to choose. They, what is ``saved`` for the backward, and the largest of the sets of what is
    ``recomputed`` may have ``room_bytes`` on a rank.
    """

    axis: AxisToPlan
    times: AxisTimes
    free: Mapping[fx.Node, FreeParameter]
    fixed: Mapping[fx.Node, Candidate] | None = None
    room_bytes: float = math.inf
    saved: tuple[Producer, ...] = ()
    recomputed: tuple[tuple[Producer, ...], ...] = ()
    tied: bool = True
    _candidates: dict[fx.Node, tuple[Candidate, ...]] = field(default_factory=dict)
    _derived: set[fx.Node] = field(default_factory=set)  # what depends on parameters only

    def __post_init__(self) -> None:
        factors: dict[fx.Node, tuple[int, ...]] = {}
        self._derived = set(self.axis.parameters)
        for node in self._nodes:
            arguments = self._arguments(node)
            arriving = tuple(sorted({1, *(factor for source, _ in arguments for factor in factors[source])}))
            if arguments and all(source in self._derived for source, _ in arguments):
                self._derived.add(node)
            self._candidates[node] = self._of(node, arriving)
            factors[node] = split_factors(self._candidates[node])
        self._candidates = reached(self._candidates, self._arguments)

    @cached_property
    def _nodes(self) -> list[fx.Node]:
        return [node for node in self.axis.graph.nodes if node.op != "output" and not fxn.is_getitem(node)]

    def _arguments(self, node: fx.Node) -> list[Producer]:
        return [producer_of(argument) for argument in fxn.tensor_arguments(node)] if node.op != "placeholder" else []

    def _of(self, node: fx.Node, arriving: tuple[int, ...]) -> tuple[Candidate, ...]:
        pin = self.axis.pins.get(node)
        if node in self.free:
            return self.free[node].candidates
        if self.fixed is not None:
            return (self.fixed[node],)
        if node.op == "placeholder":
            assert pin is not None
            return (_pinned(pin, 0),)
        known = self.axis.table.of(node, arriving, self.axis.cut_already(node))
        fitting = tuple(candidate for candidate in known if self.axis.fits(node, candidate))
        if pin is None:
            return fitting
        return tuple(c for c in fitting if c.outputs == (pin,)) or (_pinned(pin, len(self._arguments(node))),)

    @cached_property
    def _repeats(self) -> Repeats:
        names = {node: parameter.name for node, parameter in self.free.items()}
        return repeats(self._nodes, names, self._signature, self.tied)

    @property
    def _classes(self) -> Mapping[fx.Node, Class]:
        return self._repeats.classes

    def _signature(self, node: fx.Node) -> Hashable:
        shapes = tuple(None if value is None else (tuple(value.shape), value.dtype) for value in fxn.values(node))
        ways = tuple((candidate.outputs, candidate.inputs) for candidate in self._candidates[node])
        return str(node.target) if node.op != "placeholder" else "", shapes, ways, node in self._derived

    @cached_property
    def _numbers(self) -> dict[Class, int]:
        """Of choices: those of nodes first, then those of values that may leave in several placements."""
        return {each: number for number, each in enumerate(dict.fromkeys(self._classes.values()))}

    def problem(self) -> Problem:
        """All alternatives and moves."""
        leaving = self._leaving() if self.fixed is None else {}
        numbers = dict(self._numbers)
        for reading in (reading for readings in leaving.values() for reading in readings):
            numbers.setdefault(reading.reader, len(numbers))
        wants = {r.reader: len(r.wants) for readings in leaving.values() for r in readings}
        own = [self._choice(each, nodes) for each, nodes in self._members().items()]
        more = [Choice(name=str(each), times_us=(0.0,) * wants[each]) for each in list(numbers)[len(own) :]]
        values = self._values(leaving, numbers) if self.fixed is None else {}
        overlaps, limits = tuple(self._overlaps(values)), tuple(self._limits())
        return Problem(choices=(*own, *more), values=tuple(values.values()), overlaps=overlaps, limits=limits)

    def alternatives(self, node: fx.Node) -> tuple[int, tuple[Candidate, ...]]:
        """The number of a node's choice, and its alternatives in their order."""
        return self._numbers[self._classes[node]], self._candidates[node]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Every call and placeholder, in graph order."""
        return tuple(self._nodes)

    @property
    def own(self) -> int:
        """How many choices are those of calls and placeholders: they are numbered first."""
        return len(self._numbers)

    def lying(self, taken: Sequence[int]) -> dict[str, Lying]:
        """How each free parameter lies in a solution, by name."""
        numbers = {node: taken[self._numbers[self._classes[node]]] for node in self.free}
        return {parameter.name: parameter.ways[numbers[node]] for node, parameter in self.free.items()}

    def chosen(self, taken: Sequence[int]) -> dict[fx.Node, Candidate]:
        """What each call and placeholder does in a solution."""
        return {node: self._candidates[node][taken[self._numbers[self._classes[node]]]] for node in self._nodes}

    def _overlaps(self, values: Mapping[Producer, Value]) -> Iterator[Overlap]:
        """What parameters of a part of the model send while that computes and moves values, forward and backward."""
        parts = {part: [node for node in self._nodes if self._repeats.parts[node] == part] for part in self._parts()}
        for part, nodes in parts.items():
            for backward in (False, True):
                sent: dict[int, tuple[float, ...]] = {}
                computed: dict[int, tuple[float, ...]] = {}
                for node in nodes:
                    number = self._numbers[self._classes[node]]
                    if node in self.free:
                        ways = self.free[node].ways
                        _add(sent, number, [way.reduced_us if backward else way.gathered_us for way in ways])
                    elif node.op != "placeholder" and fxn.is_backward(node) == backward:
                        _add(computed, number, [self.times.of(node, c) for c in self._candidates[node]])
                moves = {
                    number: _HIDES
                    for number, (node, _) in enumerate(values)
                    if self._repeats.parts[node] == part and fxn.is_backward(node) == backward
                }
                if sent:
                    name = f"{part} {'backward' if backward else 'forward'}"
                    yield Overlap(name=name, sent_us=sent, computed_us=computed, moves=moves)

    def _limits(self) -> Iterator[Limit]:
        """What stays on a rank: parameters with what is kept of them, and what the backward will read."""
        sizes: dict[int, tuple[float, ...]] = {}
        for node, parameter in self.free.items():
            _add(sizes, self._numbers[self._classes[node]], [way.size_bytes for way in parameter.ways])
        for producer in self.saved:
            _add(sizes, self._numbers[self._classes[producer[0]]], self.producer_bytes(producer))
        yield Limit(
            name="what stays on a rank",
            sizes_bytes=sizes,
            most_bytes=self.room_bytes,
            passing_bytes=tuple(self._passing()),
        )

    def producer_bytes(self, producer: Producer) -> list[float]:
        """Of a value on a rank, for each alternative of the call that makes it."""
        node, index = producer
        size = self.axis.size_bytes(producer)
        return [size / (self.times.size if is_shard(c.outputs[index]) else 1) for c in self._candidates[node]]

    def _passing(self) -> Iterator[dict[int, tuple[float, ...]]]:
        """Of each block, one for those that are tied: its parameters while it is computed, and what is recomputed."""
        parts: dict[Part | None, dict[Class, fx.Node]] = defaultdict(dict)
        for node in self.free:
            parts[self._repeats.parts[node]].setdefault(self._classes[node], node)
        recomputed = self._recomputed_sets()
        for part in dict.fromkeys((*parts, *recomputed)):
            for again in recomputed.get(part) or [()]:
                sizes: dict[int, tuple[float, ...]] = {}
                for each, node in parts[part].items():
                    _add(sizes, self._numbers[each], [way.passing_bytes for way in self.free[node].ways])
                for producer in again:
                    _add(sizes, self._numbers[self._classes[producer[0]]], self.producer_bytes(producer))
                yield sizes

    def _recomputed_sets(self) -> dict[Part | None, list[tuple[Producer, ...]]]:
        """The largest sets of what is recomputed, by the part that most of each is of; of those that are alike one."""
        found: dict[Part | None, dict[Hashable, tuple[float, tuple[Producer, ...]]]] = defaultdict(dict)
        for again in self.recomputed:
            of_parts: Counter[Part | None] = Counter()
            for producer in again:
                of_parts[self._repeats.parts[producer[0]]] += self.axis.size_bytes(producer)
            alike = frozenset(Counter((self._classes[node], index) for node, index in again).items())
            ((part, _),) = of_parts.most_common(1)
            found[part].setdefault(alike, (of_parts.total(), again))
        return {
            part: [again for _, again in sorted(sets.values(), key=lambda one: -one[0])[:_MOST_SETS]]
            for part, sets in found.items()
        }

    def _parts(self) -> list[Part | None]:
        return list(dict.fromkeys(self._repeats.parts.values()))

    def _members(self) -> dict[Class, list[fx.Node]]:
        found: dict[Class, list[fx.Node]] = defaultdict(list)
        for node in self._nodes:
            found[self._classes[node]].append(node)
        return found

    def _choice(self, each: Class, nodes: Sequence[fx.Node]) -> Choice:
        count = len(self._candidates[nodes[0]])
        times = [sum(self.times.of(node, self._candidates[node][k]) for node in nodes) for k in range(count)]
        return Choice(name=nodes[0].name, times_us=tuple(times))

    def _leaving(self) -> dict[Producer, list[_Reading]]:
        """Outputs of the graph as readers: of parameters' gradients those parameters, of others one of their own."""
        ends = {parameter.gradient: node for node, parameter in self.free.items() if parameter.gradient is not None}
        found: dict[Producer, list[_Reading]] = defaultdict(list)
        for position, (node, allowed) in enumerate(self.axis.sinks):
            parameter = ends.get(node)
            wants = allowed
            reader: Class = ("output", position)
            if parameter is not None:
                reader, wants = self._classes[parameter], tuple(way.end for way in self.free[parameter].ways)
            producer = producer_of(node)
            never = frozenset((s, t, _LEAVES) for s in self._made(producer) for t in wants if not may_leave(s, t))
            found[producer].append(_Reading(reader=reader, wants=tuple(wants), never=never))
        return found

    def _made(self, producer: Producer) -> list[Placement]:
        node, index = producer
        return [placement for c in self._candidates[node] if (placement := c.outputs[index]) is not None]

    def _readings(self) -> dict[Producer, list[_Reading]]:
        found: dict[Producer, list[_Reading]] = defaultdict(list)
        for node in self._nodes:
            for position, producer in enumerate(self._arguments(node)):
                wants = tuple(candidate.inputs[position] for candidate in self._candidates[node])
                never = frozenset(
                    (s, t, why)
                    for s in self._made(producer)
                    for t in wants
                    if (why := self._why_not(node, producer, s, t)) is not None
                )
                found[producer].append(_Reading(reader=self._classes[node], wants=wants, never=never))
        return found

    def _why_not(self, node: fx.Node, producer: Producer, made: Placement, wanted: Placement) -> str | None:
        if producer[0] in self._derived and not parameter_may_move(producer, made, wanted, self.axis.is_batch_axis):
            return _STAYS
        is_early = node in self.axis.reduced_late and made.is_partial() and not wanted.is_partial()
        return _SUMMED_LATE if is_early else None

    def _values(
        self, leaving: Mapping[Producer, list[_Reading]], numbers: Mapping[Class, int]
    ) -> dict[Producer, Value]:
        """By the first of those that are alike."""
        readings = self._readings()
        for producer, more in leaving.items():
            readings[producer].extend(more)
        alike: Counter[Hashable] = Counter()
        first: dict[Hashable, tuple[Producer, list[_Reading]]] = {}
        for producer, readers in readings.items():
            if not self._made(producer):
                continue
            node, index = producer
            key = self._classes[node], index, self.axis.size_bytes(producer), frozenset(readers)
            alike[key] += 1
            first.setdefault(key, (producer, list(dict.fromkeys(readers))))
        return {first[key][0]: self._value(*first[key], count, numbers) for key, count in alike.items()}

    def _value(
        self, producer: Producer, readers: Sequence[_Reading], count: int, numbers: Mapping[Class, int]
    ) -> Value:
        node, index = producer
        made = self._made(producer)
        known = list(dict.fromkeys([*made, *(target for reader in readers for target in reader.wants)]))
        number = {placement: i for i, placement in enumerate(known)}
        size = self.axis.size_bytes(producer)
        beside = self.times.beside(node, index)
        count_and_more = count * (1 + _LATER * self._repeats.places.get(node, 0.0))
        moves = tuple(tuple(count_and_more * self.times.move(s, t, size, beside) for t in known) for s in known)
        return Value(
            name=self.free[node].name if node in self.free else f"{node.name}.{index}",
            choice=numbers[self._classes[node]],
            made=tuple(number[placement] for placement in made),
            readers=tuple(
                Reader(
                    choice=numbers[reader.reader],
                    wants=tuple(number[target] for target in reader.wants),
                    never={(number[s], number[t]): why for s, t, why in reader.never},
                )
                for reader in readers
            ),
            moves_us=moves,
            texts=tuple(map(placement_text, known)),
        )


def _add(total: dict[int, tuple[float, ...]], number: int, more: Sequence[float]) -> None:
    before = total.get(number, (0.0,) * len(more))
    total[number] = tuple(a + b for a, b in zip(before, more, strict=True))


def _pinned(placement: Placement, arguments: int) -> Candidate:
    return Candidate(outputs=(placement,), inputs=(placement,) * arguments, time_us=0.0)
