"""Rows that a step takes apart by where they stand in the batch: halves of two kinds, episodes of several classes.

Who makes a batch may put rows of one kind behind those of another (``labelled, unlabelled = x.chunk(2)``,
``x.view(ways, -1, d)``). A captured step has the rows of one rank behind those of another, where halves are others'.
Where each rank has one row, ``x[0]`` is that of rank 0. Neighbours stay together (``x.view(-1, 2, d)``), and what the
step itself has joined (``cat``) comes apart rightly.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from torch import Tensor, fx

from lightning_autoparallel.capture.growth import Call
from lightning_autoparallel.capture.growth_rules import name_of
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.dispatch import OpOverload
from lightning_autoparallel.torch_compat.schemas import named_arguments
from lightning_autoparallel.torch_compat.tree import tree_leaves

_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_split_with_sizes"}
_JOINS = {"cat", "stack", "repeat", "repeat_interleave"}
OTHER_CALLS = "other operators are called on twice the rows"
_END = 2**62  # what a slice without an end has is above it


def may_cut_rows(graph: fx.Graph, length: int, is_single: bool = False) -> bool:
    """Whether the forward might take ``length`` rows apart: rough, but it asks no second run.

    Where each rank ``is_single``, has one row, it might take that out. Blocks that stand for many are not looked into.
    """
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or fxn.is_backward(node):
            continue
        given = fxn.values(node.args[0])[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if given is None or not given.dim() or not given.shape[0] or given.shape[0] % length:
            continue
        if is_single and _takes_one(node.target, node.args, node.kwargs, given.dim()):
            return True
        if name_of(node.target) in _VIEWS:
            leading = fxn.values(node)[0].shape[:1]  # type: ignore[union-attr]
            if leading and 1 < leading[0] < given.shape[0] and leading[0] % length:
                return True
        elif _cuts(node.target, node.args, node.kwargs, given.shape) is not None:
            return True
    return False


def check_cut_rows(
    name: str,
    line: str,
    once: Sequence[Call],
    twice: Sequence[Call],
    batch: Collection[Tensor],
    length: int,
    is_single: bool = False,
) -> None:
    """Rows of the ``batch``, the tensors of the run ``once`` that have ``length`` of them, stay in their order.

    ``twice`` has the calls of a run on twice the rows, ``line`` is where the step begins.

    Raises:
        CaptureError: they are taken apart at places that depend on how many there are; or one of them is taken out,
            where each rank ``is_single``, has one.
    """
    if [call.operator for call in once] != [call.operator for call in twice]:
        raise untold(name, line, OTHER_CALLS)
    ordered = {id(tensor) for tensor in batch}  # in the order in which the batch was made
    for one, other in zip(once, twice, strict=True):
        if not isinstance(one.operator, OpOverload) or name_of(one.operator) in _JOINS:
            continue
        if one.args and id(one.args[0]) in ordered:
            takes_one = is_single and _takes_one(one.operator, one.args, one.kwargs, one.args[0].dim())
            if takes_one or _takes_apart(one, other):
                raise CaptureError(_refused(name, line, name_of(one.operator), tuple(one.args[0].shape)))
        if any(id(leaf) in ordered for leaf in tree_leaves((one.args, one.kwargs))):
            pairs = zip(_tensors(one.result), _tensors(other.result), strict=False)
            ordered.update(id(a) for a, b in pairs if _are_rows(a, b, length))


def _are_rows(one: Tensor, other: Tensor, length: int) -> bool:
    """Whether dim 0 are rows, or parts of each behind those of the one before."""
    return bool(one.dim() and one.shape[0]) and one.shape[0] % length == 0 and other.shape[0] == 2 * one.shape[0]


def _takes_apart(one: Call, other: Call) -> bool:
    given, grown = one.args[0], other.args[0]
    if name_of(one.operator) in _VIEWS:
        leading = one.result.shape[:1]
        return bool(leading) and 1 < leading[0] < given.shape[0] and leading == other.result.shape[:1]
    cuts = _cuts(one.operator, one.args, one.kwargs, given.shape)
    return cuts != _cuts(other.operator, other.args, other.kwargs, grown.shape)


def _takes_one(operator: Any, args: Any, kwargs: Any, dims: int) -> bool:
    """Whether dim 0 goes, as it may where it is one row: ``x[0]``, ``x.squeeze(0)``."""
    called, dim = name_of(operator), named_arguments(operator, args, kwargs).get("dim")
    if called == "select":
        return (dim or 0) % dims == 0
    every = range(dims) if dim is None else [dim] if isinstance(dim, int) else dim
    return called == "squeeze" and any(each % dims == 0 for each in every)


def _cuts(operator: Any, args: Any, kwargs: Any, shape: Sequence[int]) -> Hashable:
    """Where dim 0 is cut; None where nothing cuts it."""
    called, given = name_of(operator), named_arguments(operator, args, kwargs)
    if (called not in _SPLITS and called != "slice") or given.get("dim", 0) % len(shape):
        return None
    if called != "slice":
        sizes = args[1] if len(args) > 1 else None
        is_one = len(sizes) == 1 if isinstance(sizes, (list, tuple)) else sizes == 1 and called == "chunk"
        return None if is_one or (called.endswith("split") and sizes == shape[0]) else str(sizes)
    start, end = given.get("start") or 0, given.get("end")
    end = _END if end is None or end >= shape[0] else end
    return None if (start, end) == (0, _END) else (start, end)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def untold(name: str, line: str, why: str) -> CaptureError:
    """What to raise where a second run does not tell whether rows are taken rightly."""
    return CaptureError(
        f"{line}: whether {name} takes rows by their places in the rank's batch, which would be others' among those of "
        f"all ranks, cannot be told: {why}"
    )


def _refused(name: str, line: str, called: str, shape: tuple[int, ...]) -> str:
    return (
        f"{line}: {name} takes the batch's rows apart by where they stand ({called} of a tensor of shape "
        f"{list(shape)}): if they were put in that order when the batch was made, a captured step, which has the rows "
        "of one rank behind those of another, would take others for them"
    )
