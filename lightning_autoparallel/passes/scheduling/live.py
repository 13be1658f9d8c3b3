"""Live bytes of a schedule in the making, by the rules of ``cost.liveness``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from torch import fx

from lightning_autoparallel.cost.liveness import READ_WHILE_RUNNING, Surroundings
from lightning_autoparallel.cost.storage import GraphStorages, resolve_storages
from lightning_autoparallel.fx import nodes as fxn

EXTRA_BYTES = 2**27  # by which a peak may rise so that less communication is exposed


class LiveBytes:
    """Bytes alive after each call that is passed to ``run``: storages go with the last call that reads them.

    ``refused_bytes`` are the least that ``fits`` was asked for and said no to: a higher limit that is still below those
    has it answer as it did.
    """

    def __init__(self, graph: fx.Graph, around: Surroundings, storages: GraphStorages | None = None) -> None:
        self._storages = storages or resolve_storages(graph, around.same)
        self._around = around
        self._sizes = [storage.size_bytes for storage in self._storages.storages]
        self._made: dict[fx.Node, list[int]] = {}
        for index, storage in enumerate(self._storages.storages):
            self._made.setdefault(storage.node, []).append(index)
        self._excluded: set[int] = set()
        readers: list[set[fx.Node]] = [set() for _ in self._sizes]
        for node in graph.nodes:
            self._follow(node, readers)
        self._left = Counter({index: len(nodes) for index, nodes in enumerate(readers)})
        self._read: dict[fx.Node, list[int]] = {}
        for index, nodes in enumerate(readers):
            for node in nodes:
                self._read.setdefault(node, []).append(index)
        self.bytes = self.peak_bytes = sum(one.size_bytes for one in around.outside)
        self.refused_bytes = math.inf

    def fits(self, alive_bytes: int, limit_bytes: int) -> bool:
        """Whether so much may be alive at a time."""
        if alive_bytes <= limit_bytes:
            return True
        self.refused_bytes = min(self.refused_bytes, alive_bytes)
        return False

    def adds(self, node: fx.Node) -> int:
        """Bytes that running ``node`` allocates."""
        return sum(self._sizes[index] for index in self._made.get(node, ()) if index not in self._excluded)

    def run(self, node: fx.Node) -> None:
        """Allocate what ``node`` makes, then free what it was the last to read."""
        self.bytes += self.adds(node)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        for index in self._counted(node):
            self._left[index] -= 1
            if not self._left[index]:
                self.bytes -= self._sizes[index]

    def _counted(self, node: fx.Node) -> Iterable[int]:
        return (index for index in self._read.get(node, ()) if index not in self._excluded)

    def _follow(self, node: fx.Node, readers: list[set[fx.Node]]) -> None:
        """Who has to have run before what ``node`` holds, or reads while it runs, can go."""
        if node.op == "output":
            return  # never run: what it reads stays
        if node.op == "placeholder" and node.name in self._around.excluded:
            self._excluded.update(self._storages.of(node))
        is_held = node.op == "placeholder" and node.name in self._around.held
        for index in self._storages.of(node):
            readers[index].update((node, *node.users))
            if is_held:
                readers[index].add(_output_of(node.graph))
        if fxn.collective_kind(node) in READ_WHILE_RUNNING:
            waits = fxn.waits_of(node) or [_output_of(node.graph)]
            for index in {i for argument in node.all_input_nodes for i in self._storages.of(argument)}:
                readers[index].update(waits)


def _output_of(graph: fx.Graph) -> fx.Node:
    return graph.output_node()
