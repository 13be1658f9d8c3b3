"""What a step read, compared before each real step: fast where nothing changed, and with a name where something did."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from lightning_autoparallel.capture.places import MISSING, Place, attributes_of, item_of
from lightning_autoparallel.capture.plain import equal, is_number, is_plain, shown
from lightning_autoparallel.capture.reads import Read
from lightning_autoparallel.fx.values import Snapshot


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


class _Attributes:
    """Attributes of one object that are compared by identity first; ``absent`` ones must stay so."""

    def __init__(self, table: dict[str, Any], values: dict[str, Any], absent: frozenset[str]) -> None:
        self.table, self.absent = table, absent
        names = tuple(values)
        self.get = itemgetter(*names, names[0]) if names else None
        self._expected = (*values.values(), values[names[0]]) if names else ()

    def hold(self) -> bool:
        """Whether all values are as they were; equal ones become the expected ones."""
        assert self.get is not None
        try:
            now = self.get(self.table)
        except KeyError:
            return False
        if all(map(is_, now, self._expected)):
            return True
        if not all(map(equal, self._expected, now)):
            return False
        self._expected = now
        return True

    def lacks(self) -> bool:
        """Whether nothing has come that was absent."""
        return self.table.keys().isdisjoint(self.absent)


class StateGuards:
    """The guards of one captured step; ``tensors`` must be the same objects, unchanged as ``Snapshot`` can tell."""

    def __init__(self, reads: Iterable[Read], tensors: Sequence[tuple[Tensor, Place | None]]) -> None:
        self._reads = list(reads)
        self._tensors = [(tensor, Snapshot(tensor), place) for tensor, place in tensors]
        compared = [read for read in self._reads if read.frozen.kind is not object]
        simple = [read for read in compared if _is_simple(read)]
        empty = [read for read in compared if _is_no_hook(read)]
        self._others = [read for read in compared if not _is_simple(read) and not _is_no_hook(read)]
        groups = _groups(simple)
        self._groups = [group for group in groups if group.get is not None]
        self._lacking = [group for group in groups if group.absent]
        self._tables = [group.table for group in self._lacking]
        self._sizes: list[int] = []
        self._empty = [read.frozen.value for read in empty]

    def hold(self) -> bool:
        """Whether everything is as it was."""
        for group in self._groups:
            if not group.hold():
                return False
        return not any(self._empty) and self._lack() and self._others_hold()

    def _lack(self) -> bool:
        """Whether nothing has come that was absent: asked of objects where the number of attributes has changed."""
        sizes = list(map(len, self._tables))
        if sizes != self._sizes:
            if not all(group.lacks() for group in self._lacking):
                return False
            self._sizes = sizes
        return True

    def _others_hold(self) -> bool:
        for read in self._others:
            if read.frozen.difference(read.place.read()) is not None:
                return False
        return all(
            (place is None or place.read() is tensor) and snapshot.is_of(tensor)
            for tensor, snapshot, place in self._tensors
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
        for tensor, snapshot, place in self._tensors:
            now = tensor if place is None else place.read()
            if not snapshot.is_of(now):
                text = "a tensor" if place is None else place.text
                found.append(Difference(place=None, text=text, line="?", before=tensor, now=now))
        return found


def _is_simple(read: Read) -> bool:
    """Whether one comparison by identity says nearly always that nothing changed."""
    place, frozen = read.place, read.frozen
    if place.kind not in ("attribute", "global") or not frozen.content:
        return False
    value = frozen.value
    return frozen.kind is not object and frozen.array is None and (is_plain(value) or frozen.parts is None)


def _is_no_hook(read: Read) -> bool:
    """Whether a table of a module's hooks was empty: torch never replaces these tables."""
    place = read.place
    is_table = place.kind == "attribute" and isinstance(place.owner, nn.Module) and str(place.key)[-6:] == "_hooks"
    named = str(place.key) in ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return (is_table or named or place.key == "_forward_hooks_always_called") and read.frozen.parts == {}


def _groups(reads: Sequence[Read]) -> list[_Attributes]:
    by_owner: dict[int, list[Read]] = {}
    for read in reads:
        by_owner.setdefault(id(read.place.owner), []).append(read)
    groups = []
    for own in by_owner.values():
        values = {read.place.key: read.frozen.value for read in own if read.frozen.value is not MISSING}
        absent = frozenset(read.place.key for read in own if read.frozen.value is MISSING)
        groups.append(_Attributes(_table(own[0].place), values, absent))
    return groups


def _table(place: Place) -> dict[str, Any]:
    return place.owner if place.kind == "global" else attributes_of(place.owner)  # type: ignore[no-any-return]
