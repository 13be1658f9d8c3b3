"""Rules of operators that write values into a tensor: at one place of a dim, or where a mask says."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.plan.rules import OpCall, P, R, Row, S, rule

aten = torch.ops.aten
_TRUTH = (torch.bool, torch.uint8)


def _broadcast(values: Tensor, dim: int, rank: int) -> Placement:
    """Where values lie that are broadcast to ``rank`` dims, of which ``dim`` is cut."""
    own = dim - (rank - values.dim())
    return R if own < 0 or values.shape[own] == 1 else S(own)


@rule(aten.select_scatter.default)
def select_scatter_rule(call: OpCall) -> list[Row]:
    """Independent along every dim but the one of which one place is written; both tensors may be partial sums."""
    target, _ = call.inputs
    written = call.args[2] % target.dim()
    rows: list[Row] = [((S(d),), (S(d), S(d - (d > written)))) for d in range(target.dim()) if d != written]
    return [*rows, ((P,), (P, P))]


@rule(aten.index_put.default)
def masked_put_rule(call: OpCall) -> list[Row] | None:
    """Where the only index is a mask: it covers as many dims as it has, what is true in it is one dim of the values.

    Along the dims beside those everything is independent; along the mask's, if one value goes to all that is true.
    Beside other indices a mask of several dims is what torch's own rule takes for one of one dim.
    """
    indices = [index for index in call.args[1] if index is not None]
    masks = [index for index in indices if index.dtype in _TRUTH]
    if len(indices) > 1 and any(mask.dim() > 1 for mask in masks):
        return [((P,), (P, *[R] * len(indices), P))]
    if len(indices) != 1 or not masks:
        return None
    target, mask, values = call.inputs
    first = next(place for place, index in enumerate(call.args[1]) if index is not None)
    after = first + mask.dim()
    rank = target.dim() - mask.dim() + 1  # of what is written: the dims before, what is true, the dims after
    rows: list[Row] = []
    for dim in range(target.dim()):
        if first <= dim < after:
            if _broadcast(values, first, rank) is R:
                rows.append(((S(dim),), (S(dim), S(dim - first), R)))
        else:
            written = dim if dim < first else dim - mask.dim() + 1
            rows.append(((S(dim),), (S(dim), R, _broadcast(values, written, rank))))
    return [*rows, ((P,), (P, R, P))]
