"""Ranks that compute parts of one batch shard come to the same loss, or somebody is told why not.

In forward mode each rank's Python runs. What it computes with besides the batch (``self.global_rank``, a generator or a
file of its own) may be another on each rank, as under DDP, where ranks have other rows and gradients are averaged. Here
the copies of a parameter would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.pipeline.agreement import other_place

_ALIKE = 1e-3  # of a loss: kernels that add up in another order each time are no reason to tell


class SharedLosses:
    """Compares losses within shards after each training step, until it has told of one; ranks meet for it."""

    def __init__(self, control: ControlGroup, warn: Callable[[str], None]) -> None:
        self._control, self._warn = control, warn
        self._is_needed = len(set(control.shards)) < len(control.shards)

    def check(self, name: str, output: Any) -> None:
        """What the step ``name`` returned; every rank calls it alike.

        Raises:
            OtherRankError: ranks have come to different places.
        """
        if not self._is_needed:
            return
        place, loss = f"the loss of {name}", _loss_of(output)
        alike = self._control.agrees_in_shards(place, repr(loss))
        if alike:
            return
        everyone = self._control.gather((place, loss))
        if alike is None:
            raise other_place([told[0] if isinstance(told, tuple) else told for told in everyone])
        self._tell(name, [told for _, told in everyone])

    def _tell(self, name: str, losses: list[float | None]) -> None:
        shards = self._control.shards
        for rank, loss in enumerate(losses):
            first = shards.index(shards[rank])
            if not _is_alike(losses[first], loss):
                self._is_needed = False
                self._warn(
                    f"autoparallel: ranks {first} and {rank} compute parts of the same rows, but {name} has the loss "
                    f"{losses[first]} on one and {loss} on the other, so that their copies of parameters drift apart: "
                    "let it depend on the batch's shard (strategy.distributed_sampler_kwargs has its number), not on "
                    "the rank (self.global_rank, generators of a rank's own)"
                )
                return


def _loss_of(output: Any) -> float | None:
    """The loss that a step returned, as a number; None if that is none, or not known here alone."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or isinstance(loss, DTensor) or loss.numel() != 1 or loss.is_complex():
        return None
    return float(loss.detach())


def _is_alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_ALIKE, abs_tol=_ALIKE**2) or (math.isnan(one) and math.isnan(other))
