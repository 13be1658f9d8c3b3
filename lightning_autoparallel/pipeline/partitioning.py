"""The partition of a joint graph, which a pass may ask for to see what its rewriting does to memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import fx

from lightning_autoparallel.compile import partition_graph
from lightning_autoparallel.contracts import CheckpointFunction, EarlierGradients, PartitionedGraph, ShardedGraph
from lightning_autoparallel.cost.memory import StepMemory, predict_step_memory


@dataclass
class Partitioning:
    """Partitions one graph; what was partitioned last is not partitioned again while its calls are the same.

    What is partitioned is rewritten by ``behind`` at once, if that is given. ``first_bytes`` are those of the peak that
    was asked for first, 0 where none was. It has ``earlier_gradients`` as ``PartitionedGraph`` has.
    """

    sharded: ShardedGraph
    reshard_after_forward: bool
    policy: str | CheckpointFunction
    earlier_gradients: EarlierGradients
    behind: Callable[[PartitionedGraph], None] | None = None
    first_bytes: int = 0
    _warnings: list[str] = field(default_factory=list)
    _last: tuple[tuple[fx.Node, ...], PartitionedGraph] | None = None

    def memory(self, graph: fx.Graph) -> StepMemory:
        """Predicted memory of the step, its calls in the order in which ``behind`` leaves them.

        Raises:
            UnsupportedOpError: a node has no recorded value.
        """
        assert graph is self.sharded.graph_module.graph
        found = predict_step_memory(self._now())
        self.first_bytes = self.first_bytes or found.peak_bytes
        return found

    @property
    def last(self) -> PartitionedGraph | None:
        """What was partitioned last."""
        return None if self._last is None else self._last[1]

    def partitioned(self, warn: Callable[[str], None]) -> PartitionedGraph:
        """The graph as it is now, in two; ``warn`` is told where a policy finds nothing to recompute."""
        found = self._now()
        for message in self._warnings:
            warn(message)
        return found

    def _now(self) -> PartitionedGraph:
        calls = tuple(self.sharded.graph_module.graph.nodes)
        if self._last is None or self._last[0] != calls:
            self._warnings.clear()
            made = partition_graph(self.sharded, self.reshard_after_forward, self.policy, self._warnings.append)
            found = replace(made, earlier_gradients=self.earlier_gradients)
            if self.behind is not None:
                self.behind(found)
            self._last = calls, found
        return self._last[1]
