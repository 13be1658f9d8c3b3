"""``Trainer(precision=...)`` -> what steps compute in, and how gradients that lie in shards are clipped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import (
    DoublePrecision,
    GradClipAlgorithmType,
    HalfPrecision,
    LightningModule,
    MixedPrecision,
    Precision,
)
from lightning_autoparallel.pipeline.sharded_updates import ShardedUpdates
from lightning_autoparallel.torch_compat.dtensors import part_of
from lightning_autoparallel.torch_compat.foreach import norms, scale_together
from lightning_autoparallel.torch_compat.scaler import unscale_shards

_OF_THE_STRATEGY = (
    "ranks",
    "skips_backward",
    "around_backward",
    "around_hooks",
    "reduce_gradients",
    "_begin_update",
)
SUPPORTED = ("64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")


class ShardedPrecision(Precision):
    """Runs the backward of captured steps, and clips gradients of which each rank holds a part.

    The strategy that runs sets ``ranks``, which joins all ranks that train, and what goes with a backward:
    ``skips_backward`` says that all ranks skip this batch, ``around_backward`` is entered for it, ``around_hooks`` for
    the hooks between it and the update, and ``reduce_gradients`` does what micro-batches have left to do, at the end of
    their window, or asked to, within it.
    """

    ranks: DeviceMesh | None = None
    skips_backward: Callable[[], bool] = staticmethod(lambda: False)
    around_backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    around_hooks: Callable[[], contextlib.AbstractContextManager[Any]] = ShardedUpdates
    reduce_gradients: Callable[..., None] = staticmethod(lambda within_window=False: None)
    _begin_update: Callable[[Optimizer], None] = staticmethod(lambda optimizer: None)

    def __getstate__(self) -> dict[str, Any]:
        """A copy belongs to no running strategy."""
        return {key: value for key, value in vars(self).items() if key not in _OF_THE_STRATEGY}

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """What comes before a backward, if there is one."""
        return tensor if self.skips_backward() else super().pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the captured backward."""
        if not self.skips_backward():
            with self.around_backward():
                super().backward(tensor, model, *args, **kwargs)

    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        """Hooks may look at gradients, and change them, as on one device."""
        with self.around_hooks():
            super()._after_closure(model, optimizer)
        self._begin_update(optimizer)

    @contextlib.contextmanager
    def updating(self, around: Callable[[Optimizer], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        """Around an optimizer's step: from where closure, hooks and clipping are done, ``around`` is entered."""
        before = self._begin_update  # of an optimizer one of whose hooks steps this one
        with contextlib.ExitStack() as update:
            self._begin_update = lambda optimizer: update.enter_context(around(optimizer))
            try:
                yield
            finally:
                self._begin_update = before

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """The same of what follows a backward."""
        if self.skips_backward():
            return tensor
        self.reduce_gradients()
        with self.around_hooks():
            return super().post_backward(tensor, module)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the gradients so that their 2-norm over all parameters is at most ``clip_val``; one all-reduce."""
        clip_by_norm(_gradients(self, optimizer), float(clip_val), self.ranks)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Limit every element of the gradients to +-``clip_val``."""
        for gradient in _gradients(self, optimizer):
            _local(gradient).clamp_(-clip_val, clip_val)


class FullPrecision(ShardedPrecision):
    """``32-true``: everything in float32."""


class ShardedDoublePrecision(ShardedPrecision, DoublePrecision):
    """``64-true``: everything in float64."""


class ShardedHalfPrecision(ShardedPrecision, HalfPrecision):
    """``bf16-true``, ``16-true``: parameters, inputs, gradients and optimizer state in 16 bits."""


class ShardedMixedPrecision(ShardedPrecision, MixedPrecision):
    """``bf16-mixed``, ``16-mixed``: parameters and gradients in float32, steps captured under autocast with its casts.

    The scaler of ``16-mixed`` stays the user's: what one rank finds infinite in its shards, all ranks know.
    """

    def __init__(self, precision: Any, device: str, scaler: torch.amp.GradScaler | None) -> None:
        super().__init__(precision, device, scaler)
        if self.scaler is not None:
            unscale_shards(self.scaler, self._agree)

    def _agree(self, found_inf: Tensor) -> None:
        if self.ranks is not None and self.ranks.size() > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self.ranks.get_group())

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip; only with a scaler may an optimizer unscale by itself, and must then not be clipped.

        Raises:
            RuntimeError: such an optimizer, as Lightning says it.
        """
        kind = Precision if self.scaler is None else MixedPrecision
        kind.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The scaler's state under the name by which plugins of one device look for it."""
        if (state := checkpoint.pop(type(self).__qualname__, None)) is not None:
            checkpoint[MixedPrecision.__qualname__] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The other way round."""
        if (state := checkpoint.get(MixedPrecision.__qualname__)) is not None:
            checkpoint[type(self).__qualname__] = state


def supported_precision(plugin: Precision) -> ShardedPrecision:
    """Our plugin for the precision of ``plugin``; one of ours is returned as it is.

    Raises:
        ConfigError: a precision that is none of ``SUPPORTED``, or a plugin of the user's own.
    """
    if isinstance(plugin, ShardedPrecision):
        return plugin
    if type(plugin) is Precision and plugin.precision == "32-true":
        return FullPrecision()
    if type(plugin) is DoublePrecision:
        return ShardedDoublePrecision()
    if type(plugin) is HalfPrecision:
        return ShardedHalfPrecision(plugin.precision)
    if type(plugin) is MixedPrecision:
        return ShardedMixedPrecision(plugin.precision, plugin.device, plugin.scaler)
    raise ConfigError(
        f"precision {plugin.precision!r} ({type(plugin).__name__}) is not supported by AutoParallelStrategy: "
        f"use Trainer(precision=...) with one of {', '.join(map(repr, SUPPORTED))}"
    )


def clip_by_norm(gradients: Sequence[Tensor], max_norm: float, ranks: DeviceMesh | None) -> Tensor:
    """Scale ``gradients`` in place by min(1, max_norm / (norm + 1e-6)); their 2-norm before, a 0-dim float32 tensor.

    Each rank adds up the squares of its shards, divided by the number of ranks that hold the same shard, so that one
    all-reduce over all ``ranks`` (a one-dimensional mesh) gives the sum over the whole tensors. Nothing is read on the
    host, or copied from it.
    """
    if not gradients:
        return torch.zeros(())
    size = 1 if ranks is None else ranks.size()
    locals_ = [_local(gradient) for gradient in gradients]
    by_copies: dict[int, list[Tensor]] = {}
    for copies, own in zip(_copies(gradients, size), norms(locals_), strict=True):
        by_copies.setdefault(copies, []).append(own)
    total = torch.stack([torch.stack(some).square().sum() / copies for copies, some in by_copies.items()]).sum()
    if ranks is not None and size > 1:
        dist.all_reduce(total, group=ranks.get_group())
    norm = total.sqrt()
    scale_together(locals_, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _gradients(plugin: ShardedPrecision, optimizer: Optimizer) -> list[Tensor]:
    """Those of all ranks' rows so far, which a module may clip at each micro-batch."""
    plugin.reduce_gradients(within_window=True)
    return [parameter.grad for parameter in plugin.main_params(optimizer) if parameter.grad is not None]


def _local(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    return gradient.to_local() if gradient.requires_grad else part_of(gradient)


def _copies(gradients: Sequence[Tensor], ranks: int) -> list[int]:
    """How many of all ``ranks`` hold the same part, of each gradient."""
    known: dict[Any, int] = {}
    return [_copies_of(gradient, ranks, known) if isinstance(gradient, DTensor) else ranks for gradient in gradients]


def _copies_of(gradient: DTensor, ranks: int, known: dict[Any, int]) -> int:
    mesh, placements = gradient.device_mesh, gradient.placements
    key = id(mesh), placements
    if key not in known:
        known[key] = ranks // math.prod(mesh.size(dim) for dim, p in enumerate(placements) if not p.is_replicate())
    return known[key]
