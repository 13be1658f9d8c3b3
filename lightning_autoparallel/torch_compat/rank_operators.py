"""Operators that do on every rank what its place in a process group says, though their call is the same everywhere.

A graph that is written with them has one text for all ranks, so that it can be compared, priced and ordered as any
other; ``compile.specialize`` puts each rank's own calls in their place before the graph is lowered. Called directly
they do the same, and so a graph can also be run as it is.

``shift`` counts ranks of the group from the own one on, round and round: 1 is the next rank, 0 the rank itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_autoparallel.torch_compat.collectives import ALL_TO_ALL, group_place

NAMESPACE = "lightning_autoparallel"

aten = torch.ops.aten

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_Implementation = TypeVar("_Implementation", bound=Callable[..., Tensor | None])


def _define(schema: str, tags: Sequence[torch.Tag] = ()) -> Callable[[_Implementation], _Implementation]:
    """Define an operator whose implementation is the function below, on every device."""

    def define(implementation: _Implementation) -> _Implementation:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=tuple(tags))
        _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
        return implementation

    return define


def permute_splits(rows: int, shift: int, rank: int, ranks: int) -> tuple[list[int], list[int]]:
    """Rows that an all-to-all receives from, and sends to, each rank, if it is to do what ``shard_permute`` does."""
    received, sent = [0] * ranks, [0] * ranks
    received[(rank + shift) % ranks] = rows
    sent[(rank - shift) % ranks] = rows
    return received, sent


def by_rank(parts: Sequence[Any], rank: int) -> list[Any]:
    """Parts of the own rank, the next one, and so on, in the order of ranks."""
    return [parts[(other - rank) % len(parts)] for other in range(len(parts))]


@_define("shard_permute(Tensor x, int shift, str group) -> Tensor")
def _shard_permute(x: Tensor, shift: int, group: str) -> Tensor:
    """The tensor of the rank ``shift`` further on; the own one goes as far the other way. To be waited for.

    All ranks give a contiguous tensor of one shape, which has at least one dim.
    """
    rank, ranks = group_place(group)
    received, sent = permute_splits(x.shape[0], shift, rank, ranks)
    result: Tensor = ALL_TO_ALL(x.contiguous(), received, sent, group)
    return result


@_define("rank_cat(Tensor[] parts, int dim, str group) -> Tensor")
def _rank_cat(parts: Sequence[Tensor], dim: int, group: str) -> Tensor:
    """Parts of the own rank, the next one, and so on, joined along ``dim`` in the order of ranks."""
    return torch.cat(by_rank(parts, group_place(group)[0]), dim)


@_define("rank_sum(Tensor[] parts, str group) -> Tensor")
def _rank_sum(parts: Sequence[Tensor], group: str) -> Tensor:
    """Parts of the own rank, the next one, and so on, added in the order of ranks: to the same bits everywhere."""
    return reduce(torch.add, by_rank(parts, group_place(group)[0])).clone()


@_define("rank_chunk(Tensor(a) x, int dim, int shift, int ranks, str group) -> Tensor(a)")
def _rank_chunk(x: Tensor, dim: int, shift: int, ranks: int, group: str) -> Tensor:
    """The chunk of ``x`` along ``dim``, one of ``ranks`` even ones, that belongs to the rank ``shift`` further on."""
    size = x.shape[dim] // ranks
    return x.narrow(dim, (group_place(group)[0] + shift) % ranks * size, size)


@_define("wide_product(Tensor left, Tensor right) -> Tensor")
def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices, or batches of them, in float32: not rounded to the dtype of its operands."""
    if wide_products(left.device.type):
        product = aten.bmm if left.dim() == 3 else aten.mm
        result: Tensor = product.dtype(left, right, torch.float32)
        return result
    return torch.matmul(left.float(), right.float())


@_define("add_product(Tensor left, Tensor right, Tensor total) -> Tensor")
def _add_product(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """The product of two matrices and ``total``, which may be wider: what is added is not rounded to their dtype."""
    result = total.clone()
    _add_product_(left, right, result)
    return result


# Compilers may lay its matrices out as they do those of products: else they copy what they have padded.
@_define("add_product_(Tensor left, Tensor right, Tensor(a!) total) -> ()", tags=[torch.Tag.flexible_layout])
def _add_product_(left: Tensor, right: Tensor, total: Tensor) -> None:
    """The same, where ``total`` lies."""
    if total.dtype != left.dtype and wide_products(total.device.type):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def wide_products(device_type: str) -> bool:
    """Whether a device has products with a result that is wider than their operands."""
    return device_type == "cuda"


def _fake(name: str) -> Callable[[_Implementation], _Implementation]:
    return torch.library.register_fake(f"{NAMESPACE}::{name}", lib=_LIBRARY)


@_fake("shard_permute")
def _fake_permute(x: Tensor, shift: int, group: str) -> Tensor:
    return x.new_empty(x.shape)


@_fake("rank_cat")
def _fake_cat(parts: Sequence[Tensor], dim: int, group: str) -> Tensor:
    return torch.cat(list(parts), dim)


@_fake("rank_sum")
def _fake_sum(parts: Sequence[Tensor], group: str) -> Tensor:
    return reduce(torch.add, parts).clone()


@_fake("rank_chunk")
def _fake_chunk(x: Tensor, dim: int, shift: int, ranks: int, group: str) -> Tensor:
    assert x.shape[dim] % ranks == 0, f"dim {dim} of {list(x.shape)} is not cut into {ranks} even chunks"
    return x.narrow(dim, 0, x.shape[dim] // ranks)


@_fake("wide_product")
def _fake_product(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=torch.float32)


@_fake("add_product")
def _fake_added(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    return torch.empty_like(total)


@_fake("add_product_")
def _fake_added_in_place(left: Tensor, right: Tensor, total: Tensor) -> None:
    pass


_ours = getattr(torch.ops, NAMESPACE)

SHARD_PERMUTE = _ours.shard_permute.default
RANK_CAT = _ours.rank_cat.default
RANK_SUM = _ours.rank_sum.default
RANK_CHUNK = _ours.rank_chunk.default
WIDE_PRODUCT = _ours.wide_product.default
ADD_PRODUCT = _ours.add_product.default
ADD_PRODUCT_IN_PLACE = _ours.add_product_.default
