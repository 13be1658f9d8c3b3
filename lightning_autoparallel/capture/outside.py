"""What a step may ask or tell beyond its module: clocks, files, ids, ranks, the process. No graph has it."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import io
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from threading import get_ident
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_autoparallel.capture.sources import is_user_file, user_line
from lightning_autoparallel.capture.watch import Watcher

_RANKS = ("get_rank", "get_world_size", "get_node_local_rank", "get_global_rank", "get_group_rank")
_COLLECTIVES: tuple[str, ...] = (
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "barrier"),
    *("broadcast_object_list", "gather", "scatter", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "gather_object", "new_group"),
)
_RANK_ZERO = os.path.join("lightning_utilities", "core", "rank_zero.py")
_RANK_ZERO_NAME = "wrapped_fn"
_CLOCKS = {
    "time",
    "perf_counter",
    "monotonic",
    "process_time",
    "thread_time",
    "localtime",
    "gmtime",
    "ctime",
    "asctime",
}
_CLOCKS |= {f"{name}_ns" for name in _CLOCKS} | {"strftime", "sleep"}
_TODAY = {"now", "utcnow", "today"}
_SYSTEM = {"posix", "nt", "resource", "_socket", "_psutil_linux", "_psutil_posix", "_psutil_osx", "_psutil_windows"}
_CONSTANT = {"fspath", "getpid", "cpu_count", "strerror"}
# Of torch, for the whole process.
_OF_TORCH = ["set_default_dtype", "set_default_device", "use_deterministic_algorithms", "save", "load"]
_OF_TORCH += ["manual_seed", "seed", "set_rng_state"]
_OF_CUDA = ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"]
_OF_CUDA += ["mem_get_info", "memory_summary", "utilization", "reset_peak_memory_stats"]
_OF_SCALERS = ("get_scale", "scale", "unscale_", "step", "update", "state_dict")


@contextlib.contextmanager
def refused_outside(watcher: Watcher) -> Iterator[None]:
    """Functions of torch whose effect or answer is of the moment refuse the capture inside."""
    with contextlib.ExitStack() as stack:
        for owner, names in ((torch, _OF_TORCH), (torch.cuda, _OF_CUDA)):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _refused(watcher, owner, name)))
        yield


def _refused(watcher: Watcher, owner: Any, name: str) -> Callable[..., Any]:
    real, thread = getattr(owner, name), get_ident()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread or _is_machinery(sys._getframe(1)):
            return real(*args, **kwargs)
        raise watcher.refuse(f"{user_line()} calls {owner.__name__}.{name}, which would happen at capture only")

    return refuse


def asked_in_c(function: Any, caller: FrameType) -> str | None:
    """What a call of a function in C asks or tells, if ``caller`` is a user's and a graph does not have it."""
    if function is os.urandom:
        return "draws from the operating system (os.urandom): it would stay that of capture"
    if not is_user_file(caller.f_code.co_filename):
        return None
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if name in _CLOCKS and owner is time:
        return f"asks for the time (time.{name}), which would stay that of capture"
    if name in _TODAY and isinstance(owner, type) and issubclass(owner, datetime.date):
        return f"asks for the time ({owner.__name__}.{name}), which would stay that of capture"
    if function in (builtins.open, io.open, os.open):
        return "opens a file, which would happen at capture only"
    if isinstance(owner, io.IOBase) and not isinstance(owner, (io.StringIO, io.BytesIO)):
        return f"reads or writes a file ({name}), which would happen at capture only"
    if function is builtins.globals:
        return "asks for all globals at once: what it reads of them is not seen"
    if str(getattr(function, "__module__", "")) in _SYSTEM and name not in _CONSTANT:
        return f"asks the operating system ({name}), whose answer would stay that of capture"
    return None


def asked_in_python(frame: FrameType) -> str | None:
    """What a call of a function in Python, which begins with ``frame``, asks or tells that a graph does not have."""
    code, caller = frame.f_code, frame.f_back
    if code.co_name == _RANK_ZERO_NAME and code.co_filename.endswith(_RANK_ZERO):
        return "asks for the ranks (rank_zero_only)"
    question = _questions().get(code)
    return None if question is None or caller is None or _is_machinery(caller) else question


def may_ask(code: CodeType) -> bool:
    """Whether some call of a function in Python is for ``asked_in_python`` to answer."""
    return code.co_name == _RANK_ZERO_NAME or code in _questions()


def _is_machinery(caller: FrameType) -> bool:
    """Whether torch, the engine or Lightning's precision asks, not the step."""
    name = str(caller.f_globals.get("__name__", ""))
    return ".plugins.precision" in name or name.partition(".")[0] in ("torch", __name__.partition(".")[0])


@cache
def _questions() -> dict[CodeType, str]:
    """Python functions whose answer is of one rank or one moment -> what the step does with them."""
    asks = {name: f"asks for the ranks (torch.distributed.{name})" for name in _RANKS}
    asks |= {name: f"talks to other ranks (torch.distributed.{name})" for name in _COLLECTIVES}
    found = {
        _code(getattr(dist, name)): f"{text}: a captured step is one program"
        for name, text in asks.items()
        if hasattr(dist, name)
    }
    for name in _OF_SCALERS:
        text = f"asks a gradient scaler (GradScaler.{name}), whose answer would stay that of capture"
        found[_code(getattr(torch.amp.GradScaler, name))] = text
    for function in (uuid.uuid1, uuid.uuid4):
        found[_code(function)] = f"makes an id (uuid.{function.__name__}), which would stay that of capture"
    return found


def _code(function: Callable[..., Any]) -> CodeType:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__
