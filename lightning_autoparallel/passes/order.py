"""Which passes run, in which order."""

from __future__ import annotations

from lightning_autoparallel.passes.merge_identical_collectives import merge_identical_collectives
from lightning_autoparallel.passes.runner import GraphPass


def joint_passes() -> tuple[GraphPass, ...]:
    """The passes over the joint graph, before it is partitioned."""
    return (GraphPass(name="merge_identical_collectives", run=merge_identical_collectives),)
