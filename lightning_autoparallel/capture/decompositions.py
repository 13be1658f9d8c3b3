"""Operators taken apart before planning, because their DTensor rule is missing, or wrong on shards of unequal count."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.torch_compat.decomposition_tables import core_aten_decompositions, get_decompositions
from lightning_autoparallel.torch_compat.sharding import has_rule

aten = torch.ops.aten
Decompositions = dict[Any, Callable[..., Any]]

# Losses reduce over the batch inside one operator: a sum over shards and a global divisor are right for any split.
_LOSSES = (
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.multi_margin_loss,
)

# Take the batch size as a number, which would not fit a shard.
_TORCHS_GROUP_NORM = get_decompositions((aten.native_group_norm, aten.native_group_norm_backward))


def _reduced(dims: Sequence[int] | int | None, tensor: Tensor) -> list[int]:
    if dims is None or dims == []:
        return list(range(tensor.dim()))
    wanted = [dims] if isinstance(dims, int) else dims
    return [dim % tensor.dim() if tensor.dim() else 0 for dim in wanted]


def _count(tensor: Tensor, dims: Sequence[int]) -> int:
    return math.prod(tensor.shape[dim] for dim in dims) if tensor.dim() else 1


def _widened(dtype: torch.dtype) -> torch.dtype:
    """What torch's kernels compute in: sums of half numbers would overflow, or round at every rank."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def mean(tensor: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A sum divided by the *global* count, so that shards may hold any part of it."""
    reduced = _reduced(dims, tensor)
    result = dtype or tensor.dtype
    total = aten.sum.dim_IntList(tensor, reduced, keepdim, dtype=_widened(result))
    return _cast(total / _count(tensor, reduced), result)


