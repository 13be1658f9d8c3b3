"""What ranks write into parameters, told apart: the Python of steps and hooks may write what its own rows say.

One device has one value to write, and under DDP each rank's copy takes its own. Of a parameter in shards each part
takes what is written on the ranks that hold it, so that ranks which write different values make a mixture of them. And
a step that is captured whole takes copies for equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.torch_compat.interception import without_function_modes

_WRITES, _NEXT, _IS = "; writes ", " | ", " = "
_EVERY = (1, 2, 3, 7)  # so many elements one is added up


@dataclass(frozen=True)
class _Write:
    """``name`` says of what; ``values`` are what decides what is written, tensors by a few sums."""

    name: Callable[[], str]
    is_cut: bool
    place: str
    values: Sequence[Any]


class OwnWrites:
    """This rank's writes since ranks compared them."""

    def __init__(self) -> None:
        self._written: list[_Write] = []

    def clear(self) -> None:
        """Ranks have compared them."""
        self._written.clear()

    def note(self, name: Callable[[], str], target: DTensor, values: Sequence[Any]) -> None:
        """These are written into a tensor, or decide what is; those of shards are the same anyway."""
        if target.device_mesh.size() > 1:
            own = [_sketch(value) for value in values if not isinstance(value, DTensor)]
            is_cut = _is_cut(target)
            before = sum(write.is_cut == is_cut for write in self._written)
            place = f"{'cut' if is_cut else 'whole'} {before}: a tensor of shape {list(target.shape)}"
            self._written.append(_Write(name, is_cut, place, own))

    def text(self, parts: bool = False) -> str:
        """All of them, or those into ``parts``, to be compared with those of other ranks; empty without any."""
        chosen = [write for write in self._written if write.is_cut or not parts]
        spelled = [f"{write.place}{_IS}{[_spelled(value) for value in write.values]}" for write in chosen]
        return f"{_WRITES}{_NEXT.join(spelled)}" if spelled else ""

    def said_of(self, differing: Sequence[str], step: str) -> str:
        """What a user is told of writes that differ."""
        mine = {write.place: write for write in self._written}
        names = [mine[place].name() if place in mine else place.partition(": ")[2] for place in differing]
        return (
            f"ranks have written different values into {', '.join(dict.fromkeys(names))}, in {step} or in hooks before "
            "it. A parameter is one for all ranks: its parts, or its copies, have now what the ranks that hold them "
            "wrote, where one device would have written one value, of all rows. Write what ranks have in common: a "
            "mean over them (self.trainer.strategy.reduce), or of all rows (self.all_gather)"
        )


def differing_writes(places: Sequence[Any]) -> list[str]:
    """Which of their writes ranks do not have in common, where that is all in which their places differ."""
    if not all(isinstance(place, str) for place in places):
        return []
    parted = [place.partition(_WRITES) for place in places]
    if len({place for place, _, _ in parted}) > 1:
        return []
    writes = [writes.split(_NEXT) if writes else [] for _, _, writes in parted]
    everything = dict.fromkeys(entry for mine in writes for entry in mine)
    differing = [entry for entry in everything if any(entry not in mine for mine in writes)]
    return list(dict.fromkeys(entry.partition(_IS)[0] for entry in differing))


def _is_cut(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return any(not p.is_replicate() and mesh.size(axis) > 1 for axis, p in enumerate(tensor.placements))


@torch.no_grad()
def _sketch(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with without_function_modes():
        numbers = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        flat = numbers.detach().reshape(-1)
        return torch.stack([flat[::every].sum(dtype=torch.float64) for every in _EVERY])


def _spelled(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
