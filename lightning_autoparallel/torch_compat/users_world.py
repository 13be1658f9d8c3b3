"""Another default group of ``torch.distributed`` for user code: the way by which torch lets its world be overridden.

Who asks is told from the frames above: torch itself (meshes, DTensors, checkpoints), Lightning and this package go on
with the group that all ranks are in.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _World

from lightning_autoparallel.torch_compat import interception

_DIFFERENTIABLE = ("torch.distributed.nn",)
_CALLED = (distributed_c10d.__name__, *_DIFFERENTIABLE)  # whoever calls these is who asks
_OVERRIDES = "torch.overrides"
_BETWEEN = (
    *("torch.distributed.c10d_logger", "torch.autograd.function", _OVERRIDES, __name__),
    *("contextlib", "functools", "typing_extensions", "warnings", interception.__name__),
)
_COMPILER = ("torch._dynamo", "torch._utils_internal", "torch.fx.experimental")  # it asks for the code that it compiles
_TORCH, _OURS = ("torch",), ("lightning_autoparallel",)
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities", "torchmetrics")
_OTHERS = (*_TORCH, *_LIGHTNING, *_OURS)
_JOIN = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"),
)
_TELL_NO_RANKS = ("is_initialized", "is_available", "is_backend_available", "get_backend", "barrier")


def is_users(frame: FrameType | None) -> bool:
    """Whether the code of a frame is neither torch's nor Lightning's nor this package's."""
    return frame is not None and not _is_of(frame, _OTHERS)


@contextlib.contextmanager
def users_world(group: dist.ProcessGroup, asked: Callable[[], None]) -> Iterator[None]:
    """Inside, user code finds ``group`` where it names none; whenever it learns or uses its ranks, that is ``asked``.

    What is differentiated here has to have its backward here, too.
    """
    found = distributed_c10d._world
    if isinstance(found, _UsersWorld):
        yield
        return
    with mock.patch.object(distributed_c10d, "_world", _UsersWorld(found, group, asked)):
        yield


@contextlib.contextmanager
def joins_told(told: Callable[[str], None]) -> Iterator[None]:
    """Inside, what user code sums or gathers over the default group is ``told``, by the name of the function."""
    found = distributed_c10d._world
    if isinstance(found, _UsersWorld):
        yield
        return
    with mock.patch.object(distributed_c10d, "_world", _ToldWorld(found, told)):
        yield


class _OtherWorld(_World):
    """All that torch's world has."""

    def __init__(self, found: _World) -> None:
        super().__init__()
        self._found = found
        self._pg_coalesce_state, self._comms = found.pg_coalesce_state, found.comms


class _ToldWorld(_OtherWorld):
    """Its default group is seen by users, too."""

    def __init__(self, found: _World, told: Callable[[str], None]) -> None:
        super().__init__(found)
        self._told = told

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        calls = _calls_by_user(sys._getframe(1))
        names = [call.f_code.co_name for call in calls if _is_of(call, _CALLED)]
        if names and names[-1] in _JOIN and all(call.f_locals.get("group") is None for call in calls):
            self._told(names[-1])
        return self._found.default_pg

    @default_pg.setter
    def default_pg(self, group: dist.ProcessGroup | None) -> None:
        self._found.default_pg = group


class _UsersWorld(_OtherWorld):
    """All but for the default group of some who ask."""

    def __init__(self, found: _World, group: dist.ProcessGroup, asked: Callable[[], None]) -> None:
        super().__init__(found)
        self._group, self._asked = group, asked

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        calls = _calls_by_user(sys._getframe(1))
        given = [call.f_locals.get("group") for call in calls if _is_of(call, _CALLED)]
        if not calls or any(group is not None and group is not self._group for group in given):
            return self._found.default_pg  # where a group is given, it is compared with this, and ranks are its places
        if calls[-1].f_code.co_name not in _TELL_NO_RANKS:
            self._asked()
        return self._group

    @default_pg.setter
    def default_pg(self, group: dist.ProcessGroup | None) -> None:
        self._found.default_pg = group


def _calls_by_user(frame: FrameType | None) -> list[FrameType]:
    """The functions of ``torch.distributed`` that are being called, innermost first, if it was user code that did.

    That code itself, where it called none: it has asked for the group.
    """
    calls: list[FrameType] = []
    while frame is not None and (_is_of(frame, (*_CALLED, *_COMPILER)) or _name(frame) in _BETWEEN):
        calls += [frame] if _is_of(frame, _CALLED) else []
        frame = frame.f_back
        frame = who_overrode(frame) or frame
    if frame is None or _is_of(frame, _TORCH):
        # Autograd has called a backward: of collectives with gradients, which are nobody's but users'.
        return calls if any(_is_of(call, _DIFFERENTIABLE) for call in calls) else []
    return [] if _is_of(frame, _OTHERS) else calls or [frame]


def who_overrode(frame: FrameType | None) -> FrameType | None:
    """Where a mode of ours has been asked how to run a function: the frame that asked."""
    while frame is not None and _is_of(frame, _OURS):
        frame = frame.f_back
    return frame if frame is not None and _name(frame) == _OVERRIDES else None


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_of(frame: FrameType, packages: tuple[str, ...]) -> bool:
    name = _name(frame)
    return any(name == package or name.startswith(f"{package}.") for package in packages)
