"""An optimizer that works element by element updates this rank's parts as the plain tensors that they are.

Each call on a DTensor asks torch for a rule first, which takes longer than the update itself. So between what may still
look at parameters (hooks before the step, clipping) and the end of the update the optimizer's groups and state hold the
parts. Before and after, in hooks and in checkpoints, they hold DTensors as ever.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.torch_compat.dtensors import as_part_of, part_of
from lightning_autoparallel.torch_compat.optimizer_hooks import first_after_update

State = dict[str, Any]


@contextlib.contextmanager
def local_updates(optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    """What is yielded gives the optimizer the parts, where that makes no difference; the end takes them away again.

    It must be one that steps element by element (``sharded_updates.needs_no_help``).
    """
    swapped: list[_Swapped] = []

    def swap() -> None:
        if not swapped and _may_be_parts(optimizer):
            swapped.append(_Swapped(optimizer))

    def restore() -> None:
        while swapped:
            swapped.pop().restore()

    hook = first_after_update(optimizer, restore)
    try:
        yield swap
    finally:
        hook.remove()
        restore()


def _may_be_parts(optimizer: Optimizer) -> bool:
    """Whether parts are updated as the whole is: all that an update reads of a parameter lies as it does."""
    special = any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups)
    return not special and all(_lies_together(each, optimizer.state.get(each, {})) for each in _parameters(optimizer))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _lies_together(parameter: Tensor, state: State) -> bool:
    """A parameter with its gradient and state; a number would not be told from a count of steps."""
    read = [parameter.grad, *state.values()]
    if not isinstance(parameter, DTensor):
        return not any(isinstance(value, DTensor) for value in read)
    return parameter.dim() > 0 and all(_lies_as(value, parameter) for value in read)


def _lies_as(value: Any, parameter: DTensor) -> bool:
    if isinstance(value, DTensor):
        return value.placements == parameter.placements and value.shape == parameter.shape
    return not isinstance(value, Tensor) or not value.dim()


class _Swapped:
    """An optimizer whose groups and state hold parts, until they are restored."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._state = optimizer, optimizer.state
        self._params = [list(group["params"]) for group in optimizer.param_groups]
        self._parts = {parameter: _part_with_gradient(parameter) for parameter in _parameters(optimizer)}
        state: defaultdict[Tensor, State] = defaultdict(dict)
        for parameter, part in self._parts.items():
            if parameter in self._state:
                state[part] = {name: _part(value) for name, value in self._state[parameter].items()}
        for group in optimizer.param_groups:
            group["params"][:] = [self._parts[parameter] for parameter in group["params"]]
        optimizer.state = state

    def restore(self) -> None:
        """DTensors again; what the step has begun to keep are DTensors that lie as their parameters do."""
        made, self._optimizer.state = self._optimizer.state, self._state
        for group, params in zip(self._optimizer.param_groups, self._params, strict=True):
            group["params"][:] = params
        for parameter, part in self._parts.items():
            if part in made:
                self._keep(parameter, made[part])

    def _keep(self, parameter: Tensor, made: State) -> None:
        kept = self._state[parameter]
        for name, value in made.items():
            known = kept.get(name)
            if value is known or (isinstance(known, DTensor) and value is part_of(known)):
                continue  # changed in place
            is_part = isinstance(value, Tensor) and value.dim() > 0
            kept[name] = as_part_of(value, parameter) if is_part and isinstance(parameter, DTensor) else value


def _part_with_gradient(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    part = part_of(parameter).detach()  # its gradient is this step's
    if isinstance(parameter.grad, DTensor):
        part.grad = part_of(parameter.grad)
    return part


def _part(value: Any) -> Any:
    return part_of(value) if isinstance(value, DTensor) else value
