"""Redistributions written out as functional collectives, one per flattened group of axes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.group_choice import Groups, OrderedAxis, WarnOnce
from lightning_autoparallel.apply.redistribution_steps import plan_steps
from lightning_autoparallel.apply.transitions import take_step
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import explicit


def redistribute(
    emitter: GraphEmitter,
    node: fx.Node,
    shape: Sequence[int],
    source: Placements,
    target: Placements,
    axes: Sequence[PlanAxis],
    joint_axes: Sequence[PlanAxis] = (),
    ordered: OrderedAxis | None = None,
    missing: WarnOnce | None = None,
) -> fx.Node:
    """The value of ``node`` (global ``shape``, placed as ``source``) placed as ``target``.

    ``joint_axes`` are flattened groups of several ``axes``: one collective on one of them replaces one on each.
    ``ordered`` makes a group whose ranks count in another order; it is asked only for one that saves a copy. Where no
    group joins axes that could move together, each takes a collective of its own and ``missing`` is told.

    Averages are reduced as sums and scaled after the collective, once. Into a partial value nothing is sent: each rank
    keeps an equal addend of a sum (floating point only), the value itself of an average, a maximum or a minimum.
    """
    groups = Groups(axes, joint_axes, ordered, missing)
    for step in plan_steps(shape, explicit(source, axes), explicit(target, axes), groups):
        node = take_step(emitter, node, shape, step, axes)
    return node
