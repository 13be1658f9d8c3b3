"""The user's own activation-checkpoint regions, made visible to capture."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as torch_checkpoint

from lightning_autoparallel.torch_compat.tracing import annotate_nodes

REGION_KEY = "checkpoint_region"
# torch 2.14 calls the second, older ones the first
_WITHOUT_REENTRANT = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")


@contextlib.contextmanager
def visible_checkpoint_regions(
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Run ``torch.utils.checkpoint`` regions plainly, in ``around()``, their nodes annotated with a region number.

    Left alone they vanish from a joint graph (non-reentrant: saved-tensor hooks are not traced) or raise (reentrant).
    Users import ``checkpoint`` by name, so the functions that it calls are replaced, not ``checkpoint`` itself.
    """
    numbers = itertools.count()

    def run_without_reentrant(*args: Any, **kwargs: Any) -> Generator[None]:
        # The generator protocol of torch: code before the yield runs before the function, code after it after.
        with annotate_nodes(**{REGION_KEY: next(numbers)}), around():
            yield

    def run_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        with annotate_nodes(**{REGION_KEY: next(numbers)}), around():
            return function(*args)

    with contextlib.ExitStack() as stack:
        for name in _WITHOUT_REENTRANT:
            if hasattr(torch_checkpoint, name):
                stack.enter_context(mock.patch.object(torch_checkpoint, name, run_without_reentrant))
        stack.enter_context(mock.patch.object(torch_checkpoint.CheckpointFunction, "apply", run_reentrant))
        yield


def saving_is_hooked() -> bool:
    """Whether somebody takes what autograd saves: a region without reentry does, in both of its runs.

    Its second run ends with the last tensor that was saved, in the middle of whatever saves it.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
