"""What one call of an operator does to growth: see ``growth``. Of what is not listed here nothing is claimed.

Values are functions of how often each row is there, of a degree that products add and quotients subtract; a sum has the
highest degree of what is added. A sum over dims that grow adds one for each doubling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightning_autoparallel.torch_compat.constants import number_of
from lightning_autoparallel.torch_compat.dispatch import OpOverload, shows_argument
from lightning_autoparallel.torch_compat.tracing import is_real
from lightning_autoparallel.torch_compat.tree import tree_leaves

if TYPE_CHECKING:
    from lightning_autoparallel.capture.growth import Call

ZERO: Literal["zero"] = "zero"  # a zero is as large as any number of zeros
Growth = float | Literal["zero"] | None
Of = Callable[[Any, Any], Growth]
Pair = tuple[Any, Any]

_JOINED = {  # by the places of what is added, or stands side by side
    **dict.fromkeys(("add", "sub", "rsub", "maximum", "fmax", "hypot", "lerp"), (0, 1)),
    **dict.fromkeys(("slice_scatter", "select_scatter"), (0, 1)),
    "scatter": (0, 3),
    **dict.fromkeys(("cat", "stack"), (0,)),
    **dict.fromkeys(("copy", "fill"), (1,)),
    "masked_fill": (0, 2),
    "where": (1, 2),
}
_LESSER = {"minimum", "fmin"}
_COMPARED = {"eq", "ne", "lt", "le", "gt", "ge", "isclose"}
_SUMS = {"sum", "nansum"}
_COUNTS = {"count_nonzero", "histc"}
_MEANS = {"mean", "nanmean", "amax", "amin", "max", "min", "aminmax", "median", "nanmedian", "mode"}
_PLACES = {"argmax", "argmin", "argsort", "any", "all", "sign", "logical_not"}
_SPREADS = {"var", "std", "var_mean", "std_mean"}
_PICKS = {"index", "index_select", "gather", "take", "topk", "sort", "kthvalue"}
_KEPT = {  # views are seen to elsewhere
    *("abs", "neg", "relu", "leaky_relu", "round", "floor", "ceil", "trunc", "clamp", "clamp_min", "clamp_max"),
    *("_to_copy", "clone", "_unsafe_view", "flip", "roll", "repeat", "tril", "triu", "nan_to_num", "constant_pad_nd"),
}
_FIRST = _MEANS | _PICKS | _KEPT
_PRODUCTS = {"mm", "bmm", "dot", "vdot", "mv"}
_ADDED_PRODUCTS = {"addmm", "baddbmm", "addmv"}
_ADDED_AT = {"scatter_add", "index_add", "index_put", "_unsafe_index_put", "scatter_reduce"}
_FILLED = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # by the place of what they are full of
_ZEROS = {"zeros", "zeros_like", "new_zeros", "zero"}
_OF_NUMBERS = {"lift_fresh", "lift_fresh_copy"}  # what torch.tensor(number) calls
_POWERS = {"sqrt": 0.5, "square": 2.0, "reciprocal": -1.0, "rsqrt": -0.5}


def growth_of_number(one: Any, other: Any) -> Growth:
    """Of a Python number, as it is in both runs."""
    if type(one) is not type(other) or not isinstance(one, (int, float)):
        return 0.0 if one is other or one == other else None
    if one == other:
        return ZERO if one == 0 and type(one) is not bool else 0.0
    return _whole(math.log2(other / one)) if one > 0 and other > 0 else None


def name_of(operator: OpOverload) -> str:
    """``add`` for ``aten::add_``."""
    return str(operator._schema.name).split("::")[1].removesuffix("_")


def is_view(operator: Any) -> bool:
    """Whether the operator gives another look at its argument."""
    is_known = isinstance(operator, OpOverload)
    return is_known and shows_argument(operator) and operator._schema.name.split("::")[1] not in _OF_NUMBERS


def growth_of_call(one: Call, other: Call, result: Pair, of: Of) -> Growth:
    """Of the tensors ``result``, one of those that the call gives in the two runs."""
    if not isinstance(one.operator, OpOverload):
        return None
    name = name_of(one.operator)
    pairs = list(zip(one.args, other.args, strict=False))
    found = _by_name(name, one, pairs, result, of)
    return found if found != "unlisted" else _unlisted(one, other, result, of)


def _by_name(name: str, one: Call, pairs: list[Pair], result: Pair, of: Of) -> Growth | Literal["unlisted"]:
    if name in _ZEROS:
        return ZERO
    if name in _FILLED:
        return of(*pairs[_FILLED[name]])
    if name in _JOINED:
        return highest(_growths([pairs[place] for place in _JOINED[name] if place < len(pairs)], of))
    if not pairs or not isinstance(pairs[0][0], Tensor):
        return "unlisted"
    first = of(*pairs[0])
    if name in _OF_NUMBERS:
        return growth_of_number(*map(_value, pairs[0])) if is_real(pairs[0][0]) else first
    if name in _FIRST or "batch_norm" in name:
        return first
    if name in _COUNTS or name in _SUMS:
        return _plus(first if name in _SUMS else 0.0, _gone(pairs[0], result))
    if name in _PLACES:
        return 0.0
    if name in _POWERS:
        return _times(first, _POWERS[name])
    return _of_several(name, one, first, pairs, result, of)


def _of_several(
    name: str, one: Call, first: Growth, pairs: list[Pair], result: Pair, of: Of
) -> Growth | Literal["unlisted"]:
    if name in _COMPARED:
        return None if _alike([first, of(*pairs[1])]) is None else 0.0
    if name in _LESSER:
        return _alike([first, of(*pairs[1])])
    if name == "mul":
        return _plus(first, of(*pairs[1]))
    if name == "div" and not one.kwargs.get("rounding_mode"):
        return _minus(first, of(*pairs[1]))
    if name in _PRODUCTS:
        return _product(pairs, of)
    if name in _ADDED_PRODUCTS:
        return highest([first, _product(pairs[1:], of)])
    if name in _ADDED_AT:
        return _added_at(one, pairs, of)
    if name in _SPREADS:
        return _flat(first)
    return _by_reduction(one, first, pairs, result)


def _value(tensor: Tensor) -> Any:
    """Of a tensor that was made of a number; what holds more says nothing of size."""
    return number_of(tensor) if tensor.numel() == 1 and tensor.dtype is not torch.bool else True


def _by_reduction(one: Call, first: Growth, pairs: list[Pair], result: Pair) -> Growth | Literal["unlisted"]:
    """A loss, which says by number whether it is a mean (1) or a sum (2)."""
    names = [argument.name for argument in one.operator._schema.arguments]
    if "reduction" not in names or "backward" in one.operator._schema.name or first not in (0.0, ZERO):
        return "unlisted"
    place = names.index("reduction")
    how = one.args[place] if place < len(one.args) else one.kwargs.get("reduction", 1)
    if result[0].dim() or how == 0:
        return 0.0
    is_weight = one.operator._schema.name.startswith("aten::nll_loss") and result[0] is not one.result[0]
    return _gone(pairs[0], result) if how == 2 or is_weight else 0.0


def _unlisted(one: Call, other: Call, result: Pair, of: Of) -> Growth:
    """What depends on nothing that grows, row by row, does not grow."""
    given = list(zip(tree_leaves((one.args, one.kwargs)), tree_leaves((other.args, other.kwargs)), strict=False))
    tensors = [pair for pair in given if isinstance(pair[0], Tensor)]
    if not all(isinstance(grown, Tensor) for _, grown in tensors):
        return None
    if any(of(*pair) not in (0.0, ZERO) for pair in tensors) or _is_along_rows(one, other):
        return None
    return None if any((_gone(pair, result) or 0.0) > 0 for pair in tensors) else 0.0


def _is_along_rows(one: Call, other: Call) -> bool:
    """Whether the dim that an operator works along (softmax, cumsum) is one that grows."""
    names = [argument.name for argument in one.operator._schema.arguments]
    if "dim" not in names or not one.args or not isinstance(one.args[0], Tensor):
        return False
    place = names.index("dim")
    dim = one.args[place] if place < len(one.args) else one.kwargs.get("dim")
    dims = [dim] if type(dim) is int else dim if isinstance(dim, (list, tuple)) else []
    return any(one.args[0].shape[each] != other.args[0].shape[each] for each in dims)


def _growths(pairs: Sequence[Pair], of: Of) -> list[Growth]:
    """Of tensors and numbers, those in lists too; what is neither says nothing of size."""
    leaves = [leaf for one, other in pairs for leaf in zip(tree_leaves([one]), tree_leaves([other]), strict=False)]
    return [of(*leaf) for leaf in leaves if isinstance(leaf[0], (Tensor, float)) or type(leaf[0]) is int]


def _alike(growths: Sequence[Growth]) -> Growth:
    """Of which one is picked, or tells something, for as long as all grow alike."""
    others = {growth for growth in growths if growth != ZERO}
    return ZERO if not others else others.pop() if len(others) == 1 else None


def highest(growths: Sequence[Growth]) -> Growth:
    """Of a sum, or of what stands side by side: a part of it grows so."""
    if None in growths:
        return None
    return max((float(growth) for growth in growths if growth is not None and growth != ZERO), default=ZERO)


def _plus(one: Growth, other: Growth) -> Growth:
    if one is None or other is None:
        return None
    return ZERO if ZERO in (one, other) else float(one) + float(other)


def _minus(one: Growth, other: Growth) -> Growth:
    return _plus(one, _times(other, -1.0)) if other != ZERO else None


def _times(one: Growth, factor: float) -> Growth:
    return one if one is None or one == ZERO else float(one) * factor


def _flat(*growths: Growth) -> Growth:
    return 0.0 if all(growth in (0.0, ZERO) for growth in growths) else None


def _product(pairs: Sequence[Pair], of: Of) -> Growth:
    contracted = pairs[0][0].shape[-1], pairs[0][1].shape[-1]
    if not all(contracted):
        return None
    return _plus(_plus(of(*pairs[0]), of(*pairs[1])), _whole(math.log2(contracted[1] / contracted[0])))


def _added_at(one: Call, pairs: Sequence[Pair], of: Of) -> Growth:
    """Rows of the last tensor, put or added where an index says, into the first."""
    flat = [pair for each in pairs for pair in zip(*map(tree_leaves, ([each[0]], [each[1]])), strict=False)]
    tensors = [pair for pair in flat if isinstance(pair[0], Tensor)]
    how = [*one.args, *one.kwargs.values()]
    is_added = "put" not in str(one.operator) or any(each is True for each in how)
    if "scatter_reduce" in str(one.operator) and "sum" not in how:
        return _flat(*(of(*pair) for pair in tensors))
    gone = [_gone(pair, pairs[0]) for pair in tensors[1:]] if is_added else [0.0]
    if len(tensors) < 2 or None in gone:
        return None
    return highest([of(*pairs[0]), _plus(of(*tensors[-1]), max(each for each in gone if each is not None))])


def _gone(given: Pair, result: Pair) -> float | None:
    """Doublings of what is given that the result does not have: over so many dims of rows it is a sum."""
    if not all(tensor.numel() for tensor in (*given, *result)):
        return None
    return _whole(math.log2(given[1].numel() / given[0].numel() * result[0].numel() / result[1].numel()))


def _whole(growth: float) -> float | None:
    return float(round(growth)) if math.isfinite(growth) and abs(growth - round(growth)) < 0.01 else None
