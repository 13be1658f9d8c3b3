"""Batch norm over the rows of all batch shards, in steps that run on each rank's rows (``sync_batchnorm=True``).

With x a row of any rank, n the number of rows (times pixels) of all of them, and sums over all n,

    mean = sum(x) / n,    var = sum((x - mean)^2) / n,    h = (x - mean) / sqrt(var + eps),    y = h * weight + bias

and for the sum of all ranks' losses, with d the gradient of h (Ioffe and Szegedy 2015, section 3),

    gradient of x = (d - sum(d) / n - h * sum(d * h) / n) / sqrt(var + eps)

of which a rank computes what belongs to its own rows. Gradients of parameters are means over the batch shards, as
everywhere in forward mode. Ranks may have different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.agreement import ControlGroup, other_place
from lightning_autoparallel.pipeline.backward_calls import BackwardCalls, Gradients, Results
from lightning_autoparallel.torch_compat.interception import Original
from lightning_autoparallel.torch_compat.norms import BatchNorm, NormInstead

_RESULTS = (0,)  # a norm has one


class SyncedNorms:
    """Runs calls of batch norm layers; every rank makes the same ones, in the same order."""

    def __init__(self, root: nn.Module, mesh: ParallelMesh, control: ControlGroup, backwards: BackwardCalls) -> None:
        self._root, self._mesh, self._control, self._backwards = root, mesh, control, backwards
        self._paths: dict[int, str] = {}  # of modules, by identity

    def concerns(self, module: nn.Module) -> bool:
        """Whether statistics of ``module`` are to be those of all ranks: it is a batch norm that trains."""
        return isinstance(module, BatchNorm) and module.training and self._mesh.data_parallel_size > 1

    def run(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's own code, around a norm of all ranks' rows.

        Raises:
            OtherRankError: other ranks call something else.
        """
        with NormInstead(partial(self._norm, self.name_of(module))):
            return original(module, *args, **kwargs)

    def name_of(self, module: nn.Module) -> str:
        """As messages spell it."""
        if id(module) not in self._paths:
            self._paths = {id(found): path for path, found in self._root.named_modules()}
        path = self._paths.get(id(module))
        return type(module).__name__ if path is None else f"module '{path}' ({type(module).__name__})"

    def _norm(
        self,
        name: str,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        recorded = torch.is_grad_enabled() and x.requires_grad
        self._meet(f"{name} {x.dtype}{', whose gradient is asked for' if recorded else ''}")
        with torch.no_grad():
            mean, variance, count = self._statistics(x)
            if running_mean is not None and running_var is not None:
                unbiased = variance * (count / (count - 1).clamp(min=1))
                for running, now in ((running_mean, mean), (running_var, unbiased)):
                    running.mul_(1 - momentum).add_((now * momentum).to(running.dtype))
        total = self._total_of_backwards(name) if recorded else self._total
        normal: Tensor = _Normalised.apply(x, mean, torch.rsqrt(variance + eps), count, total)  # type: ignore[no-untyped-call]
        for parameter, combine in ((weight, torch.mul), (bias, torch.add)):
            if parameter is not None:
                normal = combine(normal, parameter.view(_shape(x)))
        return normal.to(x.dtype)

    def _meet(self, place: str) -> None:
        if not self._control.agrees(place):
            raise other_place(self._control.gather(place))

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of each channel, and how many numbers they are of."""
        wide, dims = _wide(x), _dims(x)
        own = wide.new_full((1,), x.numel() // max(1, x.size(1)))
        *sums, count = self._total(torch.cat([wide.sum(dims), own])).split([x.size(1), 1])
        mean = sums[0] / count
        centred = wide - mean.view(_shape(x))
        return mean, self._total((centred * centred).sum(dims)) / count, count

    def _total(self, own: Tensor) -> Tensor:
        """The sum over the batch shards."""
        dist.all_reduce(own, group=self._mesh.submesh(self._mesh.data_parallel_axes).get_group())
        return own

    def _total_of_backwards(self, name: str) -> Callable[[Tensor], Tensor]:
        """``_total`` for a backward: of all ranks, or of none."""

        def left_out() -> OtherRankError:
            return OtherRankError(
                f"the losses of some ranks depend on {name}, and those of others do not: with sync_batchnorm=True its "
                "statistics are those of all ranks' rows, and so is its gradient; let every rank's loss depend on it"
            )

        def join(results: Results) -> Gradients:
            raise left_out()

        number = self._backwards.add(join)

        def total(own: Tensor) -> Tensor:
            def run(are_all: bool, results: Results) -> Tensor:
                if not are_all:
                    raise left_out()
                return self._total(own)

            found: Tensor = self._backwards.reach(number, _RESULTS, run)
            return found

        return total


class _Normalised(torch.autograd.Function):
    """h, in float32 for half numbers; ``total`` adds up the ranks' sums in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, scale: Tensor, count: Tensor, total: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.total = total
        ctx.save_for_backward(x, mean, scale, count)
        return (_wide(x) - mean.view(_shape(x))) * scale.view(_shape(x))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, scale, count = ctx.saved_tensors
        shape, dims = _shape(x), _dims(x)
        normal = (_wide(x) - mean.view(shape)) * scale.view(shape)
        own = torch.cat([gradient.sum(dims), (gradient * normal).sum(dims)])
        of_gradient, of_product = (ctx.total(own) / count).chunk(2)
        centred = gradient - of_gradient.view(shape) - normal * of_product.view(shape)
        return (centred * scale.view(shape)).to(x.dtype), None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _dims(x: Tensor) -> list[int]:
    """All but that of the channels."""
    return [0, *range(2, x.dim())]


def _shape(x: Tensor) -> list[int]:
    """In which a number for each channel meets ``x``."""
    return [1, -1] + [1] * (x.dim() - 2)
