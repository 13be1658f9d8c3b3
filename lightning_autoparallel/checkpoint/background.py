"""Writing while training goes on: one write at a time, on a thread and a process group of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning_autoparallel.torch_compat.gloo import one_gloo_thread
from lightning_autoparallel.torch_compat.tree import tree_leaves


class BackgroundWriter:
    """Runs writes one after another, waited for before the next; all ranks submit the same ones, in the same order."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []
        self._group: Any = None

    def __reduce__(self) -> tuple[type, tuple[timedelta]]:
        return BackgroundWriter, (self._timeout,)

    @property
    def group(self) -> Any:
        """For what ranks say to each other while they write; every rank asks for it at its first write."""
        if self._group is None and dist.is_initialized() and dist.get_world_size() > 1:
            with one_gloo_thread():
                self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group

    def submit(self, write: Callable[[], None]) -> None:
        """Write later; ``wait`` raises what it raises."""
        self._pending.append(self._thread.submit(write))

    def after_last(self, action: Callable[[], None]) -> None:
        """Call ``action`` once the last write has succeeded, and not if it has failed: at once where there is none."""
        if not self._pending:
            action()
            return
        last = self._pending[0]
        self._pending.append(self._thread.submit(lambda: None if last.exception() is not None else action()))

    def wait(self) -> None:
        """Return when nothing is left to write.

        Raises:
            CheckpointError: the last write has failed, on all ranks.
            Exception: what was to follow it has, on this one.
        """
        pending, self._pending = self._pending, []
        wait(pending)
        for future in pending:
            future.result()


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy on the host of all tensors, which training does not change."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        copy_on_host: Any = stager.stage(state)
    finally:
        stager.close()
    return dict(copy_on_host)


def copied_but(made: Sequence[Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """The same where there are no shards; tensors ``made`` for it, which nobody else has, are in it themselves."""
    own = {id(tensor): tensor for tensor in made}
    others = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and id(leaf) not in own]
    copies = {id(tensor): _copy(tensor) for tensor in others}
    return copy.deepcopy(state, {**own, **copies})


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)
    return nn.Parameter(copied, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
