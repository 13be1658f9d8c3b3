"""A step that a rank runs for others alone: they run it ahead of an agreement that has failed.

A rank that runs the step on which all have agreed last does not wait for them to agree again: it learns while its
forward runs whether they do, and lets go of what that has computed where they do not. Its forward has collectives. So
those who are elsewhere run it, too, once they find that they differ, on nothing in particular. Nothing comes of it.
"""

from __future__ import annotations

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
        """Whether the step of this ``key`` is the last one, and there are others to agree with."""
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
        engine = self._engine
        engine.buffers.agree()
        parameters = engine.modes.parameters if engine.modes is not None else ()
        engine.context.control.join = partial(join_step, variant, parameters, engine.device)
        self._last = key

    def forget(self) -> None:
        """Nothing is captured any more."""
        self._last = None


def join_step(variant: Variant, parameters: Sequence[Tensor], device: torch.device) -> None:
    """Run the forward of a captured step with zeros for a batch, and forget what it gives.

    ``parameters`` are those that it reads; where one lies otherwise by now there are zeros in its place, too.
    """
    step = variant.step
    placeholders = step.partitioned.forward.graph.find_nodes(op="placeholder")
    expected = [node.meta["val"] for node in placeholders]
    values: list[Tensor] = []
    for number, like in enumerate(expected):
        own = parameters[number] if number < len(parameters) else None
        part = part_of(own) if isinstance(own, DTensor) else own
        fits = part is not None and part.shape == like.shape and part.dtype == like.dtype
        values.append(part.detach() if part is not None and fits else _zeros(like, device))
    kind = device.type
    with torch.no_grad(), torch.autocast(kind, enabled=False), generators_at("joined", device):
        step.forward(values)


def _zeros(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).zero_()
