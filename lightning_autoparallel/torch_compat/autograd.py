"""What autograd holds on to while a backward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_autoparallel.errors import CaptureError


def release_saved_tensors(ctx: Any) -> None:
    """Let go of what a custom function saved, before its backward returns; not under ``retain_graph=True``.

    Undocumented, but what AOTAutograd does: otherwise every saved tensor lives until the whole backward is done.
    """
    ctx.maybe_clear_saved_tensors()


@contextlib.contextmanager
def backwards_inside(around: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Each backward of an ``autograd.Function`` is run in ``around(its backward, or vjp)``."""

    def told(original: Any) -> Callable[..., Any]:
        def apply(self: Any, *gradients: Any) -> Any:
            cls = self._forward_cls
            has_vjp = cls.vjp is not torch.autograd.Function.vjp
            with around(cls.vjp if has_vjp else cls.backward):
                return original(self, *gradients)

        return apply

    with contextlib.ExitStack() as stack:
        for name in ("apply", "apply_boxed"):  # the second is of newer versions of torch
            if name in vars(BackwardCFunction):
                stack.enter_context(mock.patch.object(BackwardCFunction, name, told(vars(BackwardCFunction)[name])))
        yield


@dataclass(frozen=True)
class Attached:
    """What hangs on a parameter besides its values: attributes, and hooks of its gradient."""

    attributes: dict[str, Any]
    hooks: Any
    hooks_afterwards: Any

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Attached:
        """As it is now."""
        afterwards = getattr(parameter, "_post_accumulate_grad_hooks", None)
        return cls(dict(vars(parameter)), parameter._backward_hooks, afterwards)

    def put_on(self, parameter: nn.Parameter) -> None:
        """Hang it on the parameter in the place of the old one; handles of hooks still remove them."""
        new = {name: value for name, value in self.attributes.items() if name not in vars(parameter)}
        vars(parameter).update(new)
        if self.hooks:
            parameter._backward_hooks = self.hooks
        if self.hooks_afterwards:
            parameter._post_accumulate_grad_hooks = self.hooks_afterwards  # type: ignore[attr-defined]


Hook = Callable[..., Any]
_HAVE_DTYPES = hasattr(Tensor, "grad_dtype")
_REPLACED = "_autoparallel_replaced"  # on what stands in the place of a hook: that one, or None


@contextlib.contextmanager
def hooks_replaced(holders: Iterable[Tensor | Optimizer], replaced: Callable[[Hook], Hook]) -> Iterator[None]:
    """What was hung on gradients of tensors, or on steps of optimizers, is called as ``replaced`` has it; not twice so.

    What they hang up or take down meanwhile stays so.
    """

    def once(hook: Hook) -> Hook:
        return hook if hasattr(hook, _REPLACED) else replaced(hook)

    with _replaced([hooks for holder in holders for hooks in _hooks_of(holder)], once):
        yield


@contextlib.contextmanager
def _replaced(every: Iterable[Any], replaced: Callable[[Hook], Hook]) -> Iterator[None]:
    kept: list[tuple[Any, Any, Hook, Hook]] = []
    for hooks in every:
        for key, hook in list(hooks.items()):
            other = replaced(hook)
            if other is not hook:
                setattr(other, _REPLACED, getattr(hook, _REPLACED, hook))
            kept.append((hooks, key, hook, other))
            hooks[key] = other
    try:
        yield
    finally:
        for hooks, key, hook, other in reversed(kept):
            if hooks.get(key) is other:
                hooks[key] = hook


@contextlib.contextmanager
def gradients_held(parameters: Iterable[Tensor]) -> Iterator[dict[int, list[Tensor]]]:
    """No hook of these is called, and zeros are added to their gradients: what came is told, by ids of parameters."""
    held: dict[int, list[Tensor]] = {}
    with contextlib.ExitStack() as stack:
        for parameter in parameters:
            came = held.setdefault(id(parameter), [])

            def hold(gradient: Tensor, came: list[Tensor] = came) -> Tensor:
                came.append(gradient)
                return torch.zeros_like(gradient)

            setattr(hold, _REPLACED, None)
            stack.enter_context(_replaced(_hooks_of(parameter), lambda hook: lambda *args: None))
            stack.callback(parameter.register_hook(hold).remove)  # type: ignore[no-untyped-call]
        yield held


def _hooks_of(holder: Tensor | Optimizer) -> list[Any]:
    if isinstance(holder, Optimizer):
        own = [holder._optimizer_step_pre_hooks, holder._optimizer_step_post_hooks]
        return [hooks for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks) if hooks]
    afterwards = getattr(holder, "_post_accumulate_grad_hooks", None)
    return [hooks for hooks in (holder._backward_hooks, afterwards) if hooks]


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody is to be given its gradient as it comes."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


@contextlib.contextmanager
def hooked_as(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, gradients of the second of two tensors go through what was hung on the first, as they come."""
    with contextlib.ExitStack() as stack:
        for parameter, leaf in pairs:
            for hook in [getattr(hook, _REPLACED, hook) for hook in (parameter._backward_hooks or {}).values()]:
                if hook is not None:
                    stack.callback(leaf.register_hook(hook).remove)  # type: ignore[no-untyped-call]
        yield


def will_accumulate(node: Any, parameter: Tensor) -> bool:
    """Whether the backward under way will have ``node``, which gradients go to, add to the gradient of ``parameter``.

    Not where ``autograd.grad`` was asked for gradients, or ``backward`` for those of other inputs alone.
    """
    if getattr(node, "variable", None) is not parameter:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad is to give a leaf's
        return False


def dtype_of_gradient(parameter: Tensor) -> torch.dtype | None:
    """What autograd makes of its gradients; None for whatever they are. Older torch knows its own dtype only."""
    return parameter.grad_dtype if _HAVE_DTYPES else parameter.dtype


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody is told when it has stepped."""
    return bool(optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks)


def is_stepped_by_torch(optimizer: Optimizer) -> bool:
    """Whether nobody sees its step from within: no hooks around it, and no function in its place but a scheduler's."""
    if has_step_hooks(optimizer) or optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
        return False
    return not is_replaced_step(optimizer)


def is_replaced_step(optimizer: Optimizer) -> bool:
    """Whether a function has taken the place of its own step that is no scheduler's, which only counts."""
    step: Any = vars(optimizer).get("step")
    counts = hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step
    return step is not None and not counts


def final(value: Tensor, source: Tensor | None, message: str) -> Tensor:
    """``value``, which is said to come from ``source``; to differentiate it is a CaptureError with ``message``."""
    return _Final.apply(value, source, message)  # type: ignore[no-any-return, no-untyped-call]


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor | None, message: str) -> Tensor:
        ctx.message = message
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise CaptureError(ctx.message)
