"""Lists and dicts that a step is given for those it reads: they tell what is read, and keep what is written.

The real container stays as it is during a capture. What only grows is not read: its content needs no guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from lightning_autoparallel.capture.places import MISSING, Place, item_of
from lightning_autoparallel.capture.watch import is_watched


class Owner(Protocol):
    """Who gave the stand-in to the step."""

    def item(self, place: Place, value: Any) -> Any: ...
    def whole(self, place: Place, real: Any) -> None: ...
    def changed_in_place(self, container: ListStandIn | DictStandIn) -> None: ...


class ListStandIn(list):  # type: ignore[type-arg]
    """A list as the step sees it; ``appended`` is what it added, ``rewritten`` says that it did anything else."""

    def __init__(self, items: Iterable[Any] = (), place: Place | None = None, owner: Owner | None = None) -> None:
        super().__init__(items)
        self.place, self.owner, self.real = place, owner, items
        self.appended: list[Any] = []
        self.rewritten = False

    def _read_all(self) -> None:
        if self.owner is None or self.place is None:
            return
        owner, self.owner = self.owner, None
        self.__dict__["watch"] = owner
        owner.whole(self.place, self.real)
        known = len(self.real)  # type: ignore[arg-type]
        for i, value in enumerate(list.__getitem__(self, slice(0, known)) if not self.rewritten else ()):
            list.__setitem__(self, i, owner.item(item_of(self.place, i), value))

    def _changes(self, rewritten: bool) -> None:
        owner = self.owner or self.__dict__.get("watch")
        if owner is not None:
            if rewritten:
                self._read_all()
                self.rewritten = True
            owner.changed_in_place(self)

    def is_changed_behind(self) -> bool:
        """Whether a function in C has changed it, past its methods (``heapq``)."""
        if self.rewritten or self.place is None:
            return False
        expected, now = [*self.real, *self.appended], list.__getitem__(self, slice(None))
        return len(now) != len(expected) or not all(map(_stands_for, now, expected))

    def append(self, item: Any) -> None:
        """Noted, and done at each real step."""
        self._changes(False)
        self.appended.append(item)
        super().append(item)

    def extend(self, items: Iterable[Any]) -> None:
        """Noted, and done at each real step."""
        for item in items:
            self.append(item)

    def __iadd__(self, items: Iterable[Any]) -> ListStandIn:  # type: ignore[override,misc]
        self.extend(items)
        return self

    def __getitem__(self, index: Any) -> Any:
        known = len(self.real) if self.place is not None else 0  # type: ignore[arg-type]
        if self.owner is not None and type(index) is int and 0 <= index < known and not self.rewritten:
            return self.owner.item(item_of(self.place, index), list.__getitem__(self, index))  # type: ignore[arg-type]
        self._read_all()
        return super().__getitem__(index)


class DictStandIn(dict):  # type: ignore[type-arg]
    """A dict as the step sees it; ``written`` holds the entries that it set, ``MISSING`` for those it took out."""

    def __init__(self, items: Any = (), place: Place | None = None, owner: Owner | None = None, **more: Any) -> None:
        super().__init__(items, **more)
        self.place, self.owner, self.real = place, owner, items
        self.written: dict[Any, Any] = {}

    def _read_all(self) -> None:
        owner, self.owner = self.owner, None
        if owner is None or self.place is None:
            return
        self.__dict__["watch"] = owner
        owner.whole(self.place, self.real)
        for key in [key for key in dict.keys(self) if key not in self.written]:
            dict.__setitem__(self, key, owner.item(self.place_of(key), dict.__getitem__(self, key)))

    def is_changed_behind(self) -> bool:
        """Whether a function in C has changed it, past its methods."""
        if self.place is None:
            return False
        expected = {**dict(self.real), **self.written}
        expected = {key: value for key, value in expected.items() if value is not MISSING}
        now = {key: dict.__getitem__(self, key) for key in dict.keys(self)}
        return now.keys() != expected.keys() or not all(_stands_for(now[key], expected[key]) for key in now)

    def place_of(self, key: Any) -> Place:
        """Where the real dict keeps an entry."""
        assert self.place is not None
        return item_of(self.place, key)

    def _one(self, key: Any) -> Any:
        found = dict.get(self, key, MISSING)
        if self.owner is None or key in self.written:
            return found
        return self.owner.item(self.place_of(key), found)

    def _changes(self, key: Any, value: Any) -> None:
        owner = self.owner or self.__dict__.get("watch")
        if owner is not None:
            self.written[key] = value
            owner.changed_in_place(self)

    def __getitem__(self, key: Any) -> Any:
        found = self._one(key)
        return super().__getitem__(key) if found is MISSING else found

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry; only this one is read."""
        found = self._one(key)
        return default if found is MISSING else found

    def __contains__(self, key: Any) -> bool:
        return self._one(key) is not MISSING

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The entry; only this one is read."""
        if key not in self:
            self[key] = default
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._changes(key, value)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        self._changes(key, MISSING)

    def pop(self, key: Any, *default: Any) -> Any:
        """The entry, which is taken out at each real step."""
        found = self._one(key)
        if found is MISSING:
            return super().pop(key, *default)
        del self[key]
        return found

    def update(self, *args: Any, **more: Any) -> None:
        """Entry by entry."""
        for key, value in dict(*args, **more).items():
            self[key] = value

    def __ior__(self, other: Any) -> DictStandIn:  # type: ignore[override,misc]
        self.update(other)
        return self

    def clear(self) -> None:
        """Entry by entry."""
        for key in list(self):
            del self[key]

    def popitem(self) -> tuple[Any, Any]:
        """The last entry."""
        key = list(self)[-1]
        return key, self.pop(key)


def _stands_for(item: Any, real: Any) -> bool:
    return item is real or is_watched(item) or (isinstance(item, (ListStandIn, DictStandIn)) and item.real is real)


def _reading(cls: Any, name: str, base: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._read_all()
        return getattr(base, name)(self, *args, **kwargs)

    return method


def _rewriting(name: str) -> Callable[..., Any]:
    def method(self: ListStandIn, *args: Any, **kwargs: Any) -> Any:
        self._changes(True)
        return getattr(list, name)(self, *args, **kwargs)

    return method


def _reflected(plain: Any) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        self._read_all()
        return other + plain(self) if plain is list else other | plain(self)

    return method


_READS = ("__iter__", "__len__", "__eq__", "__ne__", "__reversed__", "__repr__", "__reduce_ex__", "copy")
for _name in (*_READS, "__contains__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__mul__", "__rmul__"):
    setattr(ListStandIn, _name, _reading(ListStandIn, _name, list))
for _name in ("index", "count"):
    setattr(ListStandIn, _name, _reading(ListStandIn, _name, list))
for _name in ("insert", "remove", "pop", "clear", "sort", "reverse", "__setitem__", "__delitem__", "__imul__"):
    setattr(ListStandIn, _name, _rewriting(_name))
for _name in (*_READS, "keys", "values", "items", "__or__"):
    setattr(DictStandIn, _name, _reading(DictStandIn, _name, dict))
ListStandIn.__radd__ = _reflected(list)  # type: ignore[attr-defined]
DictStandIn.__ror__ = _reflected(dict)  # type: ignore[assignment]


def without_stand_ins(value: Any) -> Any:
    """For torch, whose C++ reads containers unseen: the same content, read, in a plain container."""
    if type(value) is ListStandIn:
        value._read_all()
        return list(value)
    if type(value) is DictStandIn:
        value._read_all()
        return dict(value)
    return value
