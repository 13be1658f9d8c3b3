"""Which passes run, in which order."""

from __future__ import annotations

from lightning_autoparallel.passes.cast_before_gather import cast_before_gather
from lightning_autoparallel.passes.join_biases import join_biases
from lightning_autoparallel.passes.merge_identical_collectives import merge_identical_collectives
from lightning_autoparallel.passes.one_in_flight import one_in_flight
from lightning_autoparallel.passes.prefetch_gathers import prefetch_gathers
from lightning_autoparallel.passes.runner import GraphPass
from lightning_autoparallel.passes.sink_waits import sink_waits


def joint_passes() -> tuple[GraphPass, ...]:
    """The passes over the joint graph, before it is partitioned."""
    return (
        GraphPass(name="cast_before_gather", run=cast_before_gather),
        GraphPass(name="merge_identical_collectives", run=merge_identical_collectives),
        GraphPass(name="join_biases", run=join_biases),
    )


def split_passes(backend: str) -> tuple[GraphPass, ...]:
    """The passes over the forward and the backward graph each; an inference graph is a forward.

    ``backend`` is that of the mesh's process groups: what it cannot do is undone at the end.
    """
    return _OVERLAP if backend != "gloo" else (*_OVERLAP, *_ON_GLOO)


_OVERLAP = (
    GraphPass(name="prefetch_gathers", run=prefetch_gathers),
    GraphPass(name="sink_waits", run=sink_waits),
)
_ON_GLOO = (GraphPass(name="one_in_flight", run=one_in_flight),)


def all_passes() -> tuple[GraphPass, ...]:
    """Every pass, by which names are checked."""
    return (*joint_passes(), *_OVERLAP, *_ON_GLOO)
