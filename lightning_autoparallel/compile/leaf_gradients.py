"""Gradients that parameters without one get as they are, past what autograd would do to the same end.

Autograd takes a gradient over by ``detach``, which for a DTensor is a call of its dispatch: tens of microseconds each.
Whatever it may do besides, adding up, telling hooks, giving gradients to who asked for them, stays its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.torch_compat.autograd import has_hooks, will_accumulate


def give_to_leaves(
    ctx: Any, parameters: Sequence[DTensor | None], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients that are left to autograd, None in the place of those that their parameters have now.

    ``ctx`` is the node of a function whose tensors ``parameters`` lists, None for others, in a backward under way.
    """
    left, edges = list(gradients), ctx.next_functions
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=False)):
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor) and _would_keep(parameter, gradient):
            if not will_accumulate(edges[i][0], parameter):
                return left  # somebody asks for gradients of some tensors
            parameter.grad, left[i] = gradient, None
    return left


def _would_keep(parameter: DTensor, gradient: DTensor) -> bool:
    """Whether autograd would make the gradient the parameter's without changing it or telling anybody."""
    is_first = parameter.grad is None and not has_hooks(parameter)
    return is_first and gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride()
