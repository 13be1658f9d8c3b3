"""Gradients that parameters without one get as they are, past what autograd would do to the same end.

Autograd takes a gradient over by ``detach``, which for a DTensor is a call of its dispatch: tens of microseconds each.
Whatever it may do besides, adding up, telling hooks of tensors, looking for anomalies, giving gradients to who asked
for them, stays its own. Hooks of its nodes that add gradients up, of which it tells nobody, are given None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.torch_compat.autograd import dtype_of_gradient, has_hooks, will_accumulate
from lightning_autoparallel.torch_compat.dtensors import has_strides_of


def give_to_leaves(
    ctx: Any,
    places: Sequence[tuple[int, int]],
    parameters: Sequence[DTensor | None],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients that are left to autograd, None in the place of those that their parameters have now.

    ``ctx`` is the node of a function whose tensors ``parameters`` lists, None for others, in a backward under way;
    the first of each of the ``places`` is one that has a gradient.
    """
    left, edges = list(gradients), ctx.next_functions
    if torch.is_anomaly_enabled() or not _is_on_one_stream():
        return left
    for i, _ in places:
        parameter, gradient = parameters[i], left[i]
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and _would_keep(parameter, gradient):
            if not will_accumulate(edges[i][0], parameter):
                return left  # somebody asks for gradients of some tensors
            parameter.grad, left[i] = gradient, None
    return left


def _would_keep(parameter: DTensor, gradient: DTensor) -> bool:
    """Whether autograd would make the gradient the parameter's without changing it or telling anybody."""
    if not parameter.requires_grad or parameter.grad is not None or has_hooks(parameter):
        return False
    return gradient.dtype == dtype_of_gradient(parameter) and has_strides_of(parameter, gradient)


def _is_on_one_stream() -> bool:
    """Whether who reads gradients behind the backward waits for what computes them: else autograd sees to that."""
    return not torch.cuda.is_initialized() or torch.cuda.current_stream() == torch.cuda.default_stream()
