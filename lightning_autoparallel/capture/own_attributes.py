"""A module's ``__dict__`` as a step sees it: asked for one name, it is that attribute; it is not given whole."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_autoparallel.capture.places import MISSING, Place, attributes_of


class Reader(Protocol):
    """Who is told of what is read."""

    def note(self, place: Place, value: Any) -> Any: ...
    def all_at_once(self, text: str) -> Exception: ...


class OwnAttributes:
    """Of one ``owner``, found at ``text``: ``in``, ``[]`` and ``get`` read the attribute that they name.

    Everything else that a dict has is refused.
    """

    def __init__(self, owner: Any, text: str, reader: Reader) -> None:
        self._owner, self._text, self._reader = owner, text, reader

    def _one(self, name: Any) -> Any:
        value = attributes_of(self._owner).get(name, MISSING)
        return self._reader.note(Place("attribute", self._owner, name, f"{self._text}.{name}"), value)

    def __contains__(self, name: Any) -> bool:
        return self._one(name) is not MISSING

    def __getitem__(self, name: Any) -> Any:
        found = self._one(name)
        if found is MISSING:
            raise KeyError(name)
        return found

    def get(self, name: Any, default: Any = None) -> Any:
        """The attribute; only this one is read."""
        found = self._one(name)
        return default if found is MISSING else found

    def __getattr__(self, name: str) -> Any:
        raise self._reader.all_at_once(self._text)

    def _refuse(self, *_: Any) -> Any:
        raise self._reader.all_at_once(self._text)

    __iter__ = __len__ = __setitem__ = __delitem__ = __or__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]
