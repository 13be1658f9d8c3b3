"""Functions of torch that a captured step calls in another form, as theirs is wrong, or none, in a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The hinge loss between each label of a row and each class that is none of its labels, over the number of classes.

    The formula is that of ``torch.nn.MultiLabelMarginLoss``; what torch 2.13 makes of it without a kernel also
    counts the places of a row after its labels.

    Args:
        input: scores of shape (N, C) or (C,).
        target: labels of the same shape, ended by the first -1 of a row.
        size_average: deprecated, like ``reduce``: with them the ``reduction`` is what torch takes them for.
        reduce: see there.
        reduction: ``mean`` or ``sum`` over rows, or ``none``.
    """
    if size_average is not None or reduce is not None:
        summed = "mean" if size_average in (None, True) else "sum"
        reduction = summed if reduce in (None, True) else "none"
    counted = (target == -1).cumsum(-1) == 0
    label = torch.where(counted, target, 0)
    classes = torch.arange(input.shape[-1], device=input.device)
    is_label = ((label.unsqueeze(-1) == classes) & counted.unsqueeze(-1)).any(-2)
    margins = 1 - input.gather(-1, label).unsqueeze(-1) + input.unsqueeze(-2)  # (N, place of the label, class)
    wanted = counted.unsqueeze(-1) & ~is_label.unsqueeze(-2)
    loss = torch.where(wanted, margins.clamp_min(0), 0).sum((-2, -1)) / input.shape[-1]
    return {"mean": loss.mean, "sum": loss.sum}.get(reduction, lambda: loss)()


def _with_dense_gradient(lookup: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A look-up in a table whose gradient is dense, whatever is asked for: shards of it are reduced as others are."""
    signature = inspect.signature(lookup)

    def dense(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["sparse"] = False
        return lookup(*bound.args, **bound.kwargs)

    return dense


REPLACED: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        F.multilabel_margin_loss: multilabel_margin_loss,
        F.embedding: _with_dense_gradient(F.embedding),
        F.embedding_bag: _with_dense_gradient(F.embedding_bag),
    }
)
