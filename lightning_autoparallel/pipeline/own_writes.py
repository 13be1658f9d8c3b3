"""What ranks write into parameters, told apart: the Python of steps and hooks may write what its own rows say.

One device has one value to write, and under DDP each rank's copy takes its own. Of a parameter in shards each part
takes what is written on the ranks that hold it, so that ranks which write different values make a mixture of them. And
a step that is captured whole takes copies for equal.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch.distributed.tensor import DTensor

from lightning_autoparallel.pipeline.sketches import sketch, spelled

_WRITES = "; writes "
_MOST = 4096  # writes that are told apart; of more there is one sum
_MOST_NAMES = 5
_CLOSE = 1e-5  # ranks that compute one thing may round otherwise


@dataclass(frozen=True)
class _Write:
    """``name`` says of what; ``values`` are what decides what is written."""

    name: Callable[[], str]
    is_cut: bool
    place: str
    values: Sequence[Any]


class OwnWrites:
    """This rank's writes since ranks compared them; ``holders`` have whole tensors, which assigned data makes old."""

    def __init__(self) -> None:
        self.holders: WeakSet[Any] = WeakSet()
        self._written: list[_Write] = []
        self._counts: Counter[bool] = Counter()
        self._told: set[str] = set()  # places and names

    def forget_wholes(self) -> None:
        """A parameter is about to get other memory."""
        for holder in list(self.holders):
            holder.forget()

    def clear(self) -> None:
        """Ranks have compared them, or nobody will."""
        self._written.clear()
        self._counts.clear()

    def note(self, name: Callable[[], str], target: DTensor, values: Sequence[Any]) -> None:
        """These are written into a tensor, or decide what is; those of shards are the same anyway."""
        if target.device_mesh.size() == 1:
            return
        is_cut = _is_cut(target)
        number, self._counts[is_cut] = self._counts[is_cut], self._counts[is_cut] + 1
        if len(self._written) < _MOST:
            own = [sketch(value) for value in values if not isinstance(value, DTensor)]
            place = f"{'cut' if is_cut else 'whole'} {number}: a tensor of shape {list(target.shape)}"
            self._written.append(_Write(name, is_cut, place, own))

    def text(self, parts: bool = False) -> str:
        """All of them, or those into ``parts``, to be compared with those of other ranks; empty without any."""
        chosen = [write for write in self._written if write.is_cut or not parts]
        if not chosen:
            return ""
        entries = [*zip((write.place for write in chosen), spelled([write.values for write in chosen]), strict=True)]
        if sum(self._counts.values()) > _MOST:
            entries.append(("as many in all", [sum(self._counts.values())]))
        return f"{_WRITES}{json.dumps(entries)}"

    def tell(
        self, differing: Sequence[str], step: str, warn: Callable[[str], None], gather: Callable[[Any], list[Any]]
    ) -> None:
        """Tell a user of writes that differ, of each parameter once; ``gather`` gives what every rank has.

        Some of them only other ranks have made, and can name. Every rank calls it with the same ones.
        """
        places = [place for place in differing if place not in self._told]
        if not places:
            return
        mine = {write.place: write for write in self._written}
        known: dict[str, str] = {}
        for theirs in gather({place: mine[place].name() for place in places if place in mine}):
            known = {**theirs, **known}
        names = dict.fromkeys(known[place] for place in places if place in known)
        new = [name for name in names if name not in self._told]
        self._told.update(places, new)
        if new:
            more = f" and {len(new) - _MOST_NAMES} more" if len(new) > _MOST_NAMES else ""
            warn(
                f"ranks have written different values into {', '.join(new[:_MOST_NAMES])}{more}, in {step} or in hooks "
                "before it. A parameter is one for all ranks: its parts, or its copies, have now what the ranks that "
                "hold them wrote, where one device would have written one value, of all rows. Write what ranks have in "
                "common: a mean over them (self.trainer.strategy.reduce), or of all rows (self.all_gather)"
            )


def differing_writes(places: Sequence[Any]) -> list[str] | None:
    """Those of their writes that ranks do not have in common; None where their places differ in more than these.

    Where one has stopped there are no places.
    """
    if not places or not all(isinstance(place, str) for place in places):
        return None
    parted = [place.partition(_WRITES) for place in places]
    if len({place for place, _, _ in parted}) > 1:
        return None
    ranks = [dict(json.loads(writes)) if writes else {} for _, _, writes in parted]
    everything = dict.fromkeys(place for mine in ranks for place in mine)
    return [place for place in everything if not all(_alike(mine.get(place), ranks[0].get(place)) for mine in ranks)]


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are one, but for rounding; lists of sums end with that of absolute values."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        are_sums = len(one) > 1 and all(isinstance(value, float) for value in (*one, *other))
        scale = max(one[-1], other[-1]) if are_sums else 0.0
        return all(_close(a, b, scale) if are_sums else _alike(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return _close(one, other, max(abs(one), abs(other)))
    return bool(one == other)


def _close(one: float, other: float, scale: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return repr(one) == repr(other)
    return abs(one - other) <= _CLOSE * scale


def _is_cut(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return any(not p.is_replicate() and mesh.size(axis) > 1 for axis, p in enumerate(tensor.placements))
