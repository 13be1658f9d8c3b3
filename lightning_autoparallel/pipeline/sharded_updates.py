"""Updates of parameters that lie in shards, with the results of one device.

An optimizer knows its parameters as DTensors. Torch's rules for those are right where an operator works element by
element, are missing for some operators, and add up products of matrices in parts, rounding each. While
``ShardedUpdates`` is open, calls on DTensors are made as one device makes them:

- element by element: on this rank's parts, nothing is sent;
- sums and norms: of the parts, then of all ranks;
- whatever else, products of matrices say, and sums in 16 bits, which would be rounded in parts: on whole tensors,
  gathered for the call. Every rank computes the result, and what follows from it alone is computed whole; what is
  written into a shard is cut.

Random numbers are those of rank 0.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_autoparallel.apply.params import from_first_rank
from lightning_autoparallel.pipeline.owed_gradients import cut_like
from lightning_autoparallel.torch_compat.autograd import is_replaced_step
from lightning_autoparallel.torch_compat.dispatch import TorchDispatchMode, is_random, shows_argument, written
from lightning_autoparallel.torch_compat.schemas import named_arguments
from lightning_autoparallel.torch_compat.tree import tree_leaves, tree_map

aten = torch.ops.aten

# Element by element, though not tagged so; `index_put_` where a mask says which elements.
_ELEMENTWISE = {
    *(aten.copy_, aten.fill_, aten.zero_, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    *(aten._to_copy, aten.masked_fill, aten.masked_fill_, aten.index_put, aten.index_put_),
}
_SAME_MEMORY = {aten.detach, aten.alias, aten.t, aten.transpose, aten.permute, aten.unsqueeze}
_ADDS_UP = {aten.sum, aten.linalg_vector_norm}
_REDUCES = {*_ADDS_UP, aten.amax, aten.amin, aten.any, aten.all}
_REDUCES_ALL = {aten.max.default, aten.min.default}
_MEANS = {aten.mean.default, aten.mean.dim}
_REDUCES_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
_LISTS = ("_foreach_", "_fused_")
_SHOWN = "_autoparallel_shown"  # on a tensor that shows part of a gathered one: that, and whose it is


# Torch's own rules do for all that these call, and take less time.
_BY_TORCH = {getattr(torch.optim, name) for name in ("Adadelta", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam")}
_BY_TORCH_UNFUSED = {torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.SGD}


def needs_no_help(optimizer: Optimizer) -> bool:
    """Whether an optimizer works on shards as it is: element by element, by operators for which torch has rules.

    Not where a function of somebody's has taken the place of its step.
    """
    if is_replaced_step(optimizer):
        return False
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer) in _BY_TORCH or (type(optimizer) in _BY_TORCH_UNFUSED and not is_fused)


class ShardedUpdates(TorchDispatchMode):
    """A dispatch mode, open while an optimizer steps; every rank makes the same calls, on a mesh that all share.

    Where that is not sure, ranks ``meet`` ahead of each call that sends something.
    """

    def __init__(self, meet: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._meet = meet

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """For code that is no update: an optimizer's closure."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sharded = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        if not sharded:
            return func(*args, **kwargs)
        if self._meet is not None and _sends(func, args, kwargs, sharded):
            self._meet(func.overloadpacket.__name__)
        result = _dispatched(func, args, kwargs, sharded)
        changed = written(func, args, kwargs)
        for tensor in changed:
            _write_through(tensor)
        is_new = not changed and not shows_argument(func)
        computes_number = is_new and (_is_reduction(func) or any(tensor.dim() for tensor in sharded))
        return tree_map(_plain_number, result) if computes_number else result


@torch.no_grad()
def _dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sharded: Sequence[DTensor]) -> Any:
    packet = func.overloadpacket
    if all(map(_is_whole, sharded)):
        return _on_wholes(func, args, kwargs, sharded[0])  # nothing is gathered
    if packet in _SAME_MEMORY:
        return func(*args, **kwargs)
    if any(placement.is_partial() for tensor in sharded for placement in tensor.placements):
        return _on_wholes(func, args, kwargs, sharded[0])  # gradients that wait
    if (func in _MEANS or packet in _ADDS_UP) and _is_narrow(sharded[0].dtype):
        return _on_wholes(func, args, kwargs, sharded[0])
    if func in _MEANS:
        return _mean(func, args, kwargs, sharded[0])
    if is_random(func) or not (_is_elementwise(func) or _is_reduction(func)):
        return _on_wholes(func, args, kwargs, sharded[0])
    likes = None if _is_reduction(func) else _likes(func, args, kwargs)
    if likes is not None:
        return _element_by_element(func, args, kwargs, likes)
    if _is_reduction(func) and any(map(_may_be_empty, sharded)):
        return _on_wholes(func, args, kwargs, sharded[0])  # of nothing there is no maximum
    try:
        return _by_rule(func, args, kwargs, sharded[0])
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError):  # torch has no rule, and nothing has happened
        return _on_wholes(func, args, kwargs, sharded[0])


