"""Candidates that no strided shard gets to are left out: an operator is asked for every factor that arrives anywhere.

A shard is strided once a view has merged dims (``_S(0, 32)`` of rows of 32 batches). Operators after it are given rows
for it whatever dims they have. One is of use only where its strided inputs are made as they are wanted: nobody moves a
value into a strided shard. What is made of nothing that is cut (a sum that is expanded) may be made strided, if
anything wants it so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.plan.axis import Producer
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.torch_compat.sharding import StridedShard

Candidates = Mapping[fx.Node, tuple[Candidate, ...]]
Arguments = Callable[[fx.Node], Sequence[Producer]]


def reached(candidates: Candidates, arguments: Arguments) -> dict[fx.Node, tuple[Candidate, ...]]:
    """The candidates of each node, in graph order, whose strided shards come from somewhere and lead somewhere."""
    kept = dict(candidates)
    before = -1
    while before != (before := sum(map(len, kept.values()))):
        _forward(kept, arguments)
        _backward(kept, arguments)
    return kept


def _forward(kept: dict[fx.Node, tuple[Candidate, ...]], arguments: Arguments) -> None:
    made: dict[Producer, set[Placement | None]] = {}
    for node, known in kept.items():
        sources = arguments(node)
        kept[node] = tuple(c for c in known if _arrives(c, sources, made)) or known[:1]
        for index in range(len(known[0].outputs)):
            made[node, index] = {c.outputs[index] for c in kept[node]}


def _arrives(candidate: Candidate, sources: Sequence[Producer], made: Mapping[Producer, set[Placement | None]]) -> bool:
    pairs = zip(candidate.inputs, sources, strict=True)
    return all(wanted in made[source] for wanted, source in pairs if isinstance(wanted, StridedShard))


def _backward(kept: dict[fx.Node, tuple[Candidate, ...]], arguments: Arguments) -> None:
    wanted: dict[Producer, set[Placement]] = defaultdict(set)
    for node in reversed(kept):
        kept[node] = tuple(c for c in kept[node] if _leads(c, node, wanted)) or kept[node][:1]
        for position, source in enumerate(arguments(node)):
            wanted[source].update(c.inputs[position] for c in kept[node])


def _leads(candidate: Candidate, node: fx.Node, wanted: Mapping[Producer, set[Placement]]) -> bool:
    strided = [i for i, placement in enumerate(candidate.outputs) if isinstance(placement, StridedShard)]
    return not strided or any(candidate.outputs[i] in wanted.get((node, i), ()) for i in strided)
