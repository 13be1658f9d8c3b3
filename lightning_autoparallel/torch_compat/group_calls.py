"""Being told ahead of the collectives that Python starts on process groups, whoever calls ``torch.distributed``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_autoparallel.torch_compat import interception
from lightning_autoparallel.torch_compat.tree import tree_leaves
from lightning_autoparallel.torch_compat.users_world import who_overrode

Told = Callable[[str, dist.ProcessGroup, str], None]
Changed = Callable[[Sequence[Tensor]], bool]

_STARTED = ("reduce", "gather", "scatter", "all_to_all", "alltoall", "broadcast", "barrier")  # parts of methods' names
_RECEIVES = "recv"  # from one rank, which others know nothing of
_PASSING_ON = ("torch", "contextlib", "functools", "typing_extensions", __name__, interception.__name__)


@contextlib.contextmanager
def collectives_told(told: Told, changed: Changed) -> Iterator[None]:
    """Inside, each collective is ``told`` before this thread starts it: its name, group, and the module that asks.

    Those of a backward under way are not, nor those that operators of torch start. Tensors that it writes into are
    what is ``changed``, which torch does not count; if that says so, it is waited for at once.
    """
    thread = get_ident()

    def telling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            is_own = get_ident() == thread
            if is_own and not name.startswith(_RECEIVES) and torch._C._current_graph_task_id() == -1:
                told(name.strip("_"), group, _who_asks(sys._getframe(1)))
            started = original(group, *args, **kwargs)
            written = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)]  # all methods name it first
            if is_own and changed(written) and started is not None and not name.startswith(_RECEIVES):
                started.wait()
            return started

        return start

    kind = dist.ProcessGroup
    originals = {
        name: method
        for name, method in vars(kind).items()
        if not name.startswith("__") and any(part in name for part in (*_STARTED, _RECEIVES))
    }
    for name, original in originals.items():
        setattr(kind, name, telling(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


def changes_told(changed: Changed) -> contextlib.AbstractContextManager[None]:
    """Inside, tensors that collectives write into are what is ``changed``."""
    return collectives_told(lambda name, group, asking: None, changed)


def is_of_groups(function: Any) -> bool:
    """Whether a function is one of those that talk to the ranks of a group."""
    return getattr(function, "__module__", None) == distributed_c10d.__name__


def _who_asks(frame: FrameType | None) -> str:
    """The module of the nearest frame that is not torch's."""
    while frame is not None:
        frame = who_overrode(frame) or frame
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _PASSING_ON and name not in _PASSING_ON:
            return name
        frame = frame.f_back
    return ""