def _mean_all(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    result = dtype or tensor.dtype
    return _cast(aten.sum.default(tensor, dtype=_widened(result)) / tensor.numel(), result)


def var_mean(
    tensor: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Two-pass variance and mean from sums: each pass is one reduction of the small result, never a gather."""
    reduced = _reduced(dims, tensor)
    count, result = _count(tensor, reduced), tensor.dtype
    tensor = _cast(tensor, _widened(result))
    average = aten.sum.dim_IntList(tensor, reduced, True) / count
    centred = tensor - average
    divisor = max(count - (1 if correction is None else correction), 0)
    variance = aten.sum.dim_IntList(centred * centred, reduced, keepdim) / divisor
    average = average if keepdim else aten.sum.dim_IntList(average, reduced, False)
    return _cast(variance, result), _cast(average, result)


def _var(tensor: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return var_mean(tensor, dims, correction=correction, keepdim=keepdim)[0]


def _std(tensor: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var(tensor, dims, correction=correction, keepdim=keepdim).sqrt()


def _channels(tensor: Tensor) -> tuple[list[int], list[int], int]:
    """Reduced dims, broadcast shape and count per channel of an (N, C, ...) tensor."""
    dims = [0, *range(2, tensor.dim())]
    return dims, [1, -1] + [1] * (tensor.dim() - 2), _count(tensor, dims)


def batch_norm_functional(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Batch normalisation of (N, C, ...) with statistics of the global batch.

    Ioffe and Szegedy 2015, algorithm 1; the running variance uses the unbiased estimate, as torch does. Returns output,
    saved mean and inverse standard deviation of shape (C,), and the new running statistics. Half numbers are computed
    with in float32; the output is what the input was, and running statistics keep their dtype.
    """
    dims, shape, count = _channels(x)
    dtype = x.dtype
    x = _cast(x, _widened(dtype))
    new_mean, new_var = running_mean, running_var
    if training or running_mean is None or running_var is None:
        average = aten.sum.dim_IntList(x, dims, False) / count
        centred = x - average.view(shape)
        variance = aten.sum.dim_IntList(centred * centred, dims, False) / count
        if running_mean is not None and running_var is not None:
            unbiased = variance * (count / max(count - 1, 1))
            new_mean = _cast(running_mean * (1 - momentum) + average * momentum, running_mean.dtype)
            new_var = _cast(running_var * (1 - momentum) + unbiased * momentum, running_var.dtype)
        saved = (average, torch.rsqrt(variance + eps))
    else:
        saved = (running_mean, torch.rsqrt(_cast(running_var, x.dtype) + eps))
        centred = x - running_mean.view(shape)
    output = centred * saved[1].view(shape)
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    if not training:
        saved = (x.new_empty((0,)), x.new_empty((0,)))
    return _cast(output, dtype), *saved, new_mean, new_var  # type: ignore[return-value]


def _batch_norm_legit(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    output, mean_, invstd, new_mean, new_var = batch_norm_functional(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    if training and running_mean is not None:
        running_mean.copy_(new_mean)
        running_var.copy_(new_var)
    return output, mean_, invstd


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of ``batch_norm_functional``, from sums over the global batch (Ioffe and Szegedy 2015, sec. 3)."""
    dims, shape, count = _channels(x)
    dtype = x.dtype
    x, grad = _cast(x, _widened(dtype)), _cast(grad, _widened(grad.dtype))
    if train:
        assert save_mean is not None and save_invstd is not None
        average, invstd = save_mean, save_invstd
    else:
        assert running_mean is not None and running_var is not None
        average, invstd = running_mean, torch.rsqrt(_cast(running_var, x.dtype) + eps)
    normalised = (x - average.view(shape)) * invstd.view(shape)
    grad_bias = aten.sum.dim_IntList(grad, dims, False)
    grad_weight = aten.sum.dim_IntList(grad * normalised, dims, False)
    scale = invstd if weight is None else invstd * weight
    grad_x = grad
    if train:
        grad_x = grad - (grad_bias / count).view(shape) - normalised * (grad_weight / count).view(shape)
    grad_x = grad_x * scale.view(shape)
    affine = dtype if weight is None else weight.dtype
    return (
        _cast(grad_x, dtype) if output_mask[0] else None,
        _cast(grad_weight, affine) if output_mask[1] else None,
        _cast(grad_bias, affine) if output_mask[2] else None,
    )


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own decomposition, which rounds the statistics of half numbers on CPU: kept in float32 here."""
    wide, *affine = (None if t is None else _cast(t, _widened(t.dtype)) for t in (x, weight, bias))
    output, average, invstd = _TORCHS_GROUP_NORM[aten.native_group_norm.default](wide, *affine, *sizes)
    return _cast(output, x.dtype), average, invstd


def _group_norm_backward(
    grad: Tensor, x: Tensor, average: Tensor, invstd: Tensor, weight: Tensor | None, *sizes: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wide = [None if t is None else _cast(t, _widened(t.dtype)) for t in (grad, x, average, invstd, weight)]
    gradients = _TORCHS_GROUP_NORM[aten.native_group_norm_backward.default](*wide, *sizes)
    affine = x.dtype if weight is None else weight.dtype
    dtypes = (x.dtype, affine, affine)
    return tuple(None if g is None else _cast(g, dtype) for g, dtype in zip(gradients, dtypes, strict=True))  # type: ignore[return-value]


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout as an explicit draw, so that the planner can let each batch shard draw its own part of the mask."""
    if train is False or p == 0:
        return x.clone(), aten.full(list(x.shape), True, dtype=torch.bool, device=x.device)
    drawn = aten.rand.default(list(x.shape), dtype=torch.float32, device=x.device)
    mask = drawn >= p
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return x * mask * scale, mask


def _native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad * (mask.to(grad.dtype) * scale)


def _filled_like(value: float) -> Callable[..., Tensor]:
    def filled(tensor: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
        dtype = dtype or tensor.dtype
        fill = bool(value) if dtype is torch.bool else value
        return aten.full.default(list(tensor.shape), fill, dtype=dtype, device=device or tensor.device)

    return filled


def _full_like(tensor: Tensor, value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.full.default(list(tensor.shape), value, dtype=dtype or tensor.dtype, device=device or tensor.device)


def _new_filled(value: float) -> Callable[..., Tensor]:
    def filled(
        tensor: Tensor, size: list[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
    ) -> Tensor:
        return aten.full.default(list(size), value, dtype=dtype or tensor.dtype, device=device or tensor.device)

    return filled


def _new_empty_strided(tensor: Tensor, size: list[int], stride: list[int], **options: Any) -> Tensor:
    is_dense = torch.empty(size, device="meta").stride() == tuple(stride)
    return _new_filled(0)(tensor, size, **options) if is_dense else NotImplemented


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What ``target`` is when ``source`` has been written over all of it; nothing is read of it."""
    if (source.dtype, source.device) != (target.dtype, target.device):
        source = aten._to_copy.default(source, dtype=target.dtype, device=target.device)
    order = _memory_order(target)
    if order is None:
        return NotImplemented
    source = source.expand(target.shape)
    if order == sorted(order):
        return aten.clone.default(source, memory_format=torch.contiguous_format)
    there = aten.clone.default(aten.permute.default(source, order), memory_format=torch.contiguous_format)
    return aten.permute.default(there, [order.index(dim) for dim in range(len(order))])


def _memory_order(tensor: Tensor) -> list[int] | None:
    """Its dims, the outermost in memory first; None where its elements do not fill one piece of memory."""
    shape, strides = tensor.shape, tensor.stride()
    single = [dim for dim, size in enumerate(shape) if size == 1]  # their strides say nothing
    order = sorted((dim for dim in range(len(shape)) if dim not in single), key=lambda dim: -strides[dim])
    inner = 1
    for dim in reversed(order):
        if tensor.numel() and strides[dim] != inner:
            return None
        inner *= shape[dim]
    return list(range(len(shape))) if order == sorted(order) else [*single, *order]


def _new_full(
    tensor: Tensor, size: list[int], value: Any, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    return aten.full.default(list(size), value, dtype=dtype or tensor.dtype, device=device or tensor.device)


def _zeros(size: list[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.full.default(list(size), 0, dtype=dtype or torch.get_default_dtype(), device=device)


def _ones(size: list[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.full.default(list(size), 1, dtype=dtype or torch.get_default_dtype(), device=device)


def _rand_like(tensor: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.rand.default(list(tensor.shape), dtype=dtype or tensor.dtype, device=device or tensor.device)


def _randn_like(tensor: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return aten.randn.default(list(tensor.shape), dtype=dtype or tensor.dtype, device=device or tensor.device)


def _bernoulli_p(tensor: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    drawn = aten.rand.default(list(tensor.shape), dtype=torch.float32, device=tensor.device)
    return (drawn < p).to(tensor.dtype)


def _bernoulli(tensor: Tensor, *, generator: Any = None) -> Tensor:
    drawn = aten.rand.default(list(tensor.shape), dtype=torch.float32, device=tensor.device)
    return (drawn < tensor).to(tensor.dtype)


def _randint_like(tensor: Tensor, high: int, **kwargs: Any) -> Tensor:
    return _randint_like_from(tensor, 0, high, **kwargs)


def _randint_like_from(
    tensor: Tensor, low: int, high: int, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    placed = {"dtype": dtype or tensor.dtype, "device": device or tensor.device}
    return aten.randint.low(low, high, list(tensor.shape), **placed)


def _normal_of_means(mean: Tensor, std: float = 1.0, generator: Any = None) -> Tensor:
    return _randn_like(mean) * std + mean


def _normal_of_deviations(mean: float, std: Tensor, generator: Any = None) -> Tensor:
    return _randn_like(std) * std + mean


def _normal_of_numbers(mean: float, std: float, size: Sequence[int], *, dtype: Any = None, **where: Any) -> Tensor:
    kwargs = {"dtype": dtype or torch.get_default_dtype(), "device": where.get("device") or torch.device("cpu")}
    return aten.randn.default(list(size), **kwargs) * std + mean


def _random_from(tensor: Tensor, low: int, high: int | None, generator: Any = None) -> Tensor:
    return _randint_like_from(tensor, low, _past_random(tensor.dtype) if high is None else high)


def _random_to(tensor: Tensor, high: int, generator: Any = None) -> Tensor:
    return _randint_like_from(tensor, 0, high)


def _random(tensor: Tensor, generator: Any = None) -> Tensor:
    return _randint_like_from(tensor, 0, _past_random(tensor.dtype))


def _past_random(dtype: torch.dtype) -> int:
    """What ``Tensor.random_`` stays below, where nothing is said: integers that the dtype has exactly."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return 2 if dtype is torch.bool else torch.iinfo(dtype).max


def _any(tensor: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """By counting: ranks add up numbers, not whether there are some."""
    found: Tensor = _how_many(tensor != 0, dim, keepdim) > 0
    return found.to(tensor.dtype) if tensor.dtype is torch.uint8 else found


def _all(tensor: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    none: Tensor = _how_many(tensor == 0, dim, keepdim) == 0
    return none.to(tensor.dtype) if tensor.dtype is torch.uint8 else none


def _how_many(flags: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    counted = flags.to(torch.int64)
    dims = list(range(flags.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return aten.sum.dim_IntList(counted, dims, keepdim) if dims else counted  # a sum over no dims is over all


def planning_decompositions() -> Decompositions:
    """The table for ``export_joint``: our own, the losses, and whatever core operator DTensor has no rule for."""
    table = {op: function for op, function in core_aten_decompositions().items() if not _planned_whole(op)}
    table.update(get_decompositions(_LOSSES))
    table.update(_OWN)
    return table


def _planned_whole(op: Any) -> bool:
    return has_rule(op) or op in _KEPT


_KEPT = {
    aten.embedding_dense_backward.default,
    aten.convolution_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
_OWN: Decompositions = {
    aten.mean.dim: mean,
    aten.mean.default: _mean_all,
    aten.var_mean.correction: var_mean,
    aten.var.correction: _var,
    aten.std.correction: _std,
    aten._native_batch_norm_legit_functional.default: batch_norm_functional,
    aten._native_batch_norm_legit.default: _batch_norm_legit,
    aten.native_batch_norm.default: _batch_norm_legit,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.native_dropout.default: native_dropout,
    aten.native_dropout_backward.default: _native_dropout_backward,
    aten.zeros_like.default: _filled_like(0),
    aten.ones_like.default: _filled_like(1),
    aten.empty_like.default: _filled_like(0),
    aten.full_like.default: _full_like,
    aten.new_zeros.default: _new_filled(0),
    aten.new_ones.default: _new_filled(1),
    aten.new_empty.default: _new_filled(0),
    aten.new_full.default: _new_full,
    aten.new_empty_strided.default: _new_empty_strided,
    aten.copy.default: _copy,
    aten.zeros.default: _zeros,
    aten.ones.default: _ones,
    aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_from,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.all.default: _all,
    aten.all.dim: _all,
    aten.all.dims: _all,
    aten.random.default: _random,
    aten.random.to: _random_to,
    getattr(aten.random, "from"): _random_from,
    aten.normal.Tensor_float: _normal_of_means,
    aten.normal.float_Tensor: _normal_of_deviations,
    aten.normal.float_float: _normal_of_numbers,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.default: _bernoulli,
}
