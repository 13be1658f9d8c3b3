"""Numbers outside of the batch that are one rank's rows (``self.batch_size``): a captured step has the rows of all.

Divided by such a number a sum is as many times too large as there are ranks, and a loop over so many rows leaves those
of other ranks out. So the step runs once more with the rows of all ranks in its place: it may compute nothing else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_autoparallel.capture.growth import Call
from lightning_autoparallel.capture.kept_totals import Run
from lightning_autoparallel.capture.places import Place, item_of
from lightning_autoparallel.capture.plain import Frozen
from lightning_autoparallel.capture.reads import StateReads
from lightning_autoparallel.capture.state import StepState
from lightning_autoparallel.capture.watch import StartOver
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.constants import number_of
from lightning_autoparallel.torch_compat.tracing import is_real
from lightning_autoparallel.torch_compat.tree import tree_flatten

_PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SIZES = re.compile(r"batch_?size$|^bsz?$|_bsz?$", re.IGNORECASE)  # of one row, which many numbers equal
_OF_BATCHES = re.compile(r"batch(?!es|_?idx|_?index)|^bsz?$|_bsz?$", re.IGNORECASE)  # names of numbers


@dataclass(frozen=True, kw_only=True)
class OwnRows:
    """A number that is one rank's rows: where it is kept, and the line that read it."""

    place: Place
    value: float
    line: str


def own_rows_read(rows: Collection[int], reads: StateReads) -> list[OwnRows]:
    """Numbers of a batch, by their names, that the step reads outside of it and that are among ``rows``."""
    found = [(read.line, *each) for read in list(reads.reads.values()) for each in _numbers(read.place, read.frozen)]
    return [
        OwnRows(place=place, value=value, line=line)
        for line, place, value in found
        if value in rows and (_OF_BATCHES if value > 1 else _SIZES).search(str(place.key))
    ]


def _numbers(place: Place, frozen: Frozen) -> Iterator[tuple[Place, float]]:
    """Those there, also in dicts (``hparams``)."""
    if type(frozen.value) in (int, float):
        yield place, frozen.value
    elif frozen.parts is not None and isinstance(frozen.value, dict):
        for key, part in frozen.parts.items():
            is_attribute = isinstance(key, tuple)  # of a dict of a class of its own
            of_dict = Place("attribute", frozen.value, key[-1], f"{place.text}.{key[-1]}") if is_attribute else None
            yield from _numbers(of_dict or item_of(place, key), part)


def with_rows_of_all(own: Sequence[OwnRows], shards: int, state: StepState, run: Callable[[], Run]) -> Run | None:
    """What ``run`` gives where these numbers are those of all ``shards``; None if it fails, or they cannot be set."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(state.reads, reads={}, tensors={}))  # it reads as if for the first time
        stack.enter_context(state.watcher.apart())
        try:
            for read in own:
                before = read.place.read()
                read.place.write(read.value * shards)
                stack.callback(read.place.write, before)
            return run()
        except (StartOver, Exception):  # so many rows are not there, say: whatever it is, the number counts
            return None


def check_own_rows(name: str, once: Run, of_all: Run | None, own: Sequence[OwnRows]) -> None:
    """The numbers do not count, but for what is logged beside them.

    Raises:
        CaptureError: they do.
    """
    if of_all is not None and _told(once.calls) == _told(of_all.calls):
        return
    read = own[0]
    raise CaptureError(
        f"{read.line} reads {read.place.text}, which is {read.value} like the rows of one rank, and {name} "
        "would compute something else by it for the rows of all ranks, which a captured step computes on; a mean, or "
        "len(batch), is right on any number of them"
    )


def _told(calls: Sequence[Call]) -> list[Any]:
    """What is called on what, values of tensors apart but for those of single numbers."""
    told = []
    for call in calls:
        leaves, spec = tree_flatten((call.args, call.kwargs))
        told.append((str(call.operator), str(spec), list(map(_leaf, leaves))))
    return told


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and is_real(value)
        return tuple(value.shape), repr(number_of(value)) if is_number else None
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
