"""Gradients that wait for their reduction: on some axes every rank keeps an addend of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from lightning_autoparallel.apply.params import ParameterLayout
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import explicit


@dataclass(frozen=True, kw_only=True)
class UnreducedLayout:
    """How a parameter lies (``stored``), and its gradient before it is reduced: a partial sum on the axes that wait."""

    stored: ParameterLayout
    unreduced: ParameterLayout

    @classmethod
    def of(cls, stored: ParameterLayout, waits: Callable[[PlanAxis, bool], bool]) -> UnreducedLayout | None:
        """``waits(axis, is_whole)``: whether an axis that shares out the batch waits, given that the parameter is whole
        on it; None if none does.
        """
        cuts = explicit(stored.placements, stored.axes)
        partial: Placements = tuple(
            Partial("sum") if axis.shards_batch and waits(axis, placement.is_replicate()) else cut
            for axis, placement, cut in zip(stored.axes, stored.placements, cuts, strict=True)
        )
        return None if partial == cuts else cls(stored=stored, unreduced=replace(stored, placements=partial))

    @property
    def pads(self) -> bool:
        """Whether this rank's shard is smaller than what graphs take."""
        return self.stored.pads

    @property
    def unpads(self) -> bool:
        """Whether its part of the gradient is smaller than what graphs give."""
        return self.unreduced.pads

    def padded(self, local: Tensor) -> Tensor:
        """The parameter's shard as large as every other rank's."""
        return self.stored.padded(local)

    def unpadded(self, local: Tensor) -> Tensor:
        """The gradient's part without padding."""
        return self.unreduced.unpadded(local)

    def distribute(self, local: Tensor) -> DTensor:
        """The unreduced gradient around this rank's addend."""
        return self.unreduced.distribute(local)

    def addend(self, reduced: DTensor) -> DTensor:
        """A gradient that is reduced, as addends; nothing is sent. One that is unreduced already is returned."""
        if any(placement.is_partial() for placement in reduced.placements):
            return reduced
        local, own, outer = reduced.to_local(), self.stored.bounds(), self.unreduced.bounds()
        if own != outer:
            shape = [end - start for start, end in outer]
            whole = torch.zeros(shape, dtype=local.dtype, device=local.device)
            part = whole
            for dim, ((start, end), (first, _)) in enumerate(zip(own, outer, strict=True)):
                part = part.narrow(dim, start - first, end - start)
            part.copy_(local)
            local = whole
        return self.distribute(local / self._replicas())

    def _replicas(self) -> int:
        """How many ranks hold the same part, and will be added up."""
        pairs = zip(self.stored.placements, self.unreduced.placements, self.stored.axes, strict=True)
        return math.prod(axis.size for stored, partial, axis in pairs if stored.is_replicate() and partial.is_partial())
