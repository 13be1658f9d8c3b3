"""What ranks write into parameters that lie in shards, told apart: a step's Python may write what its own rows say.

One device has one value to write, and under DDP each rank's copy takes its own. Of a parameter in shards each part
takes what is written on the ranks that hold it, so that ranks which write different values make a mixture of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.torch_compat.interception import without_function_modes

_WRITES, _NEXT, _IS = "; writes ", " | ", " = "


class OwnWrites:
    """This rank's writes of a step, each by the sum and the norm of what is written; numbers as they are."""

    def __init__(self) -> None:
        self._written: list[tuple[str, list[Any]]] = []

    def clear(self) -> None:
        """Another step begins."""
        self._written.clear()

    def note(self, name: str, target: DTensor, values: Sequence[Any]) -> None:
        """These are written into a tensor of that name, or decide what is; those of shards are the same anyway."""
        if _is_cut(target):
            self._written.append((name, [_sketch(value) for value in values if not isinstance(value, DTensor)]))

    def text(self) -> str:
        """All of them, to be compared with those of other ranks; empty without any."""
        spelled = [f"{name}{_IS}{[_spelled(value) for value in values]}" for name, values in self._written]
        return f"{_WRITES}{_NEXT.join(spelled)}" if spelled else ""


def differing_writes(places: Sequence[Any]) -> list[str]:
    """What ranks have written different values into, where that is all in which their places differ."""
    if not all(isinstance(place, str) for place in places):
        return []
    parted = [place.partition(_WRITES) for place in places]
    if len({place for place, _, _ in parted}) > 1:
        return []
    writes = [writes.split(_NEXT) if writes else [] for _, _, writes in parted]
    differing = {entry for mine in writes for entry in mine if any(entry not in others for others in writes)}
    return sorted({entry.partition(_IS)[0] for entry in differing})


def _is_cut(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return any(not p.is_replicate() and mesh.size(axis) > 1 for axis, p in enumerate(tensor.placements))


@torch.no_grad()
def _sketch(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with without_function_modes():
        numbers = torch.view_as_real(value) if value.is_complex() else value
        numbers = numbers.detach().to(torch.float64)
        return torch.stack([numbers.sum(), torch.linalg.vector_norm(numbers)])


def _spelled(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
