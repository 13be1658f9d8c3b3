"""Calls of modules and of functions with a backward of their own, seen by somebody else before they happen; and torch
calls that no mode sees.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._functorch import utils as functorch_utils
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import BackwardCFunction
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import BackwardHook

Original = Callable[..., Any]
Handler = Callable[[Original, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


@contextlib.contextmanager
def intercepted_calls(handle: Handler) -> Iterator[None]:
    """While open, ``module(*args, **kwargs)`` is ``handle(original, module, args, kwargs)``.

    The class is patched, not the modules: attributes of theirs would be seen by whoever copies, saves or compares them.
    """
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handle(original, module, args, kwargs)

    with mock.patch.object(nn.Module, "__call__", call):
        yield


_OF_SHARDS = ("torch.distributed.", "lightning_autoparallel.")  # whose functions know what DTensors are
_REGIONS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")  # 2.14, 2.13
Prepare = Callable[[tuple[Any, ...]], tuple[Any, ...]]


@contextlib.contextmanager
def given_to_functions(prepare: Prepare) -> Iterator[None]:
    """While open, ``apply`` of a ``torch.autograd.Function`` is given ``prepare(args)``: no mode is asked of it.

    In torch 2.13 what ``apply`` itself calls is patched, as user code keeps ``apply`` by names of its own; in torch
    2.14 ``apply`` is all in C, and what has been kept of it before is not seen.
    """
    is_in_python = isinstance(torch.autograd.Function.__dict__["apply"], classmethod)
    with _within_apply(prepare) if is_in_python else _around_apply(prepare):
        yield


def _within_apply(prepare: Prepare) -> Any:
    original = functorch_utils.unwrap_dead_wrappers

    def prepared(args: tuple[Any, ...]) -> tuple[Any, ...]:
        of = sys._getframe(1).f_locals.get("cls")
        return original(prepare(args) if isinstance(of, type) and _is_users_function(of) else args)

    return mock.patch.object(functorch_utils, "unwrap_dead_wrappers", prepared)


def _around_apply(prepare: Prepare) -> Any:
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*(prepare(args) if _is_users_function(cls) else args), **kwargs)

    return mock.patch.object(torch.autograd.Function, "apply", classmethod(apply))


def _is_users_function(of: type[Any]) -> bool:
    return not of.__module__.startswith(_OF_SHARDS)


@contextlib.contextmanager
def wrapped_for_backwards(wrap: Callable[[Original], Original]) -> Iterator[None]:
    """While open, what a backward will call is ``wrap(function)``: regions of ``torch.utils.checkpoint``, of both
    kinds, and hooks of modules for gradients.
    """
    name = next(name for name in _REGIONS if hasattr(torch.utils.checkpoint, name))
    run_again, hooks = getattr(torch.utils.checkpoint, name), BackwardHook.__init__
    reentrant = torch.utils.checkpoint.CheckpointFunction

    def regions(function: Original, *args: Any, **kwargs: Any) -> Any:
        return run_again(wrap(function), *args, **kwargs)

    def apply(cls: type[Any], function: Original, *args: Any) -> Any:
        return super(reentrant, cls).apply(wrap(function), *args)  # type: ignore[misc]

    def of_module(self: Any, module: nn.Module, after: list[Original], before: list[Original]) -> None:
        hooks(self, module, list(map(wrap, after)), list(map(wrap, before)))

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.utils.checkpoint, name, regions))
        patches.enter_context(mock.patch.object(reentrant, "apply", classmethod(apply)))
        patches.enter_context(mock.patch.object(BackwardHook, "__init__", of_module))
        yield


def wrapped_backwards_of_functions(
    wrap: Callable[[Original, list[Tensor]], Original],
) -> contextlib.AbstractContextManager[Any]:
    """While open, the backward of a user's ``torch.autograd.Function`` is ``wrap(function, leaves)``: with those of the
    tensors that it was applied to that nothing has computed.
    """
    original = BackwardCFunction._get_user_fn

    def user_function(node: Any) -> Original:
        function = original(node)
        if node._forward_cls.__module__.startswith(("torch.", *_OF_SHARDS)):
            return function
        return wrap(function, [before.variable for before, _ in node.next_functions if hasattr(before, "variable")])

    return mock.patch.object(BackwardCFunction, "_get_user_fn", user_function)


def without_kept_parametrizations() -> contextlib.AbstractContextManager[Any]:
    """Inside ``parametrize.cached()``: parametrized values are computed anew, and nobody outside is given them."""
    return mock.patch.object(parametrize, "_cache", {})


def without_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, torch functions are called as they are, whatever modes are open."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def inside_of(mode: TorchFunctionMode) -> contextlib.AbstractContextManager[Any]:
    """Inside, torch functions ask the ``mode``, also in a function that itself was called by it."""
    return contextlib.nullcontext() if mode in _get_current_function_mode_stack() else mode


@contextlib.contextmanager
def without_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Inside, the open ``mode`` is not asked; those that were opened in it are."""
    if mode not in _get_current_function_mode_stack():  # it is of another thread
        yield
        return
    above: list[TorchFunctionMode] = []
    while (top := _pop_mode()) is not mode:
        above.insert(0, top)
    for each in above:
        _push_mode(each)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()
        for each in (mode, *above):
            _push_mode(each)


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work (``vmap``, ``grad``): tensors are wrapped then."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of ``torch.func`` has wrapped this tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def innermost(tensor: Tensor) -> Tensor:
    """What transforms of ``torch.func`` have wrapped, however often; a tensor that none has as it is."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def without_transforms() -> contextlib.AbstractContextManager[Any]:
    """Inside, no transform of ``torch.func`` is at work."""
    return temporarily_clear_interpreter_stack()  # type: ignore[no-any-return, no-untyped-call]
