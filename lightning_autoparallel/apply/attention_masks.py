"""Masks that fused attention draws inside, for its dropout: what ranks compute together must be drawn together.

So must what other calls draw beside another result, as RReLU does.

Ranks of different batch shards draw from different seeds. Nothing but the seed leaves the call, to draw the same mask
again in the backward, by the place that an element has in what a rank holds.
"""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.contracts import Placements, ShardingPlan
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.schemas import named_arguments

_REMEDY = "apply dropout outside of attention (F.dropout of its result), or set its dropout_p to 0"


def check_masks(node: fx.Node, plan: ShardingPlan, is_local: bool) -> None:
    """Whether the mask that a call draws is that of all ranks which compute it, and of its forward.

    In a program of each rank by itself (``is_local``) nothing is computed together.

    Raises:
        UnsupportedOpError: it is not; each rank can run such a step by itself, in forward mode.
    """
    if not fxn.draws_mask(node):
        _check_several(node, plan, is_local)
        return
    placed = plan.nodes[node.name].outputs[0] or ()
    if fxn.is_random(node):
        alone = _drawn_alone(placed, plan)
        if alone and not is_local:
            raise UnsupportedOpError(
                f"{fxn.describe(node)}: attention with dropout of what does not depend on the batch, such as learned "
                f"queries, would drop otherwise on each rank of {', '.join(alone)}: {_REMEDY}"
            )
        return
    forward = _forward_of(node)
    if forward is not None and plan.nodes[forward.name].outputs[0] != placed:
        raise UnsupportedOpError(
            f"{fxn.describe(node)}: the backward of attention with dropout lies otherwise than its forward, and would "
            f"drop other elements: {_REMEDY}"
        )


def _check_several(node: fx.Node, plan: ShardingPlan, is_local: bool) -> None:
    """The same of a call that draws several results at once, which are not sent to those who have to have them."""
    if is_local or not (fxn.is_random(node) and isinstance(node.meta["val"], tuple)):
        return
    placed = plan.nodes[node.name].outputs
    alone = {name for one in placed if one is not None for name in _drawn_alone(one, plan)}
    if alone:
        raise UnsupportedOpError(
            f"{fxn.describe(node)}: what it draws would be other numbers on each rank of {', '.join(sorted(alone))}, "
            "which compute it together: draw with torch.rand and compute with that"
        )


def _drawn_alone(placed: Placements, plan: ShardingPlan) -> list[str]:
    """Axes whose ranks draw from different seeds what all of them should have."""
    pairs = zip(plan.axes, placed, strict=True)
    return [axis.name for axis, placement in pairs if axis.shards_batch and placement.is_replicate()]


def _forward_of(backward: fx.Node) -> fx.Node | None:
    """The call that has drawn the seed."""
    seed = named_arguments(backward.target, backward.args, backward.kwargs).get("philox_seed")
    if not isinstance(seed, fx.Node) or not fxn.is_getitem(seed):
        return None
    source = seed.args[0]
    return source if isinstance(source, fx.Node) else None
