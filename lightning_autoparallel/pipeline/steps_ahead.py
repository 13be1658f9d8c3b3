"""A step that runs ahead of ranks' agreement, and what ranks that differ run for those who do.

A rank that runs the step on which all have agreed last does not wait for them to agree again: it learns while its
forward runs whether they do, and lets go of what that has computed where they do not. Its forward has collectives. So
those who are elsewhere run theirs of the last time again, once they find that they differ. Nothing comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_autoparallel.compile import forward_again
from lightning_autoparallel.pipeline.agreed_calls import Agreement, begin_agreement
from lightning_autoparallel.pipeline.seeds import generators_at
from lightning_autoparallel.pipeline.step_calls import Variant

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.engine import StepEngine

# Of a batch that is kept to run the step on again; steps on larger ones take long beside an agreement.
_MOST_BYTES = 2**22


class StepsAhead:
    """The step on which all ranks of an engine agreed last, which alone may run ahead of an agreement."""

    _last: Any

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine
        self.forget()  # what another engine has left

    def may(self, key: Any) -> bool:
        """Whether the step of this ``key`` is the last one, and can be run again for others."""
        return self._is_kept and self._last == key

    def begin(self, *step: Any) -> Agreement:
        """Ask the other ranks, of what ``begin_agreement`` takes; what it returns waits for their answer."""
        answered = begin_agreement(self._engine.context, *step)

        def wait() -> None:
            answered()
            self._engine.buffers.agree()

        return wait

    def agreed(self, key: Any) -> None:
        """All ranks are about to run the step of this ``key``."""
        self._engine.buffers.agree()
        self.forget()
        self._last = key

    def ran(self, variant: Variant, inputs: Sequence[Tensor], given: int) -> None:
        """All ranks have run this step; this one on ``inputs``, of which the last ``given`` ones are the batch."""
        control, own = self._engine.context.control, len(inputs) - given
        batch = inputs[own:]
        is_strided = all(tensor.layout is torch.strided for tensor in batch)
        self._is_kept = is_strided and sum(tensor.nbytes for tensor in batch) <= _MOST_BYTES and not control.alone
        if self._is_kept:  # as copies: a loader may fill the same memory again
            kept = [*inputs[:own], *(tensor.clone() for tensor in batch)]
            control.join = partial(self._again, variant, kept)

    def forget(self) -> None:
        """Nothing is captured any more, or lies where it lay."""
        self._last = None
        self._is_kept, self._engine.context.control.join = False, _nothing

    def _again(self, variant: Variant, inputs: Sequence[Tensor]) -> None:
        """The forward, for others; on values that it has run on, as it may look at them."""
        with generators_at("again", self._engine.device):
            forward_again(variant.step, inputs, variant.wiring)


def _nothing() -> None:
    pass
