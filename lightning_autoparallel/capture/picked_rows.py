"""Whole numbers of a batch that a step takes for positions of rows: the place of a row's partner, its own number.

A collate function knows the rows of one rank's batch, from 0 on. A captured step has the rows of all ranks, where the
same number is the place of another row. What the step itself finds among all rows (``argsort``, ``arange``) is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.capture.cut_rows import OTHER_CALLS, untold
from lightning_autoparallel.capture.growth import Call
from lightning_autoparallel.capture.growth_rules import is_view, name_of
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.dispatch import OpOverload
from lightning_autoparallel.torch_compat.schemas import named_arguments
from lightning_autoparallel.torch_compat.tree import tree_leaves

Picked = tuple[Any, int | None, Any]  # of which tensor, along which dim or over all of it, what is the position

_AT_DIM = {  # tensor, dim and index
    *("gather", "index_select", "scatter", "scatter_add", "scatter_reduce"),
    *("index_add", "index_copy", "index_fill", "index_reduce"),
}
_AT_INDICES = {"index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"}
_OF_CLASSES = ("nll_loss", "multi_margin_loss", "multilabel_margin_loss")
COMPARED = {"eq", "ne", "lt", "le", "gt", "ge"}
# Positions among what their argument has along a dim, and the place of those among the results.
FOUND = {"argsort": 0, "argmax": 0, "argmin": 0, "sort": 1, "topk": 1, "kthvalue": 1, "max": 1, "min": 1, "cumsum": 0}
FOUND_ANYWHERE = {"nonzero", "randperm"}
NO_POSITIONS = {"sum", "count_nonzero", "bincount", "histc", "mean", "prod", "empty_like", "zeros_like", "ones_like"}
_FIRST_ONLY = {"index", "_unsafe_index", "index_select", "gather", "take", "masked_select"}  # has what it picks from


def check_picked_rows(
    name: str, line: str, once: Sequence[Call], twice: Sequence[Call], leaves: Mapping[int, tuple[str, Tensor]]
) -> None:
    """Whole numbers of the batch, ``leaves`` by the identity they have in the run ``once``, are no positions of rows.

    ``twice`` has the calls of a run on twice the rows, ``line`` is where the step begins.

    Raises:
        CaptureError: one is used as a position along a dim that grows with the rows.
    """
    held = {identity: path for identity, (path, _) in leaves.items()}
    if [call.operator for call in once] != [call.operator for call in twice]:
        raise untold(name, line, OTHER_CALLS)
    found: set[int] = set()  # positions among all rows
    for one, other in zip(once, twice, strict=True):
        if not isinstance(one.operator, OpOverload):
            continue
        called = name_of(one.operator)
        pairs = zip(picks(called, one.args), picks(called, other.args), strict=False)
        for (tensor, dim, index), (grown, *_) in pairs:
            if id(index) in held and index.dtype != torch.bool and _grows(tensor, grown, dim):
                raise CaptureError(_refused(name, line, held[id(index)], called, tensor, dim))
        of_held = next((held[id(leaf)] for leaf in one.args[:2] if id(leaf) in held), None)
        if called in COMPARED and of_held is not None and any(id(leaf) in found for leaf in one.args[:2]):
            raise CaptureError(_refused(name, line, of_held, called, one.result, None))
        _follow(called, one, other, held, found)


def _follow(called: str, one: Call, other: Call, held: dict[int, str], found: set[int]) -> None:
    """Results have what they were given."""
    results = [leaf for leaf in tree_leaves(one.result) if isinstance(leaf, Tensor)]
    leaves = [leaf for leaf in tree_leaves(_values(called, one)) if isinstance(leaf, Tensor)]
    if called in FOUND_ANYWHERE or any(id(leaf) in found for leaf in leaves) or _is_longer_range(called, one, other):
        found.update(map(id, results))
        return
    path = next((held[id(leaf)] for leaf in leaves if id(leaf) in held), None)
    for place, result in enumerate(results):
        whole = may_hold(result.dtype) or (result.dtype != torch.bool and is_by_element(one.operator))
        if FOUND.get(called) == place and len(results) > place:
            dim = dim_of(one.operator, one.args, one.kwargs)
            if any(a != b for a, b in zip(_along(one, dim), _along(other, dim), strict=False)):
                found.add(id(result))
                continue
        if path is not None and whole and called not in NO_POSITIONS:
            held[id(result)] = path


def _values(called: str, call: Call) -> Any:
    """What a result is made of, positions apart."""
    if called in _FIRST_ONLY:
        return call.args[:1]
    if called in _AT_DIM:
        return call.args[0], call.args[3:]
    return (call.args[0], call.args[2:]) if called in _AT_INDICES else (call.args, call.kwargs)


def _along(call: Call, dim: int | None) -> tuple[int, ...]:
    shape = tuple(call.args[0].shape)
    return shape if dim is None or not shape else (shape[dim],)


def dim_of(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Along which dim a call finds positions; None for all of them."""
    usual = None if name_of(operator) in ("argmax", "argmin") else -1
    has_dim = any(argument.name == "dim" for argument in operator._schema.arguments)
    dim = named_arguments(operator, args, kwargs).get("dim", usual) if has_dim else None
    return dim if isinstance(dim, int) else None


def _is_longer_range(called: str, one: Call, other: Call) -> bool:
    return called == "arange" and one.result.numel() != other.result.numel()


def may_hold(dtype: torch.dtype) -> bool:
    """Whether values of this dtype are whole numbers."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def is_by_element(operator: Any) -> bool:
    """Whether whole numbers stay what they are as floating ones."""
    joins = ("_to_copy", "cat", "stack", "copy", "clone")
    return torch.Tag.pointwise in operator.tags or name_of(operator) in joins or is_view(operator)


def picks(called: str, args: Sequence[Any]) -> Iterator[Picked]:
    """What a call takes for positions: tensors, or nodes of a graph."""
    if called in _AT_DIM and len(args) > 2:
        yield args[0], args[1], args[2]
    elif called in _AT_INDICES:
        yield from ((args[0], dim, index) for dim, index in enumerate(args[1]) if index is not None)
    elif called in ("take", "put"):
        yield args[0], None, args[1]
    elif called == "embedding":
        yield args[0], 0, args[1]
    elif called.startswith("_embedding_bag") and "backward" not in called:
        yield from ((args[0], 0, args[1]), (args[1], 0, args[2]))
    elif called.startswith(_OF_CLASSES) and "backward" not in called:
        first = args[0] if isinstance(args[0], Tensor) else fxn.values(args[0])[0]
        dims = 1 if first is None else first.dim()
        yield args[0], min(dims - 1, 1), args[1]


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
