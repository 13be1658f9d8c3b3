"""Which captured steps another rank can run on zeros."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_autoparallel.pipeline.step_calls import Variant
from lightning_autoparallel.pipeline.steps_ahead import can_be_joined


@torch.library.custom_op("of_a_stranger::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: torch.nn.functional.gelu(x).sqrt().relu().sum(), True),
        (lambda x: torch.nn.functional.embedding(x.long(), torch.ones(4, 2)), True),
        (lambda x: torch.multinomial(x, 1), False),
        (lambda x: torch.linalg.cholesky(x), False),
        (lambda x: torch.ops.aten._assert_async(x.sum() > 0), False),
        (twice, False),
    ],
    ids=["elementwise", "embedding", "multinomial", "cholesky", "assert", "custom"],
)
def test_operators_that_look_at_values_are_not_run_on_zeros(run: Callable[[Tensor], Any], expected: bool) -> None:
    forward = make_fx(run)(torch.eye(3))
    step = SimpleNamespace(partitioned=SimpleNamespace(forward=forward))
    assert can_be_joined(cast(Variant, SimpleNamespace(step=step))) is expected
