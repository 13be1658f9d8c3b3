"""A step that a rank runs for others alone: they run it ahead of an agreement that has failed.

A rank that runs the step on which all have agreed last does not wait for them to agree again: it learns while its
forward runs whether they do, and lets go of what that has computed where they do not. Its forward has collectives. So
those who are elsewhere run it, too, once they find that they differ, on nothing in particular. Nothing comes of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.pipeline.agreed_calls import Agreement, begin_agreement
from lightning_autoparallel.pipeline.seeds import generators_at
from lightning_autoparallel.pipeline.step_calls import Variant
from lightning_autoparallel.torch_compat.dtensors import part_of

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.engine import StepEngine


class StepsAhead:
    """The step on which all ranks of an engine agreed last, which alone may run ahead of an agreement."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self._last: Any = None

    def may(self, key: Any) -> bool:
        """Whether the step of this ``key`` is the last one, others can join it, and there are others."""
        return not self._engine.context.control.alone and self._last == key

    def begin(self, *step: Any) -> Agreement:
        """Ask the other ranks, of what ``begin_agreement`` takes; what it returns waits for their answer."""
        answered = begin_agreement(self._engine.context, *step)

        def wait() -> None:
            answered()
            self._engine.buffers.agree()

        return wait

    def agreed(self, key: Any, variant: Variant) -> None:
        """All ranks are about to run this one."""
        self._engine.buffers.agree()
        self.forget()
        if can_be_joined(variant):
            self._last, self._engine.context.control.join = key, partial(self._join, variant)

    def forget(self) -> None:
        """Nothing is captured any more, or lies where it lay."""
        self._last, self._engine.context.control.join = None, _nothing

    def _join(self, variant: Variant) -> None:
        modes = self._engine.modes
        join_step(variant, modes.parameters if modes is not None else (), self._engine.device)


def _nothing() -> None:
    pass


# Operators that look at values, which zeros are not: of a matrix that has no inverse, of what is no distribution.
_CHECKS = re.compile(
    "aten::_?(assert|binary_cross|binomial|cholesky|ctc_loss|cudnn_ctc|dirichlet|eig|embedding_bag|functional_assert|geqrf"
    "|histc|inverse|ldl_|linalg|lstsq|lu_|matrix_exp|multi_margin|multilabel|multinomial|orgqr|ormqr|poisson|qr|sample_d"
    "|segment|solve|standard_gamma|svd|symeig|triangular_solve|unique|use_cudnn_ctc)"
)
_KNOWN = ("aten::", "prims::", "_c10d_functional::", "c10d_functional::", "lightning_autoparallel")


def can_be_joined(variant: Variant) -> bool:
    """Whether the forward runs on zeros as on anything: no operator of it is a stranger's, or looks at values."""
    graph = variant.step.partitioned.forward.graph
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    names = [target.name() for target in targets if isinstance(target, torch._ops.OpOverload)]
    return not any(_CHECKS.match(name) or not name.startswith(_KNOWN) for name in names)


def join_step(variant: Variant, parameters: Sequence[Tensor], device: torch.device) -> None:
    """Run the forward of a captured step with zeros for a batch, and forget what it gives.

    ``parameters`` are those that it reads; where one lies otherwise by now there are zeros in its place, too.
    """
    step = variant.step
    placeholders = step.partitioned.forward.graph.find_nodes(op="placeholder")
    values: list[Tensor] = []
    for number, like in enumerate(node.meta["val"] for node in placeholders):
        own = parameters[number] if number < len(parameters) else None
        part = part_of(own) if isinstance(own, DTensor) else own
        fits = part is not None and _described(part) == _described(like)
        values.append(part.detach() if part is not None and fits else _zeros(like, device))
    with torch.no_grad(), torch.autocast(device.type, enabled=False), generators_at("joined", device):
        step.forward(values)


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type


def _zeros(like: Tensor, device: torch.device) -> Tensor:
    place = device if like.device.type == device.type else like.device
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=place).zero_()
