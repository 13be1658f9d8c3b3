"""Python side effects of a step: recorded once, undone after each run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_autoparallel.capture.plain import same_key

_CONTAINERS = (list, dict, set)


class StepEffects(Protocol):
    """What a caller wants to notice while the step runs; it must forget an earlier run when a new one starts."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Entered around each run of the step."""

    def tensors(self) -> list[Tensor]:
        """The tensors that the last run's effects need at replay; they become graph outputs."""

    def count(self) -> int:
        """How many effects the run has had so far, those that take no tensor included."""


class NoEffects:
    """For steps without Lightning around them."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is recorded."""
        return contextlib.nullcontext()

    def tensors(self) -> list[Tensor]:
        """No effect needs a tensor."""
        return []

    def count(self) -> int:
        """None is noticed."""
        return 0


@contextlib.contextmanager
def undone_afterwards(module: nn.Module) -> Iterator[None]:
    """Restore every submodule's attributes and their containers on exit: the next run begins as this one did."""
    submodules = list(module.modules())
    attributes = [dict(vars(submodule)) for submodule in submodules]
    containers = [
        {name: _snapshot(value) for name, value in saved.items() if isinstance(value, _CONTAINERS)}
        for saved in attributes
    ]
    try:
        yield
    finally:
        for submodule, saved, copies in zip(submodules, attributes, containers, strict=True):
            _restore(submodule, saved, copies)


def _restore(submodule: nn.Module, saved: dict[str, Any], copies: dict[str, Any]) -> None:
    vars(submodule).clear()
    vars(submodule).update(saved)
    for name, before in copies.items():
        _refill(vars(submodule)[name], before)


def _snapshot(container: Any) -> Any:
    """What is in a container, in one of the plain kind: a class of the user's may copy, or refuse to, as it likes."""
    return next(kind for kind in _CONTAINERS if isinstance(container, kind))(container)


def _refill(container: Any, before: Any) -> None:
    if _unchanged(container, before):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(before)
    else:
        container.update(before)


def _unchanged(container: Any, before: Any) -> bool:
    now = _snapshot(container)
    if isinstance(now, set):
        return bool(now == before)
    items = [[*kept.items()] if isinstance(kept, dict) else [*enumerate(kept)] for kept in (now, before)]
    return len(items[0]) == len(items[1]) and all(
        same_key(name, other) and value is old for (name, value), (other, old) in zip(*items, strict=True)
    )
