"""What a test may not leave behind, how to see it, and how to put it right for the tests after it.

Nothing here imports torch or lightning: what was never imported cannot have been left changed, and a test of plain
Python should not pay for the import.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Seeding is how a test repeats itself, so its variables are put back without a word.
RESTORED_QUIETLY = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
# Set once per process by pytest and by compilers, for their own children.
IGNORED_VARIABLES = (
    "PYTEST_",
    "KMP_",
    "OMP_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TORCH_COMPILE_",
    "TRITON_",
    "TF_",
    "TOKENIZERS_",
)
# Compilers keep executors for the life of the process; the interpreter joins their workers at exit.
IGNORED_THREADS = ("ThreadPoolExecutor", "pytest_timeout")
THREAD_GRACE_S = 1.0


class Leak(AssertionError):
    """A test left something behind that would change the tests after it."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of the process that tests share."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    process_group: bool
    modes: tuple[Any, ...]
    default_dtype: Any
    lightning_log: Any


@contextmanager
def no_leaks() -> Iterator[None]:
    """Run a block and put right what it left behind.

    Raises:
        Leak: it left something behind; the message names all of it.
    """
    before = current_state()
    yield
    found = [leak for check in CHECKS for leak in check(before)]
    if found:
        raise Leak("the test left behind: " + "; ".join(found))


def current_state() -> State:
    """Record the shared state as it is now."""
    torch = sys.modules.get("torch")
    return State(
        environment=dict(os.environ),
        threads=frozenset(threading.enumerate()),
        process_group=_process_group_exists(),
        modes=_modes(),
        default_dtype=torch.get_default_dtype() if torch else None,
        lightning_log=_lightning_log(),
    )


def left_process_group(before: State) -> list[str]:
    """Destroys a process group that was not there before."""
    if before.process_group or not _process_group_exists():
        return []
    sys.modules["torch"].distributed.destroy_process_group()
    return ["an initialised process group"]


def left_modes(before: State) -> list[str]:
    """Leaves fake and other dispatch modes, innermost first, that were not active before."""
    left = _modes()[len(before.modes) :]
    for mode in reversed(left):
        mode.__exit__(None, None, None)
    return [f"an active {type(mode).__name__}" for mode in left]


def left_environment(before: State) -> list[str]:
    """Puts the environment back."""
    now = dict(os.environ)
    changed = [
        name for name in sorted(now.keys() | before.environment) if now.get(name) != before.environment.get(name)
    ]
    changed = [name for name in changed if not name.startswith(IGNORED_VARIABLES)]
    for name in changed:
        if name in before.environment:
            os.environ[name] = before.environment[name]
        else:
            del os.environ[name]
    return [f"the environment variable {name}" for name in changed if name not in RESTORED_QUIETLY]


def left_threads(before: State) -> list[str]:
    """Names threads that still run and would keep the process alive; they cannot be ended from here."""
    started = [t for t in threading.enumerate() if t not in before.threads and not t.daemon]
    started = [t for t in started if not t.name.startswith(IGNORED_THREADS)]
    for thread in started:
        thread.join(THREAD_GRACE_S)
    return [f"the running thread {thread.name}" for thread in started if thread.is_alive()]


def left_default_dtype(before: State) -> list[str]:
    """Sets torch's default dtype back."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    expected = before.default_dtype or torch.float32
    left = torch.get_default_dtype()
    torch.set_default_dtype(expected)
    return [] if left == expected else [f"the default dtype {left}"]


def left_lightning_log(before: State) -> list[str]:
    """Sees `LightningModule.log` replaced, as a recorder does during capture, and puts it back if it was known."""
    log = _lightning_log()
    if log is before.lightning_log or (before.lightning_log is None and _is_lightnings_own(log)):
        return []
    if before.lightning_log is not None:
        sys.modules["lightning.pytorch"].LightningModule.log = before.lightning_log
    return ["a patched LightningModule.log"]


CHECKS: tuple[Callable[[State], list[str]], ...] = (
    left_process_group,
    left_modes,
    left_environment,
    left_threads,
    left_default_dtype,
    left_lightning_log,
)


def _process_group_exists() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch and torch.distributed.is_available() and torch.distributed.is_initialized())


def _modes() -> tuple[Any, ...]:
    dispatch = sys.modules.get("torch.utils._python_dispatch")
    return tuple(dispatch._get_current_dispatch_mode_stack()) if dispatch else ()


def _lightning_log() -> Any:
    lightning = sys.modules.get("lightning.pytorch")
    return getattr(getattr(lightning, "LightningModule", None), "log", None)


def _is_lightnings_own(log: Any) -> bool:
    return log is None or log.__code__.co_filename == sys.modules["lightning.pytorch.core.module"].__file__
