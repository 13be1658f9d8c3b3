"""Parameters that Python code keeps by itself: in attributes of modules and callbacks, and in containers there.

A list of parameters made in ``__init__`` holds those that were shared out afterwards: what is done to them, to freeze
or clip or clamp them, would be done to nothing that trains. A plain parameter cannot become a DTensor in place, whose
class has slots of its own, so that who holds one is looked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autoparallel.apply.params import Replacements

_DEPTH = 8  # of containers and objects in each other
_LIBRARIES = {"builtins", "lightning", "lightning_autoparallel", "lightning_fabric", "pytorch_lightning", "torch"}
_NO_HOLDERS = (str, bytes, int, float, type, type(None), FunctionType, MethodType, ModuleType, Optimizer)


def rebind_held(holders: Iterable[object], replacements: Replacements) -> None:
    """Put what is in the module now where attributes of ``holders`` have what was there before.

    So it is in lists, tuples, dicts, sets and objects of the user's own classes there, and in these again. Optimizers,
    which keep state of theirs, are left to ``rebind``.
    """
    pairs = list(replacements.living())
    if pairs:
        walk = _Walk({id(before): now for before, now in pairs})
        for holder in holders:
            walk.attributes(holder, _DEPTH)


class _Walk:
    """Through what holds parameters; ``now`` has what took their places, by their identities, and they are alive."""

    def __init__(self, now: dict[int, nn.Parameter]) -> None:
        self._now = now
        self._seen: dict[int, tuple[object, int]] = {}  # alive, so that nothing else gets its identity

    def attributes(self, owner: object, depth: int) -> None:
        """Of one object; nothing of its class is asked."""
        if self._is_new(owner, depth):
            own = vars(owner)
            for name, value in list(own.items()):
                found = self.followed(value, depth)
                if found is not value:
                    own[name] = found

    def followed(self, value: Any, depth: int) -> Any:
        """``value`` itself, changed in place, or what stands in its place."""
        if isinstance(value, Tensor):
            return self._now.get(id(value), value)
        if depth == 0 or isinstance(value, _NO_HOLDERS):
            return value
        if isinstance(value, (tuple, frozenset)):
            return self._made_anew(value, depth - 1)
        if isinstance(value, (list, deque, dict, set)):
            if self._is_new(value, depth):
                self._change(value, depth - 1)
        elif _is_looked_into(value):
            self.attributes(value, depth - 1)
        return value

    def _made_anew(self, value: Any, depth: int) -> Any:
        found, is_changed = self._all(value, depth)
        if not is_changed:
            return value
        return value._make(found) if hasattr(value, "_make") else type(value)(found)

    def _change(self, value: Any, depth: int) -> None:
        items, are_items_changed = self._all(value.values() if isinstance(value, dict) else value, depth)
        if isinstance(value, dict):
            keys, are_keys_changed = self._all(value, depth)
            if are_items_changed or are_keys_changed:
                value.clear()  # keys stay in order
                value.update(zip(keys, items, strict=True))
        elif are_items_changed and isinstance(value, set):
            value.clear()
            value.update(items)
        elif are_items_changed:
            for i, item in enumerate(items):
                value[i] = item

    def _all(self, values: Iterable[Any], depth: int) -> tuple[list[Any], bool]:
        before = list(values)
        found = [self.followed(value, depth) for value in before]
        return found, any(one is not other for one, other in zip(before, found, strict=True))

    def _is_new(self, value: object, depth: int) -> bool:
        known = self._seen.get(id(value))
        if known is not None and known[1] >= depth:
            return False
        self._seen[id(value)] = value, depth
        return True


def _is_looked_into(value: object) -> bool:
    """Whether it is an object of a class that a user may have written, or a module that nothing else leads to."""
    is_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    own = getattr(value, "__dict__", None) if isinstance(value, nn.Module) or not is_library else None
    return isinstance(own, dict) and "param_groups" not in own
