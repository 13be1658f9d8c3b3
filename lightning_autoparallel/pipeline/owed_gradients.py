"""Gradients of whole parameters that eager code computed with: they reach the shards when a backward has ended.

Not before, as ranks may use other parameters, or in another order, and would wait for each other within the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.torch_compat.interception import without_function_modes


def cut_like(whole: Tensor, like: DTensor) -> DTensor:
    """Each rank's part of a tensor that all of them hold; nothing is sent."""
    local = whole.detach().to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


def mean_over_shards(gradient: Tensor, mesh: ParallelMesh) -> Tensor:
    """The mean over the batch shards; every rank calls it alike."""
    mean = gradient.detach().contiguous().clone()
    if mesh.data_parallel_size > 1:
        dist.all_reduce(mean, group=mesh.submesh(mesh.data_parallel_axes).get_group())
        mean /= mesh.data_parallel_size
    return mean


class OwedGradients:
    """Pairs of a sharded parameter and a whole leaf in its place, in an order that is the same on all ranks."""

    def __init__(self, mesh: ParallelMesh, control: ControlGroup) -> None:
        self._mesh, self._control = mesh, control
        self._owed: list[tuple[DTensor, Tensor]] = []

    def leaf(self, parameter: DTensor, whole: Tensor) -> Tensor:
        """``whole``, as what autograd follows in the place of the parameter."""
        leaf = whole.detach().requires_grad_()
        self._owed.append((parameter, leaf))
        return leaf

    def clear(self) -> None:
        """Another step begins."""
        self._owed.clear()

    def settle(self) -> None:
        """After a backward: parameters get the gradients of their leaves, if any rank has one."""
        used = self._control.any([leaf.grad is not None for _, leaf in self._owed])
        for (parameter, leaf), is_used in zip(self._owed, used, strict=True):
            if is_used:
                gradient, leaf.grad = leaf.grad, None
                torch.autograd.backward([parameter], [self._reduced(parameter, leaf, gradient)])

    def backward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``Tensor.backward``; leaves follow the parameters that it is asked for."""
        asked = kwargs.get("inputs")
        if asked is not None:
            asked = [asked] if isinstance(asked, Tensor) else list(asked)
            kwargs = {**kwargs, "inputs": [*asked, *(leaf for tensor in asked for leaf in self._leaves_of(tensor))]}
        function(*args, **kwargs)

    def gradients(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``torch.autograd.grad``, of parameters with what came by their leaves."""
        named = dict(zip(("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"), args, strict=False))
        if len(args) > len(named):
            return function(*args, **kwargs)
        named |= kwargs
        asked = [named["inputs"]] if isinstance(named["inputs"], Tensor) else list(named["inputs"])
        leaves = [self._leaves_of(tensor) for tensor in asked]
        if not any(leaves):
            return function(*args, **kwargs)
        every = [*asked, *(leaf for of_one in leaves for leaf in of_one)]
        found = list(function(**{**named, "inputs": every, "allow_unused": True, "materialize_grads": False}))
        direct, by_leaf = found[: len(asked)], iter(found[len(asked) :])
        result = [
            self._joined(tensor, own, [next(by_leaf) for _ in of_one])
            for tensor, own, of_one in zip(asked, direct, leaves, strict=True)
        ]
        if any(gradient is None for gradient in result) and not named.get("allow_unused"):
            raise RuntimeError("One of the differentiated tensors appears to not have been used in the graph")
        return tuple(result)

    def _leaves_of(self, tensor: Tensor) -> list[Tensor]:
        return [leaf for parameter, leaf in self._owed if parameter is tensor]

    def _joined(self, tensor: Tensor, own: Tensor | None, of_leaves: Sequence[Tensor | None]) -> Tensor | None:
        if not of_leaves:
            return own
        assert isinstance(tensor, DTensor)
        used = self._control.any([gradient is not None for gradient in of_leaves])
        found = [
            _Final.apply(self._reduced(tensor, tensor, gradient), gradient)  # type: ignore[no-untyped-call]
            for gradient, is_used in zip(of_leaves, used, strict=True)
            if is_used
        ]
        with without_function_modes():
            parts = [part for part in (own, *found) if part is not None]
            return sum(parts[1:], parts[0]) if parts else None

    def _reduced(self, parameter: DTensor, like: Tensor, gradient: Tensor | None) -> DTensor:
        with without_function_modes(), torch.no_grad():
            mine = torch.zeros(like.shape, dtype=like.dtype, device=like.device) if gradient is None else gradient
            return cut_like(mean_over_shards(mine, self._mesh), parameter)


class _Final(torch.autograd.Function):
    """A gradient of a parameter, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor | None) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise CaptureError(
            "the gradient of a parameter is differentiated again (create_graph=True): in forward mode only gradients "
            "of inputs can be"
        )
