"""What a training's own optimizers will keep of each parameter, before their first step: they step on stand-ins."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autoparallel.cost.optimizer import ADAMW, ADAMW_STATE, OptimizerState
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline.optimizer_memory import tensor_bytes
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode

_GUESSED = "plan auto: what optimizers keep is taken to be what AdamW does"
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def names_by_id(module: nn.Module) -> dict[int, str]:
    """The names of a module's parameters."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def optimizer_state(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> tuple[OptimizerState, str | None]:
    """What ``optimizers`` keep of parameters, whose ``names`` are by their ids; if it is not known, the reason too.

    Where the step is one of torch's own it is taken once, by a copy of the optimizer, on fake tensors of its
    parameters' global shapes: one for each shape and dtype. Nothing of the optimizer changes. Of any other nothing is
    run, which might step what it wraps: it is taken for AdamW, as is one that cannot step so.
    """
    per_byte: dict[str, float] = {}
    reasons: list[str] = []
    for optimizer in optimizers:
        for parameter, kept in _known_or_guessed(optimizer, reasons):
            name = names.get(id(parameter))
            if name is not None:
                per_byte[name] = per_byte.get(name, 0.0) + kept
            elif reasons:  # a wrapper's own copies, say
                return ADAMW, _guessed(reasons)
    return (OptimizerState(per_byte=per_byte) if per_byte else ADAMW), _guessed(reasons) if reasons else None


def _guessed(reasons: Sequence[str]) -> str:
    return f"{_GUESSED}: {'; '.join(dict.fromkeys(reasons))}"


def _known_or_guessed(optimizer: Optimizer, reasons: list[str]) -> list[tuple[Tensor, float]]:
    """Each parameter, and the bytes of its state for each of its own; ``reasons`` why they are a guess."""
    name = type(optimizer).__name__
    if not _steps_as_torch(type(optimizer)):
        reasons.append(f"the step of {name} is not one of torch's own")
    else:
        try:
            return _kept(optimizer)
        except Exception as error:  # whatever an optimizer does that has no values
            reasons.append(f"a step of {name} on tensors without values failed ({error})")
    return [(parameter, ADAMW_STATE) for group in optimizer.param_groups for parameter in group["params"]]


def _steps_as_torch(kind: type) -> bool:
    """Whether an optimizer is one of torch's, or of a class that changes nothing of one but how it is made."""
    for each in kind.__mro__:
        if f"{each.__module__}.".startswith("torch.optim."):
            return each is not Optimizer
        if any(name != "step" and not name.startswith("__") for name in vars(each)):
            return False
        step = vars(each).get("step")  # torch puts its wrapper on every class
        if step is not None and not f"{step.__module__}.".startswith("torch.optim."):
            return False
    return False


def _kept(optimizer: Optimizer) -> list[tuple[Tensor, float]]:
    """Each parameter, and the bytes of its state for each of its own."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found: list[tuple[Tensor, float]] = []
    shadow = _shadow(optimizer)
    for group, original in zip(shadow.param_groups, optimizer.param_groups, strict=True):
        stand_ins: dict[Any, nn.Parameter] = {}
        for parameter in original["params"]:
            kind = tuple(parameter.shape), parameter.dtype, parameter.requires_grad
            if kind not in stand_ins:
                stand_ins[kind] = _stand_in(parameter, mode)
        group["params"] = list(stand_ins.values())
    # without what surrounds a step: hooks for all optimizers, a profiler
    type(shadow).step.__wrapped__(shadow)  # type: ignore[attr-defined]
    for group, original in zip(shadow.param_groups, optimizer.param_groups, strict=True):
        by_kind = {(tuple(p.shape), p.dtype, p.requires_grad): p for p in group["params"]}
        for parameter in original["params"]:
            stand_in = by_kind[tuple(parameter.shape), parameter.dtype, parameter.requires_grad]
            found.append((parameter, tensor_bytes(shadow.state[stand_in]) / max(fxn.size_bytes(stand_in), 1)))
    return found


def _shadow(optimizer: Optimizer) -> Optimizer:
    """An optimizer that is set as this one, without hooks, state, and what schedulers have put around its step."""
    shadow: Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    shadow.__dict__.update({key: OrderedDict() for key in _HOOKS})
    shadow.state = defaultdict(dict)
    # stand-ins are on the host, where nothing is captured
    shadow.param_groups = [{**group, "capturable": False} for group in optimizer.param_groups]
    return shadow


def _stand_in(parameter: Tensor, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        made = nn.Parameter(torch.empty(tuple(parameter.shape), dtype=parameter.dtype), parameter.requires_grad)
        made.grad = torch.empty_like(made) if parameter.requires_grad else None
    return made
