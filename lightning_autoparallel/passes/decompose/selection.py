"""Which candidates are decomposed, and what the report says of the others.

Forced, all that may be are, but gathers of parameters and reductions of their gradients: those have time, and share
launches. Else each passes the gate first, then all together: the whole graph, with the passes behind run over it, must
be predicted to take less time than without them. Where it takes more, though each of them pays, others were hidden by
what is taken apart: it is tried with those, too, that pay were half of them exposed. Nothing but costs and predicted
memory decides, which are equal on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_autoparallel.cost import CostModel, Timeline
from lightning_autoparallel.cost.liveness import SurroundingsOf
from lightning_autoparallel.errors import ConfigError, UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.decompose.gate import Times, times_of, too_small
from lightning_autoparallel.passes.decompose.gathers import Gather, NotDecomposable
from lightning_autoparallel.passes.decompose.options import ORDERS_OF_BACKEND, DecomposeOptions
from lightning_autoparallel.passes.decompose.room import Room
from lightning_autoparallel.passes.decompose.scatters import Scatter
from lightning_autoparallel.passes.scheduling.calls import changes_inputs

Found = Gather | Scatter
# The timeline of the second graph, which is the first or a rewritten copy of it, as it will be once the passes behind
# have run. The first does not change; a copy is of no use afterwards.
Preview = Callable[[fx.Graph, fx.Graph], Timeline]

_OF_PARAMETERS = "a parameter's gather may start early, and its gradient's reduction end late"
_NOISE = 1e-3  # of the predicted time: what differs by less is alike
_LAID_BARE = 0.5  # of a hidden collective, when others are taken apart: a guess, where all of it would be the most


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """How one kind of collective is found, read and written; ``read`` raises NotDecomposable."""

    what: str
    is_candidate: Callable[[fx.Node], bool]
    read: Callable[[fx.Node], Any]
    write: Callable[[Any, DecomposeOptions], None]


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A collective that may be decomposed, what was read of it, and what it takes both ways."""

    node: fx.Node
    found: Found
    times: Times


def decompose(
    graph: fx.Graph,
    way: Decomposition,
    options: DecomposeOptions,
    costs: CostModel | None,
    preview: Preview | None,
    surroundings: SurroundingsOf | None = None,
) -> tuple[str, ...]:
    """Decompose what ``options`` and costs say, and report on every candidate.

    Raises:
        ConfigError: what is forced cannot be done by the backend.
    """
    if options.when == "never":
        return ()
    candidates = [node for node in graph.nodes if way.is_candidate(node)]
    if not candidates:
        return ()
    chooser = _Chooser(way, options, costs, preview, surroundings)
    if options.when == "always":
        return chooser.force(graph, candidates)
    return chooser.choose(graph, candidates)