def _sends(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sharded: Sequence[DTensor]) -> bool:
    """Whether other ranks take part in a call."""
    if all(map(_is_whole, sharded)):
        return is_random(func)
    if func.overloadpacket in _SAME_MEMORY:
        return False
    likes = _likes(func, args, kwargs) if _is_elementwise(func) and not is_random(func) else None
    if likes is None:
        return True
    lie = {like.placements for like in likes}
    return any(not _is_whole(tensor) and tensor.placements not in lie for tensor in sharded)


def _is_elementwise(func: Any) -> bool:
    is_listed = func.overloadpacket in _ELEMENTWISE or func.__name__.startswith(_LISTS)
    return (is_listed or torch.Tag.pointwise in func.tags) and not _is_reduction(func)


def _is_reduction(func: Any) -> bool:
    is_listed = func in _REDUCES_ALL or func.overloadpacket in _REDUCES
    return is_listed or func.__name__.startswith(_REDUCES_LISTS)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _is_whole(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


# -- element by element ------------------------------------------------------------------------------------------------


def _element_by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], likes: Sequence[DTensor]) -> Any:
    """On this rank's parts, cut as those of ``likes``."""
    if func.__name__.startswith(_LISTS):
        given = [_parts(value, likes) for value in args]
        named = {name: _parts(value, likes) for name, value in kwargs.items()}
    else:
        given, named = tree_map(lambda leaf: _part(leaf, likes[0]), (args, kwargs))
    result = func(*given, **named)
    changed = written(func, args, kwargs)
    if changed:
        return changed[0] if isinstance(result, Tensor) else result
    if isinstance(result, Tensor):
        return _shard(result, likes[0])
    return [_shard(part, like) for part, like in zip(result, likes, strict=True)]


def _likes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor] | None:
    """The tensor, or the one of each entry of lists, whose parts others are to be cut as; None if they cannot be."""
    if not func.__name__.startswith(_LISTS):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        like = _like(tensors, written(func, args, kwargs))
        return None if like is None else [like]
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and len(value)]
    single = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    rows = [[leaf for leaf in (*row, *single) if isinstance(leaf, Tensor)] for row in zip(*lists, strict=True)]
    likes = [_like(row, row[:1]) for row in rows]
    return None if any(like is None for like in likes) else likes  # type: ignore[return-value]


def _like(tensors: Sequence[Tensor], changed: Sequence[Tensor]) -> DTensor | None:
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    like = next((tensor for tensor in sharded if not _is_whole(tensor)), sharded[0] if sharded else None)
    if like is None or any(placement.is_partial() for tensor in sharded for placement in tensor.placements):
        return None
    for tensor in changed:  # what is whole is changed whole
        if tensor.dim() and not (isinstance(tensor, DTensor) and tensor.placements == like.placements):
            return None
    return like if all(tensor.dim() == 0 or tensor.shape == like.shape for tensor in tensors) else None


def _parts(value: Any, likes: Sequence[DTensor]) -> Any:
    if isinstance(value, (list, tuple)) and len(value) == len(likes):
        return [_part(leaf, like) for leaf, like in zip(value, likes, strict=True)]
    return _part(value, likes[0])


def _part(leaf: Any, like: DTensor) -> Any:
    """What this rank's part of ``like`` meets."""
    if not isinstance(leaf, Tensor) or (leaf.dim() == 0 and not isinstance(leaf, DTensor)):
        return leaf
    if not isinstance(leaf, DTensor):
        return cut_like(leaf, like).to_local()
    if leaf.dim() == 0 or leaf.placements == like.placements:
        return leaf.to_local()
    if _is_whole(leaf):
        return cut_like(leaf.to_local(), like).to_local()
    return leaf.redistribute(like.device_mesh, like.placements).to_local()


