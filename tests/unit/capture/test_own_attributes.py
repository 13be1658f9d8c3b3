"""A module's ``__dict__`` as a step sees it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_autoparallel.capture.own_attributes import OwnAttributes
from lightning_autoparallel.capture.places import MISSING, Place


class Told:
    """Notes what is read, and gives it doubled."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def note(self, place: Place, value: Any) -> Any:
        assert place.read() is value
        self.reads.append(place.text)
        return value if value is MISSING else value * 2

    def all_at_once(self, text: str) -> Exception:
        return RuntimeError(f"all of {text}")


def seen() -> tuple[OwnAttributes, Told]:
    module, told = nn.Linear(2, 2), Told()
    module.scale = 3
    return OwnAttributes(module, "self.net", told), told


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


@pytest.mark.parametrize(
    "use",
    [
        lambda attributes: list(attributes),
        lambda attributes: dict(attributes),
        lambda attributes: {**attributes},
        len,
        lambda attributes: attributes.items(),
        lambda attributes: attributes.update(a=1),
        lambda attributes: attributes.__setitem__("a", 1),
        lambda attributes: attributes == {},
    ],
)
def test_all_of_them_are_refused(use) -> None:
    attributes, _ = seen()
    with pytest.raises(RuntimeError, match=r"all of self\.net"):
        use(attributes)
