"""Tracing for ``cuda:0`` where there is no GPU: a small library stands in for what a CPU build of torch lacks.

Autograd ends the process over a fake CUDA tensor when nobody has registered CUDA's device guard. The library
(``cuda_guards.cpp``, beside this file) registers an empty one, and the choice among attention's kernels. Torch asks
once, on import, so that the process has to be started with it: ``environment_with_guards``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor
from torch.nn.attention import SDPBackend

from lightning_autoparallel.errors import ConfigError

_SOURCE = Path(__file__).with_suffix(".cpp")
_MARK = "lightning_autoparallel_cuda_guards"
_BEFORE = "LIGHTNING_AUTOPARALLEL_LD_PRELOAD"  # in a process that was started with the library: what was loaded without
_STATE_BYTES = 16  # of a CUDA generator: its seed and its offset
_CUDNN_FIRST = ((9, 0), (10, 0), (10, 3))  # on which torch asks cuDNN's attention first, with a cuDNN since 9.15.1
_NOT_FIRST = "TORCH_CUDNN_SDPA_DEPRIORITIZED"  # torch's own variable: not there either


@functools.cache
def are_loaded() -> bool:
    """Whether this process was started with the library."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), _MARK)


def environment_with_guards() -> dict[str, str]:
    """This process's environment, for a process that is to be started with the library; built when first needed.

    Raises:
        ConfigError: this is no Linux, torch is no build for CPUs only, there is no compiler that can build the library,
            it cannot be kept or loaded from where it is, or this process was to be started with it already.
    """
    if _BEFORE in os.environ:
        raise ConfigError(
            f"this process was started with LD_PRELOAD={os.environ.get('LD_PRELOAD')} to plan for a GPU that is not "
            "there, but its loader has left that out: see what it said on standard error, or plan with the device cpu"
        )
    library, preloaded = str(_built()), os.environ.get("LD_PRELOAD", "")
    return {**os.environ, "LD_PRELOAD": f"{library}:{preloaded}" if preloaded else library, _BEFORE: preloaded}


def load_no_more() -> None:
    """Programs that this process starts are started as they would be without the library."""
    before = os.environ.pop(_BEFORE, None)
    if before:
        os.environ["LD_PRELOAD"] = before
    elif before is not None:
        os.environ.pop("LD_PRELOAD", None)


@contextlib.contextmanager
def seeming_cuda(name: str, capability: tuple[int, int]) -> Iterator[None]:
    """Inside, code that asks hears of one CUDA device, as it will where it trains; fake tensors only may lie there."""
    answers = {
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_name": name,
        "torch.cuda.get_device_capability": capability,
        "torch.cuda.is_bf16_supported": True,
        "torch.cuda.synchronize": None,
        "torch.cuda.get_rng_state": torch.zeros(_STATE_BYTES, dtype=torch.uint8),
        "torch.cuda.set_rng_state": None,
        "torch.cuda._lazy_init": None,
    }
    with contextlib.ExitStack() as stack:
        for question, answer in answers.items():
            stack.enter_context(mock.patch(question, lambda *args, _answer=answer, **kwargs: _answer))
        # Else torch makes a first tensor on the device, to start it, and copies what is made from Python numbers there.
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        avoided = property(lambda mode: True)
        stack.enter_context(mock.patch.object(fake_tensor.FakeTensorMode, "avoid_device_init", avoided))
        stack.enter_context(mock.patch.object(proxy_tensor, "CONSTANT_NUMEL_LIMIT", 0))
        stack.enter_context(pinned_as_copies())
        stack.enter_context(_attention_order(capability))
        yield


@contextlib.contextmanager
def pinned_as_copies() -> Iterator[None]:
    """Inside, tensors are pinned by copying them: no trace has an operator for it."""
    with mock.patch.object(Tensor, "pin_memory", _stay):
        yield


@contextlib.contextmanager
def _attention_order(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, attention's kernels are tried in the order that torch has for such a GPU, or that its user has set."""
    before = torch._C._get_sdp_priority_order()
    others = [kernel.value for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)]
    cudnn = SDPBackend.CUDNN_ATTENTION.value
    is_first = capability in _CUDNN_FIRST and os.environ.get(_NOT_FIRST) != "1"
    if is_first and before[:4] == [*others, cudnn]:  # as torch starts: nobody has set another
        torch._C._set_sdp_priority_order([cudnn, *others])
    try:
        yield
    finally:
        torch._C._set_sdp_priority_order(before)


def call_on_host(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What the host computes in the place of a call for a GPU that is not there."""
    if function is Tensor.cuda:
        return _stay, args[:1], {}
    moved = function is Tensor.to and len(args) > 1
    args = tuple(_host(argument, moved and i == 1) for i, argument in enumerate(args))
    return function, args, {name: _host(value, name == "device") for name, value in kwargs.items()}


def _host(argument: Any, is_device: bool) -> Any:
    if isinstance(argument, torch.device):
        return torch.device("cpu") if argument.type == "cuda" else argument
    if isinstance(argument, str):
        return "cpu" if argument.partition(":")[0] == "cuda" else argument
    return "cpu" if is_device and isinstance(argument, int) else argument


def _stay(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor.clone()


def _built() -> Path:
    """The library for this torch, kept in this user's cache."""
    if sys.platform != "linux":
        raise ConfigError("planning for a GPU that is not there works on Linux only: plan with the device cpu")
    if torch.backends.cuda.is_built():
        raise ConfigError(
            f"torch {torch.__version__} is a build for CUDA, but no GPU can be used: to plan for one install "
            "a build of torch for CPUs, or plan with the device cpu"
        )
    parts = (torch.__version__, torch.__file__, platform.machine(), _SOURCE.read_text())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve()
        library = cache / "lightning_autoparallel" / f"cuda_guards_{key}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        if {" ", ":"} & set(str(library)):
            raise ConfigError(
                f"no library can be loaded from {library.parent}, because of a space or colon in its name: set "
                "XDG_CACHE_HOME to a folder without"
            )
        if not library.exists():
            _build(library)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"what planning for a GPU that is not there needs cannot be kept ({error}): set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from error
    return library


def _build(library: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise ConfigError(
            f"planning for a GPU that is not there needs a C++ compiler, to build what a torch for CPUs lacks, and "
            f"there is no {compiler[0]}: install g++ or clang, or name one by the environment variable CXX"
        )
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [
            *(*compiler, "-O1", "-DNDEBUG", "-shared", "-fPIC", "-std=c++20"),
            *("-fvisibility=hidden", "-fvisibility-inlines-hidden"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{torch_folder / path}" for path in ("include", "include/torch/csrc/api/include")),
            *(str(_SOURCE), "-o", str(made)),
            *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"{' '.join(compiler)} could not build what planning for a GPU that is not there needs, against the "
                f"headers of torch {torch.__version__}:\n{done.stderr[-2000:]}"
            )
        made.replace(library)
