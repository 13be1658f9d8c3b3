"""What runs as soon as an optimizer has updated, before anybody else looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def first_after_update(optimizer: Optimizer, run: Callable[[], None]) -> RemovableHandle:
    """``run`` after each step, ahead of all other hooks of it, until the handle is removed."""
    handle = optimizer.register_step_post_hook(lambda *_: run())
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    hooks.move_to_end(handle.id, last=False)
    return handle
