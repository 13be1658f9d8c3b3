"""Choose one candidate per node on one axis, at least redistribution plus computation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.errors import InfeasiblePlanError
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
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.torch_compat.sharding import split_factor_of


@dataclass
class _State:
    """Choices so far, and for every produced value how many consumers want it in which placement."""

    axis: AxisToPlan
    candidates: dict[fx.Node, tuple[Candidate, ...]] = field(default_factory=dict)
    arguments: dict[fx.Node, tuple[Producer, ...]] = field(default_factory=dict)
    consumers: dict[Producer, list[tuple[fx.Node, int]]] = field(default_factory=dict)
    choice: dict[fx.Node, Candidate] = field(default_factory=dict)
    wanted: dict[Producer, Counter[Placement]] = field(default_factory=dict)
    sinks: dict[Producer, list[tuple[Placement, ...]]] = field(default_factory=dict)
    edge_times: dict[Producer, dict[tuple[Placement, Placement], float]] = field(default_factory=dict)
    derived: set[fx.Node] = field(default_factory=set)  # what depends on parameters only
    drawn: set[fx.Node] = field(default_factory=set)  # what depends on draws only


def search_axis(axis: AxisToPlan) -> dict[fx.Node, Candidate]:
    """A candidate for every call and placeholder of the graph.

    Local search: a greedy walk, then sweeps backward and forward in which each node takes the candidate that is best
    for its neighbours, until nothing changes. Redistributions that several consumers share are counted once. On a batch
    axis a call that can compute with the rows as they are given moves none for itself. Where that does not bind, no
    change raises the total; ``max_sweeps`` bounds moves between equals. The result is a local optimum.
    """
    state = _State(axis)
    for producer, allowed in ((producer_of(node), allowed) for node, allowed in axis.sinks):
        state.sinks.setdefault(producer, []).append(allowed)
    calls = _prepare(state)
    for node in calls:
        _choose(state, node, forward_only=True)
    pending = set(calls)
    for sweep in range(axis.max_sweeps):
        order = reversed(calls) if sweep % 2 == 0 else iter(calls)
        pending = _sweep(state, order, pending) or _move_together(state, calls)
        if not pending:
            break
    _check_feasible(state, calls)
    return state.choice


def _check_feasible(state: _State, calls: list[fx.Node]) -> None:
    for node in calls:
        if _can_compute(state, node, state.choice[node]):
            continue
        given = [state.choice[source].outputs[index] for source, index in state.arguments[node]]
        module = fxn.module_path(node) or "the step itself"
        raise InfeasiblePlanError(
            f"{node.target} in {module}, {fxn.describe(node)}, cannot compute with inputs placed as "
            f"{[None if p is None else placement_text(p) for p in given]} as the rules have them: parameters are never "
            "gathered over an axis that a rule names; change the rules of its parameters"
        )


def _sweep(state: _State, order: Iterable[fx.Node], pending: set[fx.Node]) -> set[fx.Node]:
    """Choose again for the ``pending`` nodes and those that their changes touch; what is left for the next sweep."""
    touched = set(pending)
    for node in order:
        if node in touched:
            touched.discard(node)
            if _choose(state, node, forward_only=False):
                touched |= _neighbours(state, node)
    return touched


def _neighbours(state: _State, node: fx.Node) -> set[fx.Node]:
    """The calls whose best candidate may be another one once ``node`` has changed."""
    found = {consumer for i in range(len(state.choice[node].outputs)) for consumer, _ in _readers(state, (node, i))}
    for producer in state.arguments[node]:
        found.update(consumer for consumer, _ in _readers(state, producer))
        if producer[0] in state.arguments:
            found.add(producer[0])
    found.discard(node)
    return found


def _readers(state: _State, producer: Producer) -> list[tuple[fx.Node, int]]:
    return state.consumers.get(producer, [])


def _move_together(state: _State, calls: list[fx.Node]) -> set[fx.Node]:
    """Moves that no single node can make, where they are cheaper; the nodes to look at again.

    A consumer that keeps a sum partial could not read a reduced one, and one that must not reduce it could read no
    other: the node moves, and its consumers follow. So do those of a draw that start replicated with it.
    """
    position = {node: i for i, node in enumerate(calls)}
    improved: set[fx.Node] = set()
    for node in calls:
        for candidate in _moves_together(state, node):
            if math.isinf(_time_us(state, node, candidate, forward_only=True, shared=False)):
                continue
            before = {node: state.choice[node]}
            _set_instead(state, node, candidate)
            _repair_consumers(state, node, position, before)
            after = {changed: state.choice[changed] for changed in before}
            moved_us = _time_around_us(state, before) if _all_feasible(state, before) else math.inf
            _restore(state, before)
            if moved_us < _time_around_us(state, before):
                _restore(state, after)
                improved.update(*(_neighbours(state, changed) for changed in after))
    return improved


def _all_feasible(state: _State, nodes: Iterable[fx.Node]) -> bool:
    return not any(math.isinf(_time_us(state, node, state.choice[node], True, shared=False)) for node in nodes)


def _moves_together(state: _State, node: fx.Node) -> Sequence[Candidate]:
    """What a node that makes a partial sum, or draws for all ranks, could do instead, if its consumers followed."""
    if state.axis.is_batch_axis and node in state.drawn and not state.arguments[node]:
        chosen = state.choice[node].outputs[0]
        return state.candidates[node][1:] if chosen is not None and chosen.is_replicate() else ()
    readers = _readers(state, (node, 0))
    if not _is_partial(state.choice[node].outputs[0]):
        return []
    if any(reader in state.axis.reduced_late for reader, _ in readers):
        return [candidate for candidate in state.candidates[node] if candidate is not state.choice[node]]
    return [state.candidates[node][0]] if len(readers) > 1 else []


def _restore(state: _State, choices: Mapping[fx.Node, Candidate]) -> None:
    for node, candidate in choices.items():
        _set_instead(state, node, candidate)


def _repair_consumers(
    state: _State, node: fx.Node, position: Mapping[fx.Node, int], before: dict[fx.Node, Candidate]
) -> None:
    """Choose again, in graph order, for every consumer that cannot read what its producer now makes, or is drawn as it.

    ``before`` keeps what was chosen.
    """
    pending = {consumer for consumer, _ in state.consumers.get((node, 0), [])}
    while pending:
        consumer = min(pending, key=position.__getitem__)
        pending.discard(consumer)
        chosen = state.choice[consumer]
        if consumer in state.drawn or math.isinf(_time_us(state, consumer, chosen, forward_only=True, shared=False)):
            before.setdefault(consumer, chosen)
            _forget(state, consumer, chosen)
            _set(state, consumer, min(state.candidates[consumer], key=lambda c: _time_us(state, consumer, c, True)))
            for index in range(len(chosen.outputs) if state.choice[consumer] is not chosen else 0):
                pending.update(after for after, _ in state.consumers.get((consumer, index), []))


def _set_instead(state: _State, node: fx.Node, candidate: Candidate) -> None:
    _forget(state, node, state.choice[node])
    _set(state, node, candidate)


def _time_around_us(state: _State, nodes: Iterable[fx.Node]) -> float:
    """What depends on the choices of ``nodes``: their own time, and moving what they make and read."""
    chosen = list(nodes)
    # In an order of its own: ranks must add up alike.
    producers = dict.fromkeys((node, i) for node in chosen for i in range(len(state.choice[node].outputs)))
    producers.update(dict.fromkeys(producer for node in chosen for producer in state.arguments[node]))
    total = sum(state.choice[node].time_us for node in chosen)
    for node, index in producers:
        placement = state.choice[node].outputs[index]
        if placement is not None:
            total += _output_time_us(state, (node, index), placement)
    return total


def _is_partial(placement: Placement | None) -> bool:
    return placement is not None and placement.is_partial()


def _prepare(state: _State) -> list[fx.Node]:
    """Candidates and consumers of every call, in graph order; placeholders are chosen already."""
    axis = state.axis
    calls = []
    factors: dict[fx.Node, tuple[int, ...]] = {}
    dependent: set[fx.Node] = set()
    state.derived = set(axis.parameters)
    for node in axis.graph.nodes:
        if node.op == "placeholder":
            placement = axis.pins[node]
            state.choice[node] = Candidate(outputs=(placement,), inputs=(), time_us=0.0)
            factors[node] = (split_factor_of(placement),) if is_shard(placement) else (1,)
            if not placement.is_replicate():
                dependent.add(node)
        elif node.op == "call_function" and not fxn.is_getitem(node):
            arguments = tuple(producer_of(argument) for argument in fxn.tensor_arguments(node))
            arriving = sorted({1, *(factor for source, _ in arguments for factor in factors[source])})
            state.arguments[node] = arguments
            if arguments and all(source in state.derived for source, _ in arguments):
                state.derived.add(node)
            if all(source in state.drawn for source, _ in arguments) if arguments else fxn.is_random(node):
                state.drawn.add(node)
            candidates = state.candidates[node] = _candidates(state, node, tuple(arriving))
            factors[node] = split_factors(candidates)
            for position, producer in enumerate(arguments):
                state.consumers.setdefault(producer, []).append((node, position))
            if node in axis.pins or any(source in dependent for source, _ in arguments):
                dependent.add(node)
                if node in state.derived:
                    _set(state, node, candidates[0])
            else:
                # What does not depend on the batch starts replicated, whatever slicing it would save.
                _set(state, node, candidates[0])
            calls.append(node)
    return calls


def _candidates(state: _State, node: fx.Node, factors: tuple[int, ...]) -> tuple[Candidate, ...]:
    pin = state.axis.pins.get(node)
    axis = state.axis
    known = axis.table.of(node, factors, axis.cut_already(node))
    candidates = tuple(candidate for candidate in known if axis.fits(node, candidate))
    if pin is not None:
        return tuple(c for c in candidates if c.outputs == (pin,)) or (
            Candidate(outputs=(pin,), inputs=(pin,), time_us=0.0),
        )
    if node not in state.derived:
        return candidates
    # Parameters lie as they lie: the chain after them follows.
    following = [c for c in candidates if not math.isinf(_time_us(state, node, c, True, shared=False))]
    if not following:
        return candidates[:1]
    return (min(following, key=lambda c: _time_us(state, node, c, True, shared=False)),)


def _choose(state: _State, node: fx.Node, forward_only: bool) -> bool:
    """Give ``node`` its best candidate; whether that changed anything."""
    previous = state.choice.get(node)
    if forward_only and previous is not None:
        return False
    if previous is not None:
        _forget(state, node, previous)
    best = _best(state, state.candidates[node], node, previous, forward_only)
    _set(state, node, best)
    return best is not previous


def _best(
    state: _State, candidates: tuple[Candidate, ...], node: fx.Node, previous: Candidate | None, forward_only: bool
) -> Candidate:
    """The candidate that costs least.

    A tie goes to the candidate that redistributes after the node rather than before it, where a later node may turn out
    not to need it; then to what is chosen already, then to the first: sweeps end and all ranks decide alike.
    """
    if len(candidates) == 1:
        return candidates[0]
    times = [_time_us(state, node, candidate, forward_only) for candidate in candidates]
    if math.isinf(least := min(times)):  # computed where rows lie it could not leave the step
        times = [_time_us(state, node, candidate, forward_only, rows_stay=False) for candidate in candidates]
        least = min(times)
    tied = [candidate for candidate, time_us in zip(candidates, times, strict=True) if time_us == least]
    if len(tied) == 1:
        return tied[0]
    return min(tied, key=lambda c: (_time_us(state, node, c, True), c is not previous))


def _set(state: _State, node: fx.Node, candidate: Candidate) -> None:
    state.choice[node] = candidate
    for producer, placement in zip(state.arguments[node], candidate.inputs, strict=True):
        state.wanted.setdefault(producer, Counter())[placement] += 1


def _forget(state: _State, node: fx.Node, candidate: Candidate) -> None:
    for producer, placement in zip(state.arguments[node], candidate.inputs, strict=True):
        state.wanted[producer][placement] -= 1


def _time_us(
    state: _State, node: fx.Node, candidate: Candidate, forward_only: bool, shared: bool = True, rows_stay: bool = True
) -> float:
    total = candidate.time_us
    for (source, index), target in zip(state.arguments[node], candidate.inputs, strict=True):
        chosen = state.choice[source].outputs[index]
        others: Mapping[Placement, int] = state.wanted.get((source, index), {}) if shared else {}
        if chosen is None:
            continue
        if not _may_move(state, node, (source, index), chosen, target):
            return math.inf
        edge_us = _edge(state, (source, index), chosen, target)
        if others.get(target) and not math.isinf(edge_us):
            continue  # what cannot be done is not free because another consumer asks for it too
        moves_rows = rows_stay and state.axis.is_batch_axis and is_shard(chosen) and chosen != target
        if moves_rows and _computes_in_place(state, node):
            return math.inf
        scatters = chosen.is_partial() and not (target.is_partial() or target.is_replicate())
        if forward_only and scatters and state.axis.is_batch_axis:
            # A greedy walk would scatter every sum and gather it again at once; the sweeps may still do it.
            return math.inf
        total += edge_us
    if not forward_only:
        for index, placement in enumerate(candidate.outputs):
            if placement is not None:
                total += _output_time_us(state, (node, index), placement)
    return total


def _moves(state: _State, node: fx.Node, candidate: Candidate) -> Iterator[tuple[Producer, Placement, Placement]]:
    """What a candidate needs elsewhere than it lies: the value, where it lies, and where it is wanted."""
    for producer, wanted in zip(state.arguments[node], candidate.inputs, strict=True):
        made = state.choice[producer[0]].outputs[producer[1]]
        if made is not None and made != wanted:
            yield producer, made, wanted


def _can_compute(state: _State, node: fx.Node, candidate: Candidate) -> bool:
    """Whether all that a candidate needs can be had, by whatever moves."""
    return all(
        _may_move(state, node, *move) and not math.isinf(_edge(state, *move)) for move in _moves(state, node, candidate)
    )


def _may_move(state: _State, node: fx.Node, producer: Producer, made: Placement, wanted: Placement) -> bool:
    """Whether a value may be redistributed for ``node``, its rows apart."""
    axis = state.axis
    if producer[0] in state.derived and not parameter_may_move(producer, made, wanted, axis.is_batch_axis):
        return False
    return node not in axis.reduced_late or not made.is_partial() or wanted.is_partial()


def _computes_in_place(state: _State, node: fx.Node) -> bool:
    """Whether ``node`` can compute with all shards that it is given as they lie: then nothing else may be done.

    Data parallelism moves parameters and gradients. A batch is gathered, or turned to another dim, only for what cannot
    be computed otherwise, and not to save reducing a large table. What is moved for one call others may read, too.
    """
    return any(
        not any(is_shard(made) for _, made, _ in _moves(state, node, candidate))
        and _can_compute(state, node, candidate)
        for candidate in state.candidates[node]
    )


def _output_time_us(state: _State, producer: Producer, placement: Placement) -> float:
    targets = [target for target, count in state.wanted.get(producer, {}).items() if count]
    total = sum(_edge(state, producer, placement, target) for target in targets)
    for allowed in state.sinks.get(producer, []):
        total += min(0.0 if target in targets else _leaving(state, producer, placement, target) for target in allowed)
    return total


def _leaving(state: _State, producer: Producer, source: Placement, target: Placement) -> float:
    if not may_leave(source, target):
        return math.inf
    return max(0.0, _edge(state, producer, source, target) - state.axis.launch_us)


def _edge(state: _State, producer: Producer, source: Placement, target: Placement) -> float:
    if source == target:
        return 0.0
    known = state.edge_times.setdefault(producer, {})
    found = known.get((source, target))
    if found is None:
        size_bytes = state.axis.size_bytes(producer)
        found = known[source, target] = state.axis.edge_time_us(source, target, size_bytes)
    return found
