"""What ``plan --explain`` prints: what was taken, what else there was, and what that would cost."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autoparallel.callbacks.predictions import format_time
from lightning_autoparallel.contracts import Explained, Explanation, OtherWay
from lightning_autoparallel.cost.sizes import format_bytes

_SAME_US = 0.05


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """An explanation for reading."""
    yield f"Why what {explanation.pattern!r} matches is placed so, {explanation.note}"
    for explained in explanation.choices:
        taken, *others = choice_lines(explained)
        yield f"  {taken}"
        yield from (f"    {other}" for other in others)


def choice_lines(explained: Explained) -> Iterator[str]:
    """What was taken, then a line for each of what else there was."""
    count = f" ({explained.count} alike)" if explained.count > 1 else ""
    note = f"; {explained.note}" if explained.note else ""
    yield f"{explained.what}{count}: {explained.taken}{note}"
    for other in explained.others:
        yield f"{other.way}: {_cost(other)}"
    if explained.further:
        yield f"{explained.further} more, none of them cheaper or possible"
    if explained.unsolved:
        yield f"{explained.unsolved} more, not looked at: cut off"


def _cost(other: OtherWay) -> str:
    if other.ruled_out:
        return f"ruled out: {other.ruled_out}"
    size = round(other.more_bytes)
    kept = f"{format_bytes(abs(size))} {'more' if size > 0 else 'less'} kept" if size else "as many bytes kept"
    if abs(other.more_us) < _SAME_US:
        return f"the same time, {kept}" if size else "the same"
    if other.more_us < 0:
        why = "as the solver reckons, not behind the passes" if other.proved else "which the solver's gap allows"
        return f"{format_time(-other.more_us)} less, {why}, {kept}"
    bound = "" if other.proved else "at most "
    return f"{bound}{format_time(other.more_us)} more, {kept}"
