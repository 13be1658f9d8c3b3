"""What a step gives to hooks and is a total over its rows: they join that over ranks, each of which must have its own.

A captured step computes on the rows of all ranks. A mean is then the mean, but a sum is that of all of them on every
rank: hooks that join it with ``all_gather``, ``sync_dist`` or ``torch.distributed`` would count each row once per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_autoparallel.capture.growth import Call, Recording, growths
from lightning_autoparallel.capture.growth_rules import ZERO, Growth, is_view
from lightning_autoparallel.capture.places import Place
from lightning_autoparallel.capture.reads import StateReads
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.tree import tree_leaves

_COPIES = "copy_"
_NEARLY_TWICE = 1.5
_ADDS = ("add", "sub", "index_add", "scatter_add", "index_put")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A tensor or a number that a step gives: what it is, and where it is given."""

    what: str
    value: Any
    line: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a step, on as many rows as there are or twice as many."""

    calls: Sequence[Call]
    loss: Tensor | None
    shown: Sequence[Shown]
    entered: str  # the line where it began


def recorded(run: Callable[[], tuple[Tensor | None, Sequence[Shown], str]]) -> Run:
    """What ``run`` gives, which is the loss, what is shown and where it began, with the calls that make it."""
    with Recording() as recording:
        loss, shown, entered = run()
    return Run(calls=recording.calls, loss=loss, shown=shown, entered=entered)


def check_shown(name: str, once: Run, twice: Run, buffers: Mapping[str, Tensor], reads: StateReads) -> None:
    """Hooks see what the step ``name`` shows; ``buffers`` are those of the first run.

    Raises:
        CaptureError: a total over rows is among it, or rows that are not one for one in a dim (flattened ones, say).
    """
    if len(once.shown) != len(twice.shown):
        raise _refused(name, once.entered, "as many values as there are rows")
    sums = dict(_running_sums(once.calls, buffers))
    values = [(one.value, other.value) for one, other in zip(once.shown, twice.shown, strict=True)]
    found = growths(once.calls, twice.calls, [*values, *((sum_, sum_) for sum_ in sums.values())], _kept(sums, reads))
    for shown, growth, (value, grown) in zip(once.shown, found, values, strict=False):
        if _grows(growth) or _is_larger(value, grown):
            raise _refused(name, shown.line, shown.what)
        if isinstance(value, Tensor) and isinstance(grown, Tensor) and value.shape != grown.shape:
            raise CaptureError(
                f"{shown.line}: {name} gives rows to hooks in a tensor of shape {list(value.shape)} ({shown.what}), no "
                "dim of which is the batch: a captured step could give each rank those of all ranks only; one dim of "
                "one row each could be cut (predictions[i] for row i)"
            )
    for buffer, growth in zip(sums, found[len(values) :], strict=True):
        if _grows(growth):
            raise _refused(name, once.entered, f"buffer {buffer}")


def changes_buffers(buffers: Collection[int], changed: Collection[int], reads: StateReads) -> bool:
    """Whether the step's own lines change a buffer: one of the inputs at these places, or one that is assigned."""
    assigned = (written.place for written in reads.written.values() if isinstance(written.place.owner, nn.Module))
    return bool(set(buffers) & set(changed)) or any(place.key in place.owner._buffers for place in assigned)


def _running_sums(calls: Sequence[Call], buffers: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Buffers that the step adds to and uses in no other way: it keeps them for others."""
    buffer_of = {id(buffer): name for name, buffer in buffers.items()}  # views of it, too
    uses: dict[str, list[str]] = {name: [] for name in buffers}
    assigned: dict[str, int] = {}  # what becomes the buffer, by identity
    used: set[int] = set()
    for call in calls:
        name, given = call.operator.__name__, tree_leaves((call.args, call.kwargs))
        if name.startswith(_COPIES) and id(given[0]) in buffer_of:
            assigned[buffer_of[id(given[0])]] = id(given[1])
            continue
        if is_view(call.operator):
            if id(given[0]) in buffer_of:
                buffer_of |= {id(view): buffer_of[id(given[0])] for view in tree_leaves(call.result)}
            continue
        used |= {id(leaf) for leaf in given}
        for leaf in given:
            if id(leaf) in buffer_of:
                uses[buffer_of[id(leaf)]].append(name)
    for name, calls_of in uses.items():
        if len(calls_of) == 1 and calls_of[0].startswith(_ADDS) and assigned.get(name) not in used:
            yield name, buffers[name]


def _kept(sums: Mapping[str, Tensor], reads: StateReads) -> set[int]:
    """Tensors that the step finds where it leaves others."""
    places: list[tuple[Tensor, Place | None]] = list(reads.tensors.values())
    written = {id(tensor) for tensor, place in places if place is not None and place.identity in reads.written}
    return written | {id(tensor) for tensor in sums.values()}


def _grows(growth: Growth) -> bool:
    return growth not in (None, ZERO, 0.0)


def _is_larger(value: Any, grown: Any) -> bool:
    """Of a number that is no multiple: a count and something else."""
    are_numbers = all(type(each) in (int, float) for each in (value, grown))
    return are_numbers and 0 < _NEARLY_TWICE * value < grown


def _refused(name: str, line: str, what: str) -> CaptureError:
    return CaptureError(
        f"{line}: {name} gives a total over its rows to hooks ({what}), which may join those of ranks (all_gather, "
        "sync_dist): a captured step has that of all ranks' rows, where each rank's own is to be joined"
    )
