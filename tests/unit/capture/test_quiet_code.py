"""Code of which the hook that watches a step asks nothing once it was called: not what a later call may ask or tell."""

from __future__ import annotations

import functools
import inspect
import os
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_autoparallel.capture.user_code import StepCalls
from lightning_autoparallel.models.llama3 import Llama3
from lightning_autoparallel.torch_compat import tracing


def is_quiet(function: Callable[..., Any]) -> bool:
    reads: Any = SimpleNamespace()
    return StepCalls(reads)._is_quiet(inspect.unwrap(function).__code__)


@pytest.mark.parametrize(
    "function", [torch.nn.Module.parameters, tracing.fake_mode_of, functools.partialmethod.__get__]
)
def test_code_of_torch_the_engine_and_python_is_quiet(function: Callable[..., Any]) -> None:
    assert is_quiet(function)


@pytest.mark.parametrize(
    "function",
    [
        dist.get_rank,  # torch may have asked first
        uuid.uuid4,
        type(os.environ).__getitem__,
        torch.nn.Linear.__init__,  # an object is made
        Llama3.forward,
        is_quiet,
    ],
)
def test_code_that_asks_or_is_the_users_is_not(function: Callable[..., Any]) -> None:
    assert not is_quiet(function)


def test_code_whose_results_are_kept_is_not() -> None:
    """Where a library keeps them: each capture's are of that capture only."""
    assert is_quiet(torch.nn.Module.buffers)
    kept = functools.lru_cache(torch.nn.Module.buffers)
    assert not is_quiet(kept)
