"""Containers that a run of the step has changed: content that is put back, and tables in which libraries remember."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_autoparallel.capture.plain import Freezer, Frozen, TooLargeError, contents
from lightning_autoparallel.capture.sources import is_installed
from lightning_autoparallel.errors import CaptureError

if TYPE_CHECKING:
    from lightning_autoparallel.capture.reads import Read


def restore_containers(reads: dict[Any, Read], meet: Callable[[Any, str], None]) -> str | None:
    """Give containers that a run changed in place their content again; the text of the first one.

    A table of a library keeps what the first run has added: the next runs tell whether they find it and are content.
    """
    found = None
    for identity, read in list(reads.items()):
        if read.frozen.parts is None or type(read.frozen.value) in (tuple, frozenset):
            continue
        if replace(read.frozen, grows=False).difference(read.frozen.value) is None:
            continue
        remembered = _remembered(read, meet)
        if remembered is not None:
            reads[identity] = replace(read, frozen=remembered)
        else:
            found = found or read.place.text
            read.frozen.restore()
    return found


def _remembered(read: Read, meet: Callable[[Any, str], None]) -> Frozen | None:
    """A table of a library's as it is now, if all that the run did was to add entries that hold no tensors.

    Once only, or a count of runs would be taken for it; but for classes: other runs compute with tensors of other ones.
    """
    frozen, place = read.frozen, read.place
    if place.kind != "global" or frozen.kind is not dict or not is_installed(place.owner.get("__file__") or ""):
        return None
    known, now = frozen.parts or {}, contents(frozen.value) or {}
    if any(isinstance(key, Tensor) for key in now) or replace(frozen, grows=True).difference(frozen.value) is not None:
        return None
    if frozen.grows and not all(isinstance(key, type) for key in now.keys() - known.keys()):
        return None
    try:
        after = Freezer(meet).freeze(frozen.value, place.text)
    except (TooLargeError, CaptureError):  # what else the run has changed is put back all the same
        return None
    return None if _holds_tensors(after) else replace(after, grows=True)


def _holds_tensors(frozen: Frozen) -> bool:
    """Whether a value, or one in it, is a tensor or a number of the run."""
    is_one = frozen.kind is object or isinstance(frozen.value, Tensor)
    return is_one or any(map(_holds_tensors, (frozen.parts or {}).values()))
