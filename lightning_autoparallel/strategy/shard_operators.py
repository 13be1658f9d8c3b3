"""Operators that shards can be given, but which do then what one device does not, and say nothing.

Torch gathers a tensor that lies in shards to show a part of it, and what is written into that part reaches no shard.
It draws each rank's shard from that rank's generator, and generators that agree repeat the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply.params import from_first_rank
from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.dispatch import TorchDispatchMode, is_random, shows_argument, written
from lightning_autoparallel.torch_compat.schemas import named_arguments
from lightning_autoparallel.torch_compat.tree import tree_leaves

aten = torch.ops.aten

# They show a part: along one dim, 0 where none is given, or anywhere.
_CUT_ONE_DIM = {aten.select, aten.slice, aten.narrow, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind}
_CUT = {*_CUT_ONE_DIM, aten.diagonal, aten.as_strided, aten.unfold}
Stage = Literal["shards", "followed", "whole"]


class NeedsWhole(Exception):
    """A call has to be given whole tensors; nothing has been written yet."""


class ShardOperators(TorchDispatchMode):
    """Open during a hook's call of torch on tensors in shards.

    On ``shards`` it raises NeedsWhole before an operator does other than on one device. Where calls are ``followed`` by
    autograd, parts are shown as torch does it, and what is written into them is an error. ``whole`` tensors are drawn
    alike on all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stage: Stage = "shards"
        self._lost: dict[int, torch.UntypedStorage] = {}  # what is written there reaches no shard

    @contextlib.contextmanager
    def during(self, stage: Stage) -> Iterator[None]:
        """Open for one call."""
        before, self._stage = self._stage, stage
        try:
            with self:
                yield
        finally:
            self._stage = before

    def forget(self) -> None:
        """Nobody writes into parts that were shown."""
        self._lost.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        changed = written(func, args, kwargs)
        self._check_kept(changed)
        spread = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
        sharded = [leaf for leaf in spread if _lies_in_shards(leaf)]
        if self._stage == "shards" and is_random(func) and any(leaf.device_mesh.size() > 1 for leaf in spread):
            raise NeedsWhole  # copies are drawn alike, too
        self._check_draw(func, sharded)
        if self._stage == "shards" and any(_is_cut(func, args, kwargs, tensor) for tensor in sharded):
            raise NeedsWhole
        result = func(*args, **kwargs)
        if self._stage == "whole" and is_random(func):
            for leaf in changed or tree_leaves(result):
                _draw_alike(leaf)
        if sharded and not changed and shows_argument(func):
            self._note_copies(result, sharded)
        return result

    def _check_kept(self, changed: Sequence[Tensor]) -> None:
        if self._lost and any(isinstance(leaf, DTensor) and _storage(leaf)._cdata in self._lost for leaf in changed):
            raise CaptureError(
                f"{user_line()} writes into a part of a parameter, which lies in shards; autograd followed the "
                "parameter when the part was taken, so that the parameter would not change: take the part of "
                "parameter.data, or inside of torch.no_grad()"
            )

    def _check_draw(self, func: Any, sharded: Sequence[DTensor]) -> None:
        if not sharded or not is_random(func):
            return
        if self._stage == "followed":
            raise CaptureError(
                f"{user_line()} draws random numbers for a parameter, which lies in shards, outside of a step, where "
                "nobody reduces the gradient: give it parameter.detach(), or do it inside of torch.no_grad()"
            )

    def _note_copies(self, result: Any, sharded: Sequence[DTensor]) -> None:
        """Torch has gathered what it was to show."""
        own = {_storage(tensor)._cdata for tensor in sharded}
        shown = [_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, DTensor)]
        copies = {storage._cdata: storage for storage in shown if storage._cdata not in own}
        if copies and self._stage == "shards":
            raise NeedsWhole
        self._lost.update(copies)


def _lies_in_shards(tensor: DTensor) -> bool:
    return not all(placement.is_replicate() for placement in tensor.placements)


def _is_cut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: DTensor) -> bool:
    """Whether the operator shows a part of what ranks share among them."""
    if func.overloadpacket not in _CUT:
        return False
    if func.overloadpacket not in _CUT_ONE_DIM:
        return True
    dim = named_arguments(func, args, kwargs).get("dim", 0) % tensor.dim()
    return any(getattr(placement, "dim", dim) == dim for placement in tensor.placements if not placement.is_replicate())


def _draw_alike(leaf: Any) -> None:
    if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
        from_first_rank(leaf)


@torch.no_grad()
def _storage(tensor: DTensor) -> torch.UntypedStorage:
    return tensor.to_local().untyped_storage()
