"""One axis of a graph to plan, and what holds for it however that is done: by local search, or as a ``Problem``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan.candidates import Candidate, CandidateTable
from lightning_autoparallel.torch_compat.sharding import StridedShard, split_factor_of

Producer = tuple[fx.Node, int]  # a node and which of its outputs
EdgeTime = Callable[[Placement, Placement, int], float]  # (source, target, global bytes) -> microseconds


@dataclass(frozen=True, kw_only=True)
class AxisToPlan:
    """One axis to plan.

    ``pins`` fix placeholders and marked values, ``sinks`` are placements that outputs must end in (any of them).
    ``fits`` says whether a candidate goes together with what is planned on other axes, ``cut_already`` into how many
    parts those cut outputs and arguments, ``size_bytes`` how large a value is then.

    What depends on the placeholders in ``parameters`` only stays as they lie: it is never gathered, and no matrix is
    cut because slices are free. ``reduced_late`` are casts of gradients that are summed after them, in the wider type.
    What leaves the graph is sent in buckets, and takes ``launch_us`` less than an edge.
    """

    graph: fx.Graph
    table: CandidateTable
    pins: Mapping[fx.Node, Placement]
    sinks: Sequence[tuple[fx.Node, tuple[Placement, ...]]]
    edge_time_us: EdgeTime
    launch_us: float = 0.0
    parameters: frozenset[fx.Node] = frozenset()
    is_batch_axis: bool = True
    reduced_late: frozenset[fx.Node] = frozenset()
    cut_already: Callable[[fx.Node], tuple[int, ...]] = lambda node: ()
    fits: Callable[[fx.Node, Candidate], bool] = lambda node, candidate: True
    size_bytes: Callable[[Producer], int] = lambda producer: _global_size_bytes(producer)
    max_sweeps: int = 8


def _global_size_bytes(producer: Producer) -> int:
    value = fxn.values(producer[0])[producer[1]]
    assert value is not None
    return fxn.size_bytes(value)


def producer_of(node: fx.Node) -> Producer:
    """The call and output that a value comes from: ``getitem`` only names it."""
    if fxn.is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source, index
    return node, 0


def split_factors(candidates: Sequence[Candidate]) -> tuple[int, ...]:
    """Into how many blocks each, 1 among them, shards of the candidates' outputs are interleaved."""
    strided = {split_factor_of(p) for c in candidates for p in c.outputs if isinstance(p, StridedShard)}
    return tuple(sorted({1, *strided}))


def parameter_may_move(producer: Producer, made: Placement, wanted: Placement, is_batch_axis: bool) -> bool:
    """Whether what depends on parameters only may be redistributed so: reduced, or a whole vector cut."""
    if made == wanted or (made.is_partial() and wanted.is_replicate()):
        return True
    value = fxn.values(producer[0])[producer[1]]
    is_vector = value is not None and value.dim() <= 1
    return not is_batch_axis and is_vector and made.is_replicate() and not wanted.is_partial()


def may_leave(made: Placement, target: Placement) -> bool:
    """Whether a value may leave the graph so: gathered or reduced, never turned from one dim to another.

    An all-to-all of a gradient would be cheap, but it is no reduction: the work it saves is moved into the backward.
    """
    return made == target or made.is_partial() or made.is_replicate() or target.is_replicate()
