"""Hooks as Lightning calls them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from lightning_autoparallel.lightning_compat import trainer_calls

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def around_hooks(context: Context) -> Iterator[None]:
    """While open, the hooks ``on_...`` of LightningModules and callbacks run inside of ``context()``."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            with context() if hook_name.startswith("on_") else contextlib.nullcontext():
                return original(trainer, hook_name, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("_call_lightning_module_hook", "_call_callback_hooks"):
            stack.enter_context(mock.patch.object(trainer_calls, name, wrapped(getattr(trainer_calls, name))))
        yield
