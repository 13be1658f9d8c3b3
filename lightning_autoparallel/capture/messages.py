"""Warnings and log records of a step's Python: held back while it is captured, given at each real step."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any
from unittest import mock

from torch import Tensor

from lightning_autoparallel.capture.leaf_stand_ins import Unread
from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.capture.watch import Watcher, evaluated
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_map

_Key = tuple[str, str]
_Say = Callable[[Mapping[str, Any]], None]


@dataclass
class Messages:
    """What the last run said; ``finish`` once all runs are over, ``replay`` at each real step."""

    watcher: Watcher
    _last: dict[_Key, list[_Say]] = field(default_factory=dict)
    _earlier: dict[_Key, list[_Say]] = field(default_factory=dict)
    _shown: dict[Any, Any] = field(default_factory=dict)  # where warnings keep what was shown already

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """One run of the step: nobody hears what it says."""
        self._earlier, self._last = {**self._earlier, **self._last}, {}
        real, thread = logging.Logger.handle, get_ident()

        def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            real(logger, record) if get_ident() != thread else self._record(real, logger, record)

        with warnings.catch_warnings(record=True) as caught, mock.patch.object(logging.Logger, "handle", handle):
            yield
        for warning in caught:
            self._add((warning.category.__name__, str(warning.message)), self._again(warning))

    def count(self) -> int:
        """How many log records the run has made so far."""
        return sum(map(len, self._last.values()))

    def finish(self) -> None:
        """What only an earlier run has said is said once in a process: now."""
        for key, said in self._earlier.items():
            if key not in self._last:
                said[0](self.watcher.counters)
        self._earlier = {}

    def replay(self, numbers: Mapping[str, Any]) -> None:
        """Say it with the numbers of a real step."""
        for said in self._last.values():
            for say in said:
                say(numbers)

    def _add(self, key: _Key, say: _Say) -> None:
        self._last.setdefault(key, []).append(say)

    def _again(self, warning: warnings.WarningMessage) -> _Say:
        def say(numbers: Mapping[str, Any]) -> None:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno, registry=self._shown
            )

        return say

    def _record(self, real: Any, logger: logging.Logger, record: logging.LogRecord) -> None:
        said = (record.msg, record.args)
        if any(isinstance(leaf, (Tensor, Unread)) for leaf in tree_flatten(said)[0]):
            raise self.watcher.refuse(f"{user_line()} writes a tensor, or a leaf of the batch, into a log record")

        def say(numbers: Mapping[str, Any]) -> None:
            message, arguments = tree_map(lambda leaf: evaluated(leaf, numbers), said)
            now = logging.makeLogRecord({})
            times = {name: getattr(now, name) for name in ("created", "msecs", "relativeCreated")}
            real(logger, logging.makeLogRecord({**vars(record), "msg": message, "args": arguments, **times}))

        self._add((logger.name, str(record.msg)), say)