class _Chooser:
    def __init__(
        self,
        way: Decomposition,
        options: DecomposeOptions,
        costs: CostModel | None,
        preview: Preview | None,
        surroundings: SurroundingsOf | None,
    ) -> None:
        self._way, self._options, self._costs, self._preview = way, options, costs, preview
        self._surroundings = surroundings
        self._said: list[tuple[fx.Node, str]] = []

    def force(self, graph: fx.Graph, candidates: list[fx.Node]) -> tuple[str, ...]:
        """All that may be."""
        orders = ORDERS_OF_BACKEND.get(self._options.backend, ())
        if self._options.order not in orders:
            raise ConfigError(_unknown_backend(self._options))
        for node in candidates:
            found = self._read(node)
            if found is not None and found.of_parameter:
                self._say(node, f"whole: {_OF_PARAMETERS}, and shares its launch")
            elif found is not None:
                self._say(node, "decomposed: forced")
                self._way.write(found, self._options)
        return self._notes()

    def choose(self, graph: fx.Graph, candidates: list[fx.Node]) -> tuple[str, ...]:
        """Those that pass the gate, if all of them together are predicted to be faster."""
        off = self._off(graph)
        if off is not None:
            return (f"{len(candidates)} {self._way.what} with products stay whole: {off}",)
        try:
            return self._chosen(graph, candidates)
        except (UnsupportedOpError, ConfigError) as error:
            return (f"{len(candidates)} {self._way.what} with products stay whole: {error}",)

    def _off(self, graph: fx.Graph) -> str | None:
        if self._options.backend == "gloo":
            return "over gloo only what is forced is decomposed"
        if self._options.order not in ORDERS_OF_BACKEND.get(self._options.backend, ()):
            return _unknown_backend(self._options)
        if self._costs is None or self._preview is None:
            return "no costs"
        changing = next(filter(changes_inputs, graph.nodes), None)
        return None if changing is None else f"{changing.name} changes what it is given"

    def _chosen(self, graph: fx.Graph, candidates: list[fx.Node]) -> tuple[str, ...]:
        assert self._costs is not None and self._preview is not None
        possible = list(self._large_enough(candidates))
        # Whatever is exposed of it, a collective takes no longer than it takes.
        hopeful = [
            one
            for one in possible
            if self._passes(one.node, one.times, self._costs.collective_time_us(one.node), "were all of it exposed: ")
        ]
        hopeful = self._with_room(graph, hopeful)
        if not hopeful:
            return self._notes()
        before = self._preview(graph, graph)
        passing = [one.node for one in hopeful if self._is_worth_it(one.node, one.times, before)]
        if not passing:
            return self._notes()
        trials: list[str] = []
        for nodes in filter(None, (passing, self._with_hidden(hopeful, passing, before))):
            tried = _copied(graph)
            self._write(tried, nodes)
            after = self._preview(graph, tried)
            trials.append(_compared(len(nodes), before, after))
            if after.time_us <= before.time_us * (1 - _NOISE):
                return self._taken(graph, nodes, trials)
            if after.time_us <= before.time_us * (1 + _NOISE):
                break
        self._said += [(node, "whole: together with the others it would make the graph slower") for node in passing]
        return (*(f"kept whole; {trial}" for trial in trials), *self._notes())

    def _with_hidden(self, hopeful: list[_Candidate], passing: list[fx.Node], before: Timeline) -> list[fx.Node]:
        """What pays, and what would if it were half exposed; nothing where the latter is nothing."""
        assert self._costs is not None
        passed = set(passing)
        nodes = [
            one.node
            for one in hopeful
            if one.node in passed or (one.node.name in before.spans and _may_be_worth_it(one, self._costs))
        ]
        return nodes if len(nodes) > len(passing) else []

    def _taken(self, graph: fx.Graph, nodes: list[fx.Node], trials: list[str]) -> tuple[str, ...]:
        """Decompose what pays; of the ``trials`` that is the last."""
        decomposed = {node.name for node in nodes}
        self._said = [one for one in self._said if one[0].name not in decomposed]
        self._said += [(node, "decomposed") for node in nodes]
        notes = (trials[-1], *self._notes())
        self._write(graph, nodes)
        return notes

    def _large_enough(self, candidates: list[fx.Node]) -> Iterable[_Candidate]:
        assert self._costs is not None
        for node in candidates:
            found = self._read(node)
            if found is None:
                continue
            small = too_small(found, self._costs)
            if small is None:
                yield _Candidate(node=node, found=found, times=times_of(found, self._options, self._costs))
            else:
                self._say(node, f"whole: {small}")

    def _with_room(self, graph: fx.Graph, hopeful: list[_Candidate]) -> list[_Candidate]:
        """Those for whose parts there is room, where it is known what is around the graph."""
        if self._surroundings is None or not hopeful:
            return hopeful
        room = Room(graph, self._surroundings(graph))
        refusals = [room.refusal(one.found) if isinstance(one.found, Gather) else None for one in hopeful]
        for one, refusal in zip(hopeful, refusals, strict=True):
            if refusal is not None:
                self._say(one.node, f"whole: {refusal}")
        return [one for one, refusal in zip(hopeful, refusals, strict=True) if refusal is None]

    def _is_worth_it(self, node: fx.Node, times: Times, before: Timeline) -> bool:
        if node.name not in before.spans:
            self._say(node, "whole: it shares a launch with others")
            return False
        return self._passes(node, times, before.stalls_us.get(node.name, 0.0), "")

    def _passes(self, node: fx.Node, times: Times, exposed_us: float, condition: str) -> bool:
        refusal = times.refusal(exposed_us)
        if refusal is not None:
            self._say(node, f"whole: {condition}{refusal}")
        return refusal is None

    def _read(self, node: fx.Node) -> Found | None:
        try:
            found: Found = self._way.read(node)
        except NotDecomposable as reason:
            self._say(node, f"whole: {reason}")
            return None
        return found

    def _write(self, graph: fx.Graph, nodes: list[fx.Node]) -> None:
        """Decompose the nodes of these names; one that another decomposition has changed since stays whole."""
        named = {node.name: node for node in graph.nodes}
        for name in [node.name for node in nodes]:
            try:
                found = self._way.read(named[name])
            except NotDecomposable:
                continue
            self._way.write(found, self._options)

    def _say(self, node: fx.Node, verdict: str) -> None:
        self._said.append((node, verdict))

    def _notes(self) -> tuple[str, ...]:
        """One line for all candidates of one kind of module with one verdict."""
        return tuple(
            f"{count} {self._way.what} of {where}: {verdict}"
            for (where, verdict), count in Counter((_where(node), verdict) for node, verdict in self._said).items()
        )


def _may_be_worth_it(one: _Candidate, costs: CostModel) -> bool:
    """Of a collective that nothing waits for."""
    return one.times.refusal(_LAID_BARE * costs.collective_time_us(one.node)) is None


def _compared(count: int, before: Timeline, after: Timeline) -> str:
    return (
        f"predicted with {count} decomposed: time {before.time_us / 1e3:.2f} -> {after.time_us / 1e3:.2f} "
        f"ms, exposed {before.exposed_us / 1e3:.2f} -> {after.exposed_us / 1e3:.2f} ms"
    )


def _where(node: fx.Node) -> str:
    path = fxn.module_path(node)
    return fxn.kind_of(path) if path else "the step itself"


def _copied(graph: fx.Graph) -> fx.Graph:
    """The same graph of other nodes, with the same names."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def _unknown_backend(options: DecomposeOptions) -> str:
    able = [backend for backend, orders in ORDERS_OF_BACKEND.items() if options.order in orders]
    return (
        f"backend {options.backend!r} is not known to do the order {options.order!r}: {', '.join(able)} are; "
        "set decompose_matmuls='never'"
    )
