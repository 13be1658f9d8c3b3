"""Hooks as Lightning calls them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from lightning_autoparallel.lightning_compat import trainer_calls

_BY_NAME = ("_call_lightning_module_hook", "_call_callback_hooks")
_OF_STEPS = ("optimizer_step", "lr_scheduler_step")
Context = Callable[[str], contextlib.AbstractContextManager[Any]]  # of a hook's name


@contextlib.contextmanager
def around_hooks(context: Context) -> Iterator[None]:
    """While open, the hooks ``on_...`` of LightningModules and callbacks run inside of ``context(name)``, and theirs
    that step optimizers and schedulers."""

    def by_name(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            is_hook = hook_name.startswith("on_") or hook_name in _OF_STEPS
            with context(hook_name) if is_hook else contextlib.nullcontext():
                return original(trainer, hook_name, *args, **kwargs)

        return call

    def of_checkpoints(original: Callable[..., Any], hook_name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with context(hook_name):
                return original(*args, **kwargs)

        return call

    others = {f"_call_callbacks_{hook}": hook for hook in ("on_save_checkpoint", "on_load_checkpoint")}
    with _calls_by_name(by_name) as stack:
        for name, hook in others.items():
            around = of_checkpoints(getattr(trainer_calls, name), hook)
            stack.enter_context(mock.patch.object(trainer_calls, name, around))
        yield


@contextlib.contextmanager
def hooks_where(runs: Callable[[str, tuple[Any, ...]], bool]) -> Iterator[None]:
    """While open, hooks of LightningModules and callbacks run only where ``runs(name, args)``."""

    def by_name(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
            return original(trainer, hook_name, *args, **kwargs) if runs(hook_name, args) else None

        return call

    with _calls_by_name(by_name):
        yield


@contextlib.contextmanager
def _calls_by_name(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        for name in _BY_NAME:
            stack.enter_context(mock.patch.object(trainer_calls, name, around(getattr(trainer_calls, name))))
        yield stack
