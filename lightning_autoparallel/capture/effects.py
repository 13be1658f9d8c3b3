"""Python side effects of a step: recorded once, undone after each run."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

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
def undone_afterwards(module: nn.Module, changes: list[str]) -> Iterator[None]:
    """Restore every submodule's attributes and their containers on exit; name those that grew in ``changes``.

    An attribute that a step fills as a cache is filled again by the next run. A container that grows (outputs kept for
    the end of the epoch) would stay empty at real steps, so the caller is told.
    """
    submodules = list(module.modules())
    attributes = [dict(vars(submodule)) for submodule in submodules]
    containers = [
        {name: _snapshot(value) for name, value in saved.items() if isinstance(value, _CONTAINERS)}
        for saved in attributes
    ]
    random_state = random.getstate()
    try:
        yield
    finally:
        if random.getstate() != random_state:
            changes.append("draws from Python's random")
            random.setstate(random_state)
        names = [name for name, _ in module.named_modules()]
        for name, submodule, saved, copies in zip(names, submodules, attributes, containers, strict=True):
            _note_growth(name, submodule, copies, changes)
            _restore(submodule, saved, copies)


def _note_growth(path: str, submodule: nn.Module, copies: dict[str, Any], changes: list[str]) -> None:
    for name, before in copies.items():
        now = vars(submodule).get(name)
        if not name.startswith("_") and isinstance(now, (list, set)) and len(now) > len(before):
            changes.append(f"appends to self.{path + '.' if path else ''}{name}")


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
        name == other and value is old for (name, value), (other, old) in zip(*items, strict=True)
    )
