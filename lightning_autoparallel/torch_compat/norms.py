"""Batch norm as torch's layers compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.overrides import TorchFunctionMode

__all__ = ["BatchNorm", "NormInstead"]


class NormInstead(TorchFunctionMode):
    """While open, what ``F.batch_norm`` would compute with statistics of its rows is computed by ``norm``.

    ``norm`` is given the input, running mean and variance, weight, bias, momentum and eps. Layers that are derived from
    torch's call the same function, which ``nn.SyncBatchNorm`` would put layers of its own in the place of.
    """

    def __init__(self, norm: Callable[..., Tensor]) -> None:
        super().__init__()
        self._norm = norm

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,  # as torch calls it
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        return self._norm(input, running_mean, running_var, weight, bias, momentum, eps)