def _shard(part: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# -- by DTensor's rules ------------------------------------------------------------------------------------------------


def _by_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sample: DTensor) -> Any:
    """As torch does it: sums of all ranks' parts; tensors of several shapes.

    Raises:
        RuntimeError: there is no rule.
    """
    promoted, named = tree_map(lambda leaf: _promoted(leaf, sample), (args, kwargs))
    return tree_map(_all_reduced, func(*promoted, **named))


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: DTensor) -> Any:
    """The sum divided by the count: ranks' own means are of unequal parts."""
    named = named_arguments(func, args, kwargs)
    dims, dtype = named.get("dim"), {"dtype": named.get("dtype")}
    total = _dispatched(aten.sum.dim_IntList, (tensor, dims, named.get("keepdim", False)), dtype, [tensor])
    return total / math.prod(tensor.shape[dim] for dim in dims or range(tensor.dim()))


def _promoted(leaf: Any, sample: DTensor) -> Any:
    """A plain tensor is the same on all ranks."""
    is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.dim() > 0
    return _everywhere(leaf, sample) if is_plain else leaf


def _may_be_empty(tensor: DTensor) -> bool:
    """Whether a rank has no part of it."""
    mesh = tensor.device_mesh
    cuts: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate() and not placement.is_partial():
            dim = placement.dim  # type: ignore[attr-defined]
            cuts[dim] = cuts.get(dim, 1) * mesh.size(axis)
    return any(-(-tensor.shape[dim] // ranks) * (ranks - 1) >= tensor.shape[dim] for dim, ranks in cuts.items())


def _plain_number(leaf: Any) -> Any:
    """One number, which all ranks have, is no DTensor: not everything that takes numbers takes those."""
    is_number = isinstance(leaf, DTensor) and not leaf.dim() and _is_whole(leaf)
    return leaf.to_local() if is_number else leaf


def _all_reduced(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor) or not any(placement.is_partial() for placement in leaf.placements):
        return leaf
    placements = [Replicate() if placement.is_partial() else placement for placement in leaf.placements]
    return leaf.redistribute(leaf.device_mesh, placements)


# -- whole tensors -----------------------------------------------------------------------------------------------------


def _on_wholes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sample: DTensor) -> Any:
    """The call on gathered tensors, each of them gathered once."""
    wholes: dict[int, Tensor] = {}
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor) and id(leaf) not in wholes:
            wholes[id(leaf)] = leaf.to_local() if _is_whole(leaf) else _gathered(leaf)
    given = tree_map(lambda leaf: wholes.get(id(leaf), leaf), (args, kwargs))
    result = func(*given[0], **given[1])
    changed = written(func, args, kwargs)
    if is_random(func):
        for leaf in written(func, *given) or tree_leaves(result):
            from_first_rank(leaf)
    for tensor in changed:
        if isinstance(tensor, DTensor) and not _is_whole(tensor):
            tensor.to_local().copy_(cut_like(wholes[id(tensor)], tensor).to_local())
    if changed:
        return changed[0] if isinstance(result, Tensor) else result
    result = tree_map(lambda leaf: _everywhere(leaf, sample) if isinstance(leaf, Tensor) else leaf, result)
    if shows_argument(func):
        _remember(result, args[0], wholes.get(id(args[0])))
    return result


def _gathered(tensor: DTensor) -> Tensor:
    """The whole, laid out as one device has it, by which products are rounded."""
    whole = tensor.full_tensor()
    if whole.stride() == tensor.stride():
        return whole
    laid_out = torch.empty_strided(whole.shape, tensor.stride(), dtype=whole.dtype, device=whole.device)
    return laid_out.copy_(whole)


def _everywhere(whole: Tensor, sample: DTensor) -> DTensor:
    placements = (Replicate(),) * sample.device_mesh.ndim
    return DTensor.from_local(whole, sample.device_mesh, placements, run_check=False)


def _remember(views: Any, source: Any, whole: Tensor | None) -> None:
    """What is written into ``views`` is meant for the tensor that they show."""
    shown = getattr(source, _SHOWN, None) or (whole, source)
    for view in tree_leaves(views):
        if shown[0] is not None and not (isinstance(shown[1], DTensor) and _is_whole(shown[1])):
            setattr(view, _SHOWN, shown)


def _write_through(view: Tensor) -> None:
    shown: tuple[Tensor, DTensor] | None = getattr(view, _SHOWN, None)
    if shown is not None:
        whole, source = shown
        with torch.no_grad():
            source.to_local().copy_(cut_like(whole, source).to_local())
