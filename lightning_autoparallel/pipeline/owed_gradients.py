"""Gradients of whole parameters that eager code computed with: they reach the shards when a backward has ended.

Not before, as ranks may use other parameters, or in another order, and would wait for each other within the backward.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_autoparallel.compile.second_order import OF_PARAMETERS
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.backward_calls import BackwardCalls
from lightning_autoparallel.torch_compat.autograd import final, gradients_held
from lightning_autoparallel.torch_compat.dtensors import as_parameter_lies
from lightning_autoparallel.torch_compat.interception import without_function_modes

Refusal = Callable[[Tensor], None]  # is given a leaf's gradient, and may raise
Addend = Callable[[Tensor, DTensor], DTensor]  # a parameter and its reduced gradient -> as it is accumulated

_AGAIN = f"the gradient of a parameter is differentiated again (create_graph=True): {OF_PARAMETERS}"


def cut_like(whole: Tensor, like: DTensor) -> DTensor:
    """Each rank's part of a tensor that all hold, or an addend where ``like`` is a partial sum; nothing is sent."""
    local = whole.detach().to(like.device)
    mesh, sizes = like.device_mesh, [like.device_mesh.size(i) for i, p in enumerate(like.placements) if p.is_partial()]
    if not sizes:
        return distribute_tensor(local, mesh, like.placements, src_data_rank=None)
    cut = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    addend = distribute_tensor(local, mesh, cut, src_data_rank=None).to_local() / math.prod(sizes)
    return DTensor.from_local(addend, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def mean_over_shards(gradient: Tensor, mesh: ParallelMesh) -> Tensor:
    """The mean over the batch shards, dense; every rank calls it alike."""
    dense = gradient.detach() if gradient.layout == torch.strided else gradient.detach().to_dense()
    mean = dense.contiguous().clone()
    if mesh.data_parallel_size > 1:
        dist.all_reduce(mean, group=mesh.submesh(mesh.data_parallel_axes).get_group())
        mean /= mesh.data_parallel_size
    return mean


class OwedGradients:
    """Pairs of a sharded parameter and a whole leaf in its place, in an order that is the same on all ranks.

    A leaf lives as long as somebody computes with it, or a graph of autograd leads to it. Made while ``refusing`` it
    has a hook that may refuse its gradient.
    """

    def __init__(
        self, mesh: ParallelMesh, control: ControlGroup, backwards: BackwardCalls, addend: Addend | None = None
    ) -> None:
        self._mesh, self._control, self._backwards = mesh, control, backwards
        self._refuses: Refusal | None = None
        self._addend = addend or (lambda parameter, gradient: gradient)
        self._owed: list[tuple[DTensor, weakref.ref[Tensor]]] = []
        self._made_in_backward: list[tuple[DTensor, Tensor | None]] | None = None  # those that have got a gradient

    def leaf(self, parameter: DTensor, whole: Tensor) -> Tensor:
        """``whole``, as what autograd follows in the place of the parameter."""
        leaf = whole.detach().requires_grad_()
        if self._refuses is not None:
            leaf.register_hook(self._refuses)
        self._owed.append((parameter, weakref.ref(leaf)))
        if self._made_in_backward is not None:  # a region that is checkpointed may have a backward of its own in it
            _keep_where_reached(leaf, parameter, self._made_in_backward)
        return leaf

    def among(self, tensors: Iterable[Tensor]) -> list[tuple[DTensor, Tensor]]:
        """Those of these that are leaves in the place of parameters, with the parameters."""
        wanted = {id(tensor) for tensor in tensors}
        alive = [(parameter, leaf()) for parameter, leaf in self._owed]
        return [(parameter, leaf) for parameter, leaf in alive if leaf is not None and id(leaf) in wanted]

    @contextlib.contextmanager
    def refusing(self, refuses: Refusal) -> Iterator[list[tuple[DTensor, weakref.ref[Tensor]]]]:
        """Of leaves made inside nothing is owed when it has ended, and the list is told them; every rank does alike."""
        told: list[tuple[DTensor, weakref.ref[Tensor]]] = []
        self._refuses = refuses
        try:
            yield told
        finally:
            self._refuses = None
            told += self._owed
            self._owed = []

    def clear(self) -> None:
        """Forget leaves that no rank needs any more."""
        alive = self._control.any([leaf() is not None for _, leaf in self._owed])
        self._owed = [pair for pair, is_alive in zip(self._owed, alive, strict=True) if is_alive]

    def backward(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hooked: Sequence[DTensor] = (),
    ) -> None:
        """``Tensor.backward``; leaves follow the parameters that it is asked for, and parameters get what is owed.

        Those that are ``hooked`` get all of it at once, as hooks are given the sum, where some of it comes by a leaf;
        not where gradients are to be differentiated, which parts by leaves cannot be.
        """
        asked = kwargs.get("inputs")
        if asked is not None:
            asked = [asked] if isinstance(asked, Tensor) else list(asked)
            kwargs = {**kwargs, "inputs": [*asked, *(leaf for tensor in asked for leaf in self._leaves_of(tensor))]}
        owed = [(parameter, leaf()) for parameter, leaf in self._owed]  # graphs let go of their leaves
        differentiates = inspect.signature(function).bind(*args, **kwargs).arguments.get("create_graph")
        several = [] if differentiates else [p for p in hooked if any(p is parameter for parameter, _ in self._owed)]
        with gradients_held(several) as held, self._making_leaves() as made:
            function(*args, **kwargs)
        joined = [
            (parameter, gradient)
            for parameter, gradient in self._backwards.end()
            if asked is None or any(parameter is tensor for tensor in asked)
        ]
        for parameter, gradient in itertools.chain(joined, self._of_leaves([*owed, *made])):
            if id(parameter) in held:
                held[id(parameter)].append(gradient)
            else:
                torch.autograd.backward([parameter], [gradient])
        for parameter in several:
            if came := held[id(parameter)]:
                with without_function_modes():
                    total = sum(came[1:], came[0])
                torch.autograd.backward([parameter], [total])

    @contextlib.contextmanager
    def _making_leaves(self) -> Iterator[list[tuple[DTensor, Tensor | None]]]:
        """The leaves that code makes in a backward, on all ranks alike."""
        made: list[tuple[DTensor, Tensor | None]] = []
        before, self._made_in_backward = self._made_in_backward, made
        try:
            yield made
        finally:
            self._made_in_backward = before

    def _of_leaves(self, owed: Sequence[tuple[DTensor, Tensor | None]]) -> Iterator[tuple[DTensor, Tensor]]:
        """What parameters get of their leaves, if any rank has something."""
        used = self._control.any([leaf is not None and leaf.grad is not None for _, leaf in owed])
        for (parameter, leaf), is_used in zip(owed, used, strict=True):
            if is_used:
                gradient = None if leaf is None else leaf.grad
                if leaf is not None:
                    leaf.grad = None
                yield parameter, self._addend(parameter, self._reduced(parameter, gradient))

    def gradients(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``torch.autograd.grad``, of parameters with what came by their leaves."""
        named = inspect.signature(function).bind(*args, **kwargs).arguments
        asked = [named["inputs"]] if isinstance(named["inputs"], Tensor) else list(named["inputs"])
        leaves = [self._leaves_of(tensor) for tensor in asked]
        every = [*asked, *(leaf for of_one in leaves for leaf in of_one)]
        is_simple = not any(leaves) and not any(isinstance(tensor, DTensor) for tensor in asked)
        if is_simple:
            result = function(*args, **kwargs)
            self._backwards.end()
            return result
        found = list(function(**{**named, "inputs": every, "allow_unused": True, "materialize_grads": False}))
        joined = self._backwards.end()
        direct, by_leaf = found[: len(asked)], iter(found[len(asked) :])
        result = [
            self._joined(tensor, own, [next(by_leaf) for _ in of_one], [g for p, g in joined if p is tensor])
            for tensor, own, of_one in zip(asked, direct, leaves, strict=True)
        ]
        if named.get("materialize_grads"):
            return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(asked, result, strict=True))
        if any(gradient is None for gradient in result) and not named.get("allow_unused"):
            raise RuntimeError("One of the differentiated tensors appears to not have been used in the graph")
        return tuple(result)

    def _leaves_of(self, tensor: Tensor) -> list[Tensor]:
        """As many on every rank."""
        found = [(leaf(), parameter) for parameter, leaf in self._owed if parameter is tensor]
        return [_stand_in(parameter) if leaf is None else leaf for leaf, parameter in found]

    def _joined(
        self, tensor: Tensor, own: Tensor | None, of_leaves: Sequence[Tensor | None], joined: Sequence[Tensor]
    ) -> Tensor | None:
        if not isinstance(tensor, DTensor):
            return own
        used = self._control.any([gradient is not None for gradient in of_leaves])
        found = [
            final(self._reduced(tensor, gradient), gradient, _AGAIN)
            for gradient, is_used in zip(of_leaves, used, strict=True)
            if is_used
        ]
        with without_function_modes():
            parts = [part for part in (own, *found, *joined) if part is not None]
            return sum(parts[1:], parts[0]) if parts else None

    def _reduced(self, parameter: DTensor, gradient: Tensor | None) -> DTensor:
        with without_function_modes(), torch.no_grad():
            mine = _stand_in(parameter).detach() if gradient is None else gradient
            return as_parameter_lies(parameter, cut_like(mean_over_shards(mine, self._mesh), parameter))


def _keep_where_reached(leaf: Tensor, parameter: DTensor, made: list[tuple[DTensor, Tensor | None]]) -> None:
    place = len(made)
    made.append((parameter, None))

    def keep(reached: Tensor) -> None:
        made[place] = parameter, reached

    leaf.register_post_accumulate_grad_hook(keep)


def _stand_in(parameter: DTensor) -> Tensor:
    """Zeros of the whole parameter's shape, which no graph leads to."""
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
