"""Which line of the user's code, and which submodule, a node comes from."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_autoparallel.torch_compat.tracing import TorchCall, record_frames

_PACKAGE = str(Path(__file__).parents[1])
_SITE_PACKAGES = Path(torch.__file__).parents[1]
_LIBRARIES = tuple(
    str(_SITE_PACKAGES / name)
    for name in ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")
)
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent)


@functools.cache  # asked of every frame of every traced call
def is_user_file(filename: str) -> bool:
    """Whether a file is the user's (or a model library's), not torch's, Lightning's, Python's or the engine's."""
    if filename.startswith(_PACKAGE):
        return filename.startswith(str(Path(_PACKAGE) / "models"))
    if filename.startswith(_LIBRARIES) or filename.startswith("<"):
        return False
    return not filename.startswith(_STANDARD_LIBRARY) or "site-packages" in filename


@functools.cache
def is_engine_file(filename: str) -> bool:
    """Whether a file is the engine's: its models are not."""
    return filename.startswith(_PACKAGE) and not filename.startswith(str(Path(_PACKAGE) / "models"))


def user_line(frame: FrameType | None = None) -> str:
    """``model.py:88`` of the innermost user frame, or ``"?"``."""
    current: FrameType | None = frame or sys._getframe(1)
    while current is not None:
        filename = current.f_code.co_filename
        if is_user_file(filename):
            return f"{os.path.basename(filename)}:{current.f_lineno}"
        current = current.f_back
    return "?"


def user_line_of(error: BaseException) -> tuple[str, str]:
    """Where in the user's code an exception was raised, and the text of that line; ``("?", "")`` if nowhere."""
    for summary in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(summary.filename):
            return f"{Path(summary.filename).name}:{summary.lineno}", summary.line or ""
    return "?", ""


@contextlib.contextmanager
def record_sources(module: nn.Module, call: TorchCall | None = None) -> Iterator[None]:
    """Write ``source`` (the user's line) and ``module`` (the path of the submodule that runs) on every traced node.

    ``call`` makes the step's calls of torch.
    """
    names = {id(submodule): name for name, submodule in module.named_modules()}
    stack: list[str] = [""]

    def enter(submodule: nn.Module, inputs: Any) -> None:
        stack.append(names.get(id(submodule), stack[-1]))

    def leave(submodule: nn.Module, inputs: Any, output: Any) -> None:
        stack.pop()

    def describe(frame: FrameType) -> dict[str, str]:
        return {"source": user_line(frame), "module": stack[-1]}

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
