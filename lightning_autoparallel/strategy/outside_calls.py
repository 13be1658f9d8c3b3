"""What hooks and callbacks do outside of steps: they sample from the module, look at numbers of its parameters, or
compute with these and with tensors of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_autoparallel.capture.sources import is_asked_by_user, user_line
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.lightning_compat import LightningModule, grad_norm
from lightning_autoparallel.lightning_compat.hooks import around_hooks
from lightning_autoparallel.pipeline import StepEngine
from lightning_autoparallel.pipeline.hooks_on_shards import hooks_on_shards
from lightning_autoparallel.pipeline.sharded_updates import ShardedUpdates
from lightning_autoparallel.pipeline.whole_parameters import WholeParameters
from lightning_autoparallel.precision import ShardedPrecision
from lightning_autoparallel.strategy import mixed_operands, shard_operators
from lightning_autoparallel.strategy.loaded_states import loaded_as_parameters_lie
from lightning_autoparallel.strategy.mixed_operands import MixedOperands
from lightning_autoparallel.strategy.outside_gradients import OutsideGradients
from lightning_autoparallel.strategy.read_shards import ReadShards
from lightning_autoparallel.torch_compat import redistributions
from lightning_autoparallel.torch_compat.assignments import is_aligned
from lightning_autoparallel.torch_compat.autograd import has_hooks
from lightning_autoparallel.torch_compat.interception import Original, intercepted_calls
from lightning_autoparallel.torch_compat.redistributions import redistributions_told
from lightning_autoparallel.torch_compat.scalars import numbers_read_by

_PASSING_ON = {__file__, *(str(each.__file__) for each in (redistributions, mixed_operands, shard_operators))}
_OF_OPTIMIZERS = ("on_before_optimizer_step",)  # in which whole tensors meet shards as in the optimizer's own step


class OutsideCalls:
    """Runs calls of the module with whole parameters, gathered for each; gives hooks whole ones where torch cannot
    compute with shards; and gives numbers of whole tensors.

    No step would reduce gradients of those calls' parameters, which are refused.

    Every rank makes the same calls. One that is alone says so, and waits; the others' next step makes it an error.
    """

    def __init__(self, engine: StepEngine) -> None:
        context = engine.context
        self._engine, self._module = engine, engine.module
        self._control = context.control
        self._parameters = WholeParameters(engine.module, context.mesh, context.control, writes=context.own_writes)
        self._gradients = OutsideGradients()
        context.own_writes.clear()  # what an earlier training wrote nobody will compare
        self._own: set[int] = set()
        self._inside = False
        self._thread = get_ident()
        self._hook_mode: MixedOperands | None = None

    @contextlib.contextmanager
    def installed(self, precision: ShardedPrecision) -> Iterator[None]:
        """From the Trainer's setup to its teardown."""
        self._own = {id(module) for module in self._module.modules()}
        numbers, moves = numbers_read_by(self._whole), redistributions_told(self._moved)
        updates = mock.patch.object(precision, "around_hooks", self._between)
        hooks, states = around_hooks(self._hook), loaded_as_parameters_lie()
        with intercepted_calls(self._call), numbers, moves, self._listed_norms(), hooks, updates, states:
            yield

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around steps, which see to their parameters by themselves."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def assigned(self, parameter: DTensor, value: Tensor, of: str) -> None:
        """A step or a hook is about to assign to data or gradient, which torch's function modes do not see."""
        if not of:
            self._engine.context.own_writes.forget_wholes()
        if not isinstance(value, DTensor) and (self._inside or self._hook_mode is not None):
            self._parameters.wrote(parameter, [value], of)
        if not of and _is_part(value) and not _is_kept(value, parameter):
            self._engine.context.warn_once(
                f"autoparallel: {user_line()} assigns a part of a larger tensor to .data of a parameter, which keeps a "
                f"copy of it ({'' if _is_whole(parameter) else 'its shard; '}compiled code needs it to begin at a "
                "multiple of 16 bytes): what is written into that tensor later is not written into the parameter"
            )

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of a step; what a module's own ``backward`` does beside it is done as in hooks."""
        is_own = type(self._module).backward is not LightningModule.backward  # type: ignore[attr-defined]
        with self._hook("backward") if is_own else self.inside(), hooks_on_shards(self._hooked(), self._meet_in_hook):
            yield

    def _call(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or id(module) not in self._own:
            return original(module, *args, **kwargs)
        if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return original(module, *args, **kwargs)
        self._meet(f"calls {type(module).__name__} outside of a step", "its parameters lie in shards")

        def run() -> Any:
            with self.inside(), self._parameters:
                return original(module, *args, **kwargs)

        return self._gradients.called(run, (args, kwargs), self._parameters.owed, user_line())

    @contextlib.contextmanager
    def optimizing(self, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Around steps of optimizers, which a hook may call; hooks of this ``optimizer`` are not."""
        mode, self._hook_mode = self._hook_mode, None
        hooks = hooks_on_shards([optimizer] if optimizer is not None else [], self._meet_in_hook)
        try:
            with mode.left() if mode is not None else contextlib.nullcontext(), hooks:
                yield
        finally:
            self._hook_mode = mode

    @contextlib.contextmanager
    def _hook(self, name: str) -> Iterator[None]:
        if self._inside or name in _OF_OPTIMIZERS:
            yield  # those are called in ``_between``
            return
        asked = self._gradients.check_asked
        mode = MixedOperands(self._parameters, self._meet_with, self._is_inside, self.inside, asked)
        before, self._hook_mode = self._hook_mode, mode
        try:
            with mode:
                yield
        finally:
            self._hook_mode = before

    @contextlib.contextmanager
    def _between(self) -> Iterator[None]:
        """Around the hooks between backward and update."""

        def meet(function: str) -> None:
            self._meet(f"gives {function} a gradient or parameter, ahead of an update", "it lies in shards")

        def whole(tensor: DTensor) -> Tensor:
            meet("Python")
            with self.inside():
                return tensor.full_tensor()

        with ShardedUpdates(meet), ReadShards(self._gradients, whole):
            yield

    def _is_inside(self) -> bool:
        return self._inside

    def _meet_with(self, function: str) -> None:
        self._meet(f"gives {function} parameters or gradients, and maybe other tensors", "they lie in shards")

    def _meet_in_hook(self, function: str) -> None:
        self._meet(f"gives {function} a gradient or parameter, in a hook of it", "it lies in shards")

    def _hooked(self) -> list[Tensor]:
        modes = self._engine.modes
        every = self._module.parameters() if modes is None else modes.parameters
        return [parameter for parameter in every if has_hooks(parameter)]

    def _whole(self, tensor: DTensor) -> Tensor:
        if not self._inside:
            self._meet("reads a number of a parameter or gradient", "it lies in shards")
        with self.inside():
            return tensor.full_tensor()

    def _moved(self) -> None:
        """The engine's own code knows that ranks share what it looks at; Lightning's and torch's is called by all."""
        if not self._inside and get_ident() == self._thread and is_asked_by_user(_PASSING_ON):
            self._meet("has torch gather or move a parameter or gradient", "it lies in shards")

    def _listed_norms(self) -> contextlib.AbstractContextManager[Any]:
        """``grad_norm`` makes a tensor of a list of norms, whose numbers torch reads from memory that DTensors lack."""

        def tensor(norms: list[Tensor]) -> Tensor:
            self._meet("asks for the norms of gradients", "they lie in shards")
            wholes = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
            return torch.stack(wholes).cpu()

        return mock.patch.dict(grad_norm.__globals__, {"torch": SimpleNamespace(**{**vars(torch), "tensor": tensor})})

    def _meet(self, does: str, why: str) -> None:
        line = user_line()
        waits = (
            f"autoparallel: {line} {does} on rank {dist.get_rank()}, and waits for ranks that have not come there: "
            f"{why}, so that every rank must (not only where is_global_zero is True)"
        )
        if not self._control.meet(does, waits, line):
            raise CaptureError(
                f"{line} {does}, and other ranks do something else: {why}, so that every rank must make the same call"
            )


def _is_whole(parameter: DTensor) -> bool:
    return all(placement.is_replicate() for placement in parameter.placements)


def _is_kept(value: Tensor, parameter: DTensor) -> bool:
    """Whether a parameter holds the very memory that is assigned to its data."""
    return _is_whole(parameter) and is_aligned(value) and value.stride() == parameter.stride()


def _is_part(tensor: Tensor) -> bool:
    """Whether it is a view of more than itself."""
    is_dense = tensor.layout == torch.strided and not isinstance(tensor, DTensor)
    return is_dense and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
