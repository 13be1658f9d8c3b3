"""Live bytes along a graph's schedule, and what is alive at their peak.

Counted is the memory of tensors as an interpreter of the graph holds it: a storage lives from the call that makes it
through the last call that reads it or a view of it. A collective that reads its input while it runs holds it until it
is waited for. Not counted is what kernels and communication libraries take for themselves. A compiled graph fuses calls
and so skips some of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import fx

from lightning_autoparallel.contracts import MemoryShare
from lightning_autoparallel.cost.storage import GraphStorages, Storage, resolve_storages, rounded
from lightning_autoparallel.fx import nodes as fxn

# All-reduces and broadcasts work on a copy of their input, made when they start: it is their output.
READ_WHILE_RUNNING = {"all_gather", "reduce_scatter", "all_to_all", "permute"}


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """Live bytes while each node of a graph runs, in the order of the graph, and what is alive at the first peak."""

    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_node: str
    contributors: tuple[MemoryShare, ...]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What of a graph's memory its caller decides.

    ``excluded`` placeholders are not counted, ``held`` ones live until the graph has returned, others until their last
    use. ``same`` maps placeholders to the storages of another graph that they come from: several may share one.
    ``kinds`` name placeholders, ``results`` the graph's results in order. ``outside`` is alive all the while.
    ``elsewhere_bytes`` are those of the peak of what runs before or after the graph, ``room_bytes`` what it may take
    where it is much slower with less.
    """

    excluded: Collection[str] = ()
    held: Collection[str] = ()
    same: Mapping[str, Storage] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    results: Sequence[str] = ()
    outside: Sequence[MemoryShare] = ()
    elsewhere_bytes: int = 0
    room_bytes: int = 0


SurroundingsOf = Callable[[fx.Graph], Surroundings]


def predict_memory(
    graph: fx.Graph,
    *,
    excluded: Collection[str] = (),
    held: Collection[str] = (),
    surroundings: Surroundings | None = None,
    allocation_bytes: int = 1,
    storages: GraphStorages | None = None,
) -> MemoryTimeline:
    """Live bytes of ``graph`` on one rank, in the order of its nodes.

    ``excluded`` and ``held`` are names of placeholders, as in ``Surroundings``, which says more. Every storage is
    rounded up to a multiple of ``allocation_bytes`` (512 for CUDA's caching allocator). ``storages`` are the graph's,
    where they are known, of this order or of another one.

    Raises:
        UnsupportedOpError: a node has no recorded value.
    """
    around = surroundings or Surroundings(excluded=excluded, held=held)
    storages = storages or resolve_storages(graph, around.same)
    return _Timeline(graph, storages, around, allocation_bytes).measure()


class _Timeline:
    def __init__(self, graph: fx.Graph, storages: GraphStorages, around: Surroundings, allocation_bytes: int) -> None:
        self._nodes = list(graph.nodes)
        self._position = {node: index for index, node in enumerate(self._nodes)}
        self._storages, self._around, self._allocation = storages, around, allocation_bytes
        self._kinds: dict[int, str] = {}
        self._last = [0] * len(storages.storages)
        self._excluded: set[int] = set()

    def measure(self) -> MemoryTimeline:
        for node in self._nodes:
            self._follow(node)
        first = [0 if s.node.op == "placeholder" else self._position[s.node] for s in self._storages.storages]
        spans = [
            (start, end, index)
            for index, (start, end) in enumerate(zip(first, self._last, strict=True))
            if index not in self._excluded
        ]
        live = self._sum(spans)
        peak = max(range(len(live)), key=live.__getitem__)
        alive = [self._contributor(index) for start, end, index in spans if start <= peak <= end]
        contributors = sorted([*alive, *self._around.outside], key=lambda one: -one.size_bytes)
        return MemoryTimeline(
            live_bytes=tuple(live),
            peak_bytes=live[peak],
            peak_node=self._nodes[peak].name,
            contributors=tuple(contributors),
        )

    def _follow(self, node: fx.Node) -> None:
        """What ``node`` keeps alive, and until when."""
        if node.op == "output":
            self._name_results(node)
            return
        end = max((self._position[user] for user in node.users), default=self._position[node])
        if node.op == "placeholder":
            self._name_input(node)
            end = len(self._nodes) if node.name in self._around.held else end
        self._keep(self._storages.of(node), end)
        if fxn.collective_kind(node) in READ_WHILE_RUNNING:
            self._keep(self._read_by(node), self._wait_of(node))

    def _name_input(self, node: fx.Node) -> None:
        if node.name in self._around.excluded:
            self._excluded.update(self._storages.of(node))
        for index in self._storages.of(node):
            self._kinds.setdefault(index, self._around.kinds.get(node.name, "input"))

    def _name_results(self, output: fx.Node) -> None:
        results = output.args[0] if isinstance(output.args[0], (list, tuple)) else output.args
        kinds = self._around.results or ["output"] * len(results)
        for node, kind in zip(results, kinds, strict=True):
            if not isinstance(node, fx.Node):
                continue
            self._keep(self._storages.of(node), len(self._nodes))
            for index in self._storages.of(node):
                self._kinds.setdefault(index, kind)

    def _read_by(self, node: fx.Node) -> Iterable[int]:
        return [index for argument in node.all_input_nodes for index in self._storages.of(argument)]

    def _wait_of(self, collective: fx.Node) -> int:
        """When the last result is waited for; never waited for is never done."""
        results = [user for user in collective.users if fxn.is_getitem(user)] or [collective]
        waits = [[self._position[user] for user in result.users if fxn.is_wait(user)] for result in results]
        return max((min(found, default=len(self._nodes)) for found in waits), default=len(self._nodes))

    def _keep(self, indices: Iterable[int], end: int) -> None:
        for index in indices:
            self._last[index] = max(self._last[index], end)

    def _sum(self, spans: Iterable[tuple[int, int, int]]) -> list[int]:
        changes = [0] * (len(self._nodes) + 2)
        changes[0] = sum(one.size_bytes for one in self._around.outside)
        for start, end, index in spans:
            size = rounded(self._storages.storages[index].size_bytes, self._allocation)
            changes[start] += size
            changes[end + 1] -= size
        return list(accumulate(changes))[: len(self._nodes)]

    def _contributor(self, index: int) -> MemoryShare:
        storage = self._storages.storages[index]
        node = storage.node
        return MemoryShare(
            name=storage.name,
            size_bytes=rounded(storage.size_bytes, self._allocation),
            kind=self._kinds.get(index) or ("collective" if fxn.collective_kind(node) else "value"),
            module=fxn.module_path(node) or "",
        )
