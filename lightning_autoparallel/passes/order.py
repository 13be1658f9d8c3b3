"""Which passes run, in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from torch import fx

from lightning_autoparallel.contracts import GraphInput, GraphOutput
from lightning_autoparallel.cost import CostModel, Timeline
from lightning_autoparallel.cost.liveness import Surroundings, SurroundingsOf
from lightning_autoparallel.passes.bucket_collectives import bucket_collectives
from lightning_autoparallel.passes.bucketing import BucketLimit
from lightning_autoparallel.passes.cap_compute_runs import cap_compute_runs
from lightning_autoparallel.passes.cast_before_gather import cast_before_gather
from lightning_autoparallel.passes.chunk_loss_head import MemoryOf, chunk_loss_head
from lightning_autoparallel.passes.decompose import DecomposeOptions
from lightning_autoparallel.passes.decompose_gather_matmul import decompose_gather_matmul
from lightning_autoparallel.passes.decompose_matmul_scatter import decompose_matmul_scatter
from lightning_autoparallel.passes.exchange_reduce_scatters import exchange_reduce_scatters
from lightning_autoparallel.passes.fuse_chained_all_gathers import fuse_chained_all_gathers
from lightning_autoparallel.passes.join_biases import join_biases
from lightning_autoparallel.passes.joint_groups import JoinGroups
from lightning_autoparallel.passes.loss_head import ChunkOptions
from lightning_autoparallel.passes.merge_identical_collectives import merge_identical_collectives
from lightning_autoparallel.passes.prefetch_gathers import prefetch_gathers
from lightning_autoparallel.passes.runner import GraphPass
from lightning_autoparallel.passes.schedule_overlap import schedule_overlap
from lightning_autoparallel.passes.scheduling import KnownOrders
from lightning_autoparallel.passes.sink_waits import sink_waits
from lightning_autoparallel.passes.tag_collectives import tag_collectives


def joint_passes(
    inputs: Sequence[GraphInput] = (),
    outputs: Sequence[GraphOutput] = (),
    chunks: ChunkOptions | None = None,
    costs: CostModel | None = None,
    memory_of: MemoryOf | None = None,
) -> tuple[GraphPass, ...]:
    """The passes over the joint graph, before it is partitioned; ``inputs`` and ``outputs`` are the graph's.

    ``chunks`` says how a loss's head is computed, or ``costs`` and ``memory_of``, which predicts that of a graph.
    """
    heads = partial(chunk_loss_head, inputs=inputs, options=chunks, costs=costs, memory_of=memory_of)
    return (
        GraphPass(name="cast_before_gather", run=cast_before_gather),
        GraphPass(name="merge_identical_collectives", run=merge_identical_collectives),
        GraphPass(name="join_biases", run=join_biases),
        # it tags what the others leave
        GraphPass(name="tag_collectives", run=partial(tag_collectives, inputs=inputs, outputs=outputs)),
        # the last one: what it has had partitioned to see its memory need not be partitioned again
        GraphPass(name="chunk_loss_head", run=heads),
    )


def split_passes(
    bucket_limit: BucketLimit | None = None,
    join: JoinGroups | None = None,
    costs: CostModel | None = None,
    surroundings: SurroundingsOf | None = None,
    decompose: DecomposeOptions | None = None,
    backend: str | None = None,
    disabled: Collection[str] = (),
) -> tuple[GraphPass, ...]:
    """The passes over the forward and the backward graph each; an inference graph is a forward.

    ``bucket_limit`` gives the bytes that one launch may move, by kind and group; ``join`` finds the group of several
    groups' ranks. ``costs`` predict the order's times, ``surroundings`` say what the caller of a graph holds of it.
    ``decompose`` says which products may begin before all that they read has arrived, ``backend`` is what
    groups talk through. What is ``disabled`` will not be run by the caller, and is not reckoned with.
    """
    orders = KnownOrders()
    surroundings = None if surroundings is None else partial(_remembered, {}, surroundings)
    later = partial(_launching_passes, bucket_limit, costs, orders)
    preview = None if costs is None else partial(_preview, {}, later, costs, orders, surroundings, disabled)
    gathers = partial(
        decompose_gather_matmul, options=decompose, costs=costs, preview=preview, surroundings=surroundings
    )
    scatters = partial(decompose_matmul_scatter, options=decompose, costs=costs, preview=preview)
    return (
        # before what merges or moves gathers
        GraphPass(name="fuse_chained_all_gathers", run=partial(fuse_chained_all_gathers, join=join)),
        # ahead of buckets, which would take in what is decomposed, and of what orders the transfers
        GraphPass(name="decompose_gather_matmul", run=gathers),
        GraphPass(name="decompose_matmul_scatter", run=scatters),
        *later(surroundings),
        # the last one: until here a reduce-scatter is known by its name
        GraphPass(name="exchange_reduce_scatters", run=partial(exchange_reduce_scatters, backend=backend, costs=costs)),
    )


def _launching_passes(
    bucket_limit: BucketLimit | None,
    costs: CostModel | None,
    orders: KnownOrders,
    surroundings: SurroundingsOf | None,
) -> tuple[GraphPass, ...]:
    """The passes that say what is launched together, and when."""
    order = partial(schedule_overlap, costs=costs, surroundings=surroundings, known=orders)
    return (
        GraphPass(name="bucket_collectives", run=partial(bucket_collectives, limit=bucket_limit)),
        GraphPass(name="prefetch_gathers", run=prefetch_gathers),
        GraphPass(name="sink_waits", run=sink_waits),
        # starts from the order that the others left, and keeps it where that is predicted to be the better one
        GraphPass(name="schedule_overlap", run=order),
        GraphPass(name="cap_compute_runs", run=partial(cap_compute_runs, costs=costs, times_of=orders.times_us)),
    )


def _remembered(
    known: dict[tuple[str, ...], Surroundings], surroundings: SurroundingsOf, graph: fx.Graph
) -> Surroundings:
    """What is around a graph: it is asked for again and again while nothing of it changes, nor of the other half."""
    called = _called(graph)
    if called not in known:
        known[called] = surroundings(graph)
    return known[called]


def _called(graph: fx.Graph) -> tuple[str, ...]:
    """The names of the calls, in order."""
    return tuple([node.name for node in graph.nodes])


def _preview(
    known: dict[tuple[str, ...], Timeline],
    later: Callable[[SurroundingsOf | None], Sequence[GraphPass]],
    costs: CostModel,
    orders: KnownOrders,
    surroundings: SurroundingsOf | None,
    disabled: Collection[str],
    graph: fx.Graph,
    asked: fx.Graph,
) -> Timeline:
    """The timeline of ``asked``, which is ``graph`` or a rewritten copy of it, as later passes will leave it.

    ``known`` keeps them, by the names of the calls in order, which every decomposition changes: what one pass has
    chosen is what the next one starts from. A copy is rewritten further.
    """
    called = _called(asked)
    if called in known:
        return known[called]
    around = None if surroundings is None else surroundings(graph)
    copied = asked
    if asked is graph:
        copied = fx.Graph()
        copied.output(copied.graph_copy(asked, {}))
    for graph_pass in later(None if around is None else lambda _: around):
        if graph_pass.name not in disabled:
            graph_pass.run(copied)
    known[called] = costs.timeline(copied, orders.times_us(copied))
    return known[called]


def all_passes() -> tuple[GraphPass, ...]:
    """Every pass, by which names are checked."""
    return (*joint_passes(), *split_passes())
