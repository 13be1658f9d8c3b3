"""Whole numbers of a batch that a step takes for positions of rows: the place of a row's partner, its own number.

A collate function knows the rows of one rank's batch, from 0 on. A captured step has the rows of all ranks, where the
same number is the place of another row. What the step itself finds among all rows (``argsort``, ``arange``) is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.capture.growth import Call
from lightning_autoparallel.capture.growth_rules import is_view
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.dispatch import OpOverload
from lightning_autoparallel.torch_compat.tree import tree_leaves

Picked = tuple[Tensor, int | None, Any]  # of which tensor, along which dim or over all of it, what is the position

_AT_DIM = {  # tensor, dim and index
    *("gather", "index_select", "scatter", "scatter_add", "scatter_reduce"),
    *("index_add", "index_copy", "index_fill", "index_reduce"),
}
_AT_INDICES = {"index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"}
_FOUND = {"arange", "argsort", "sort", "topk", "cumsum", "nonzero", "randperm", "unique_dim", "_unique2"}
_CARRIES = {
    *("_to_copy", "clone", "cat", "stack", "repeat", "flip", "roll", "where", "masked_fill", "constant_pad_nd"),
    *("index", "index_select", "gather", "masked_select", "add", "sub", "mul", "clamp", "clamp_min", "clamp_max"),
    *("maximum", "minimum", "copy", "lift_fresh_copy", "_unsafe_view", "floor_divide", "div"),
}


def check_picked_rows(
    name: str, line: str, once: Sequence[Call], twice: Sequence[Call], leaves: Mapping[int, tuple[str, Tensor]]
) -> None:
    """Whole numbers of the batch, ``leaves`` by the identity they have in the run ``once``, are no positions of rows.

    ``twice`` has the calls of a run on twice the rows, ``line`` is where the step begins.

    Raises:
        CaptureError: one is used as a position along a dim that grows with the rows.
    """
    if [call.operator for call in once] != [call.operator for call in twice]:
        return
    held = {identity: path for identity, (path, _) in leaves.items()}
    found: set[int] = set()  # positions among all rows
    for one, other in zip(once, twice, strict=True):
        if not isinstance(one.operator, OpOverload):
            continue
        called = one.operator._schema.name.split("::")[1].removesuffix("_")
        for (tensor, dim, index), (grown, *_) in zip(_picks(called, one), _picks(called, other), strict=False):
            if id(index) in held and index.dtype != torch.bool and _grows(tensor, grown, dim):
                raise CaptureError(_refused(name, line, held[id(index)], called, tensor, dim))
        _follow(called, one, held, found)


def _follow(called: str, call: Call, held: dict[int, str], found: set[int]) -> None:
    """Results have what they were given."""
    results = [leaf for leaf in tree_leaves(call.result) if isinstance(leaf, Tensor) and leaf.dtype != torch.bool]
    if called in _FOUND:
        found.update(map(id, results))
        return
    if called not in _CARRIES and not is_view(call.operator):
        return
    given = tree_leaves(call.args[:1] if called in ("index", "index_select", "gather") else (call.args, call.kwargs))
    if any(id(leaf) in found for leaf in given):
        found.update(map(id, results))
        return
    path = next((held[id(leaf)] for leaf in given if id(leaf) in held), None)
    if path is not None:
        held.update(dict.fromkeys(map(id, results), path))


def _picks(called: str, call: Call) -> Iterator[Picked]:
    """What a call takes for positions."""
    args = call.args
    if called in _AT_DIM and len(args) > 2:
        yield args[0], args[1], args[2]
    elif called in _AT_INDICES:
        yield from ((args[0], dim, index) for dim, index in enumerate(args[1]) if isinstance(index, Tensor))
    elif called in ("take", "put"):
        yield args[0], None, args[1]
    elif called == "embedding":
        yield args[0], 0, args[1]
    elif called.startswith("_embedding_bag"):
        yield from ((args[0], 0, args[1]), (args[1], 0, args[2]))
    elif called.startswith("nll_loss") and "backward" not in called:
        yield args[0], min(args[0].dim() - 1, 1), args[1]


def _grows(tensor: Tensor, grown: Tensor, dim: int | None) -> bool:
    if dim is None:
        return grown.numel() > tensor.numel()
    return tensor.dim() > 0 and grown.shape[dim] > tensor.shape[dim]


def _refused(name: str, line: str, path: str, called: str, tensor: Tensor, dim: int | None) -> str:
    along = "all of it" if dim is None else f"dim {dim}"
    return (
        f"{line}: {name} takes whole numbers of the batch ('{path or 'batch'}') for positions along {along} of a "
        f"tensor of shape {list(tensor.shape)}, which grows with the rows ({called}): who makes a batch knows the rows "
        "of one rank only, and a captured step has those of all ranks; positions that the step makes itself "
        "(torch.arange) are right in both"
    )
