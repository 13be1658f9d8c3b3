"""What a step read, compared before each real step: fast where nothing changed, and with a name where something did."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

from lightning_autoparallel.capture.places import MISSING, Place, attributes_of, item_of
from lightning_autoparallel.capture.plain import equal, is_number, is_plain, shown
from lightning_autoparallel.capture.reads import Read


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that a step read and that is not what it was; ``place`` where it is a value of its own."""

    place: Place | None
    text: str
    line: str
    before: Any
    now: Any

    @property
    def is_number(self) -> bool:
        """Whether the step could take the number as an input."""
        return is_number(self.before) and is_number(self.now)

    def __str__(self) -> str:
        return f"{self.text} was {shown(self.before)} and is {shown(self.now)} ({self.line})"


@dataclass
class _Attributes:
    """Attributes of one object that are compared by identity first; ``absent`` ones must stay so."""

    table: dict[str, Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    absent: frozenset[str]
    size: int = -1

    def __post_init__(self) -> None:
        self._get = itemgetter(*self.names, self.names[0]) if self.names else None
        self._expected = (*self.values, self.values[0]) if self.names else ()

    def hold(self) -> bool:
        """Whether all are as they were; equal values become the expected ones."""
        table = self.table
        if len(table) != self.size:
            if not table.keys().isdisjoint(self.absent):
                return False
            self.size = len(table)
        if self._get is None:
            return True
        try:
            now = self._get(table)
        except KeyError:
            return False
        if all(map(is_, now, self._expected)):
            return True
        if not all(map(equal, self._expected, now)):
            return False
        self._expected = now
        return True


class StateGuards:
    """The guards of one captured step; ``tensors`` must be the same objects, unchanged in place."""

    def __init__(self, reads: Iterable[Read], tensors: Sequence[tuple[Tensor, Place | None]]) -> None:
        self._reads = list(reads)
        self._tensors = [(tensor, tensor._version, place) for tensor, place in tensors]
        grouped = [read for read in self._reads if _is_simple(read)]
        self._others = [read for read in self._reads if not _is_simple(read) and read.frozen.kind is not object]
        self._groups = _groups(grouped)

    def hold(self) -> bool:
        """Whether everything is as it was."""
        for group in self._groups:
            if not group.hold():
                return False
        for read in self._others:
            if read.frozen.difference(read.place.read()) is not None:
                return False
        return all(
            tensor._version == version and (place is None or place.read() is tensor)
            for tensor, version, place in self._tensors
        )

    def differences(self) -> list[Difference]:
        """What is not as it was."""
        found = []
        for read in self._reads:
            change = read.frozen.difference(read.place.read())
            if change is not None:
                keys, before, now = change
                part = functools.reduce(item_of, keys, read.place)
                found.append(Difference(place=part, text=part.text, line=read.line, before=before, now=now))
        for tensor, version, place in self._tensors:
            now = tensor if place is None else place.read()
            if now is not tensor or tensor._version != version:
                text = "a tensor" if place is None else place.text
                found.append(Difference(place=None, text=text, line="?", before=tensor, now=now))
        return found


def _is_simple(read: Read) -> bool:
    """Whether one comparison by identity says nearly always that nothing changed."""
    place, frozen = read.place, read.frozen
    if place.kind not in ("attribute", "global") or not frozen.content or isinstance(place.owner, type):
        return False
    value = frozen.value
    return frozen.kind is not object and frozen.array is None and (is_plain(value) or frozen.parts is None)


def _groups(reads: Sequence[Read]) -> list[_Attributes]:
    by_owner: dict[int, list[Read]] = {}
    for read in reads:
        by_owner.setdefault(id(_table(read.place)), []).append(read)
    groups = []
    for own in by_owner.values():
        there = [read for read in own if read.frozen.value is not MISSING]
        absent = frozenset(read.place.key for read in own if read.frozen.value is MISSING)
        names, values = tuple(read.place.key for read in there), tuple(read.frozen.value for read in there)
        groups.append(_Attributes(table=_table(own[0].place), names=names, values=values, absent=absent))
    return groups


def _table(place: Place) -> dict[str, Any]:
    return place.owner if place.kind == "global" else attributes_of(place.owner)  # type: ignore[no-any-return]
