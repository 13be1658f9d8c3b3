"""Where Python keeps a value that a step reads or writes: it can be read again, and written, at every real step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

PlaceKind = Literal["attribute", "slot", "item", "items", "size", "cell", "global"]


@dataclass(frozen=True, eq=False)
class Place:
    """One attribute, slot, entry of a container, closure cell or global name.

    The ``owner`` of an item is the place of its container, so that a container made anew is found again.
    """

    kind: PlaceKind
    owner: Any
    key: Any
    text: str

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for two descriptions of one place."""
        owner = self.owner.identity if isinstance(self.owner, Place) else id(self.owner)
        return self.kind, owner, type(self.key), self.key

    @property
    def root(self) -> Any:
        """The object, cell or table of globals that the place is in."""
        return self.owner.root if isinstance(self.owner, Place) else self.owner

    def at(self, root: Any, text: str) -> Place:
        """The same place in another object."""
        if isinstance(self.owner, Place):
            owner = self.owner.at(root, text)
            return Place(self.kind, owner, self.key, f"{owner.text}[{self.key!r}]")
        return Place(self.kind, root, self.key, f"{text}.{self.key}")

    def read(self) -> Any:
        """The value now, or ``MISSING``."""
        if self.kind == "attribute":
            return attributes_of(self.owner).get(self.key, MISSING)
        if self.kind == "global":
            return self.owner.get(self.key, MISSING)
        try:
            if self.kind == "slot":
                return object.__getattribute__(self.owner, self.key)
            if self.kind == "cell":
                return self.owner.cell_contents
            container = self.owner.read()
            return entries_of(container) if self.kind == "size" else raw_item(container, self.key)
        except (AttributeError, ValueError, LookupError, TypeError):
            return MISSING

    def write(self, value: Any) -> None:
        """Put ``value`` there; ``MISSING`` takes away what is there."""
        if self.kind == "global":
            self.owner.pop(self.key, None) if value is MISSING else self.owner.__setitem__(self.key, value)
        elif self.kind == "cell":
            self.owner.cell_contents = value
        elif self.kind == "items":
            self.owner.read()[:] = value
        elif self.kind == "item":
            _write_item(self.owner.read(), self.key, value)
        elif self.kind == "slot" or not isinstance(attributes_of(self.owner), dict):
            delattr(self.owner, self.key) if value is MISSING else setattr(self.owner, self.key, value)
        elif value is MISSING:
            attributes_of(self.owner).pop(self.key, None)
        else:
            attributes_of(self.owner)[self.key] = value


def item_of(container: Place, key: Any) -> Place:
    """Where a container keeps one of its entries."""
    return Place("item", container, key, f"{container.text}[{key!r}]")


def attributes_of(owner: Any) -> Any:
    """The dict of an object's own attributes, without asking its class; empty for one that has none."""
    if isinstance(owner, type):
        return vars(owner)
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}


def raw_item(container: Any, key: Any) -> Any:
    """An entry of a dict or a list, whatever its class makes of reading one."""
    return dict.__getitem__(container, key) if isinstance(container, dict) else list.__getitem__(container, key)


def entries_of(container: Any) -> Any:
    """The keys of a dict in their order, or the length of a list."""
    return tuple(dict.keys(container)) if isinstance(container, dict) else list.__len__(container)


def _write_item(container: Any, key: Any, value: Any) -> None:
    if value is MISSING:
        container.pop(key, None)
    elif isinstance(container, dict):
        dict.__setitem__(container, key, value)
    else:
        container[key] = value
