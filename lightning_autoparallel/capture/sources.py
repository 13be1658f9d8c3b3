"""Which line of the user's code, and which submodule, a node comes from."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_autoparallel.torch_compat.tracing import TorchCall, record_frames

# Folders end in a separator: torchvision is not torch's.
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_SITE_PACKAGES = Path(torch.__file__).parents[1]
_LIBRARIES = tuple(
    str(_SITE_PACKAGES / name) + os.sep
    for name in ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")
)
_TORCH = str(_SITE_PACKAGES / "torch") + os.sep
_DISTRIBUTIONS = str(_SITE_PACKAGES / "torch" / "distributions") + os.sep
_MODULES = str(_SITE_PACKAGES / "torch" / "nn" / "modules") + os.sep
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent) + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


@functools.cache  # asked of every frame of every traced call
def is_user_file(filename: str) -> bool:
    """Whether a file is the user's (or a model library's), not torch's, Lightning's, Python's or the engine's."""
    if filename.startswith(_PACKAGE):
        return filename.startswith(_PACKAGE + "models" + os.sep)
    if filename.startswith(_LIBRARIES) or filename.startswith("<"):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or is_installed(filename)


def is_installed(filename: str) -> bool:
    """Whether a file is an installed library's."""
    return any(folder in filename for folder in _INSTALLED)


@functools.cache
def is_engine_file(filename: str) -> bool:
    """Whether a file is the engine's: its models are not."""
    return filename.startswith(_PACKAGE) and not filename.startswith(str(Path(_PACKAGE) / "models"))


def user_line(frame: FrameType | None = None, beyond: Collection[FrameType] = ()) -> str:
    """``model.py:88`` of the innermost user frame, or ``"?"``: none of those ``beyond`` is asked, nor their callers."""
    current: FrameType | None = frame or sys._getframe(1)
    while current is not None and current not in beyond:
        filename = current.f_code.co_filename
        if is_user_file(filename):
            return f"{os.path.basename(filename)}:{current.f_lineno}"
        current = current.f_back
    return "?"


def is_asked_by_user(passing_on: Collection[str]) -> bool:
    """Whether what torch does now the user's code has it do, past files of the engine that are ``passing_on`` calls."""
    current: FrameType | None = sys._getframe(1)
    while current is not None:
        filename = current.f_code.co_filename
        if is_user_file(filename):
            return True
        is_between = filename.startswith((_TORCH, _STANDARD_LIBRARY, "<")) or filename in passing_on
        if not is_between or (is_installed(filename) and not filename.startswith(_TORCH)):
            return False
        current = current.f_back
    return False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an exception was raised: the innermost line outside of torch and Lightning, with its text.

    ``library`` is the installed package that the line is in, None for the user's own code, whose innermost line
    ``called_from`` is; ``in_distributions``: torch's distributions raised it for that line.
    """

    source: str
    text: str
    library: str | None
    called_from: str | None
    in_distributions: bool = False


def place_of(error: BaseException) -> Place | None:
    """Where the code that the step calls raised ``error``; None if it was nowhere there."""
    frames = list(reversed(traceback.extract_tb(error.__traceback__)))
    user = [frame for frame in frames if is_user_file(frame.filename)]
    if not user:
        return None
    own = next((frame for frame in user if not is_installed(frame.filename)), None)
    below = frames[: frames.index(user[0])]
    return Place(
        source=_shown(user[0]),
        text=user[0].line or "",
        library=_library_of(user[0].filename) if own is not user[0] else None,
        called_from=None if own is None else _shown(own),
        in_distributions=any(frame.filename.startswith(_DISTRIBUTIONS) for frame in below),
    )


def place_in_torch(error: BaseException) -> Place | None:
    """The innermost line of torch's modules: no other is there where one of them is captured by itself."""
    frames = traceback.extract_tb(error.__traceback__)
    found = next((frame for frame in reversed(frames) if frame.filename.startswith(_MODULES)), None)
    if found is None:
        return None
    return Place(source=_shown(found), text=found.line or "", library="torch.nn", called_from=None)


def _shown(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _library_of(filename: str) -> str:
    folder = next(folder for folder in _INSTALLED if folder in filename)
    return filename.rpartition(folder)[2].partition(os.sep)[0].removesuffix(".py")


def shown_hook(hooks: dict[int, Any]) -> str:
    """The line of the first of these hooks, and its name."""
    hook = next(iter(hooks.values()))
    code = getattr(inspect.unwrap(hook), "__code__", None)
    line = "?" if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return f"{line}: {getattr(hook, '__name__', type(hook).__name__)}"


def _callers() -> set[FrameType]:
    """The frames that the caller's own was called by, directly or not."""
    found: set[FrameType] = set()
    current = sys._getframe(1).f_back
    while current is not None:
        found.add(current)
        current = current.f_back
    return found


@contextlib.contextmanager
def record_sources(module: nn.Module, call: TorchCall | None = None, is_called: bool = False) -> Iterator[None]:
    """Write ``source`` (the user's line) and ``module`` (the path of the submodule that runs) on every traced node.

    ``call`` makes the step's calls of torch. What no line inside does is of the user's line that calls, if the step
    ``is_called`` by one.
    """
    names = {id(submodule): name for name, submodule in module.named_modules()}
    stack: list[str] = [""]

    def enter(submodule: nn.Module, inputs: Any) -> None:
        stack.append(names.get(id(submodule), stack[-1]))

    def leave(submodule: nn.Module, inputs: Any, output: Any) -> None:
        stack.pop()

    beyond = set() if is_called else _callers()  # a script that has it train made no node

    def describe(frame: FrameType) -> dict[str, str]:
        line = user_line(frame, beyond)
        return {"module": stack[-1]} if line == "?" else {"source": line, "module": stack[-1]}

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with record_frames(describe, call):
            yield
    finally:
        for handle in handles:
            handle.remove()
