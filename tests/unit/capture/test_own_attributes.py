"""A module's ``__dict__`` where a step asks it for one name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from torch import nn

from lightning_autoparallel.capture.own_attributes import OwnAttributes, asks_for_one
from lightning_autoparallel.capture.places import MISSING, Place


class Told:
    """Notes what is read, and gives it doubled."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def note(self, place: Place, value: Any) -> Any:
        assert place.read() is value
        self.reads.append(place.text)
        return value if value is MISSING else value * 2


def seen() -> tuple[OwnAttributes, Told]:
    module, told = nn.Linear(2, 2), Told()
    module.scale = 3
    return OwnAttributes(module, "self.net", told.note), told


def test_a_name_reads_that_attribute() -> None:
    attributes, told = seen()
    assert attributes["scale"] == 6
    assert attributes.get("scale") == 6
    assert "scale" in attributes
    assert told.reads == ["self.net.scale"] * 3


def test_what_is_missing_is_read_too() -> None:
    attributes, told = seen()
    assert attributes.get("other", 7) == 7
    assert "other" not in attributes
    with pytest.raises(KeyError, match="other"):
        attributes["other"]
    assert told.reads == ["self.net.other"] * 3


class Asked:
    """Says of each reading of ``__dict__`` whether it asks for one entry."""

    def __init__(self) -> None:
        object.__setattr__(self, "said", [])
        self.a = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            frame: FrameType = sys._getframe(1)
            object.__getattribute__(self, "said").append(asks_for_one(frame))
        return object.__getattribute__(self, name)


def kept_get(asked: Asked) -> Any:
    get = asked.__dict__.get
    return get("a")


@pytest.mark.parametrize(
    ("use", "is_one"),
    [
        (lambda asked: "a" in asked.__dict__, True),
        (lambda asked: "b" not in asked.__dict__, True),
        (lambda asked: asked.__dict__["a"], True),
        (lambda asked, name="a": asked.__dict__[name], True),
        (lambda asked: asked.__dict__.get("a"), True),
        (lambda asked: asked.__dict__.get("b", asked.a), True),
        (lambda asked: vars(asked)["a"], False),
        (lambda asked: asked.__dict__, False),
        (lambda asked: list(asked.__dict__), False),
        (lambda asked: {**asked.__dict__}, False),
        (lambda asked: asked.__dict__.items(), False),
        (lambda asked: asked.__dict__.update(a=2), False),
        (lambda asked: asked.__dict__.__setitem__("a", 2), False),
        (lambda asked: isinstance(asked.__dict__, dict), False),
        (lambda asked: list(map(asked.__dict__.get, ["a"])), False),
        (lambda asked: asked.__dict__ == {}, False),
        (lambda asked: [name for name in asked.__dict__], False),  # noqa: C416
        (kept_get, False),
    ],
)
def test_only_what_asks_for_one_entry_at_once(use: Callable[[Asked], Any], is_one: bool) -> None:
    asked = Asked()
    use(asked)
    assert asked.said == [is_one]


def test_setting_an_entry_asks_for_none() -> None:
    asked = Asked()
    asked.__dict__["b"] = 2
    del asked.__dict__["b"]
    assert asked.said == [False, False]
