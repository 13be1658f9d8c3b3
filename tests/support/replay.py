"""Both partitions of a ParallelModule side by side: that of `parallelize`, and those under `torch.compile`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed

from lightning_autoparallel.compile import dynamo_backend
from lightning_autoparallel.compile.replay import replay_partition
from lightning_autoparallel.contracts import PartitionedGraph
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline import ParallelModule


@dataclass(frozen=True)
class Halves:
    """A forward whose outputs after the first `results` are saved; those of a second partition may be inputs."""

    forward: fx.Graph
    backward: fx.Graph
    results: int

    @classmethod
    def of(cls, partitioned: PartitionedGraph) -> Halves:
        assert partitioned.backward is not None
        count = sum(item.kind != "gradient" for item in partitioned.sharded.outputs)
        return cls(partitioned.forward.graph, partitioned.backward.graph, count)


def first_partition(parallel: ParallelModule) -> PartitionedGraph:
    """What `parallelize` made of its sample."""
    (variants,) = parallel._engine._variants.values()
    return variants[0].step.partitioned


class Partitioned(Exception):
    """Raised in place of lowering what was partitioned."""


@contextlib.contextmanager
def second_partitions(lower: bool = True) -> Iterator[list[Halves]]:
    """The partitions that the backend makes inside, as they come; without `lower` the first one ends the block."""
    seen: list[Halves] = []

    def partition(module: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = replay_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **options)
        seen.append(Halves(forward.graph, backward.graph, num_fwd_outputs))
        if not lower:
            raise Partitioned
        return forward, backward

    with mock.patch.object(dynamo_backend, "replay_partition", partition):
        try:
            yield seen
        except BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, Partitioned):
                raise


def launches(graph: fx.Graph) -> dict[str, int]:
    """Collectives by kind."""
    return dict(Counter(str(fxn.collective_kind(node)) for node in fxn.collectives_of(graph)))


def saved_bytes(halves: Halves) -> int:
    """Bytes of what the forward keeps for the backward, its inputs apart."""
    (output,) = halves.forward.find_nodes(op="output")
    values = [node.meta["val"] for node in output.args[0][halves.results :] if node.op != "placeholder"]
    return sum(fxn.size_bytes(value) for value in values if isinstance(value, Tensor))
