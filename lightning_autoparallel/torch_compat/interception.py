"""Calls of modules, seen by somebody else before they happen; and torch calls that no mode sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

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
