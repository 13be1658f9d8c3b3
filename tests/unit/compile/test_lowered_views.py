"""Inductor's decompositions lay values out otherwise than a capture saw them: views of them copy where they must."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_autoparallel.torch_compat.inductor import compile_graph
from lightning_autoparallel.torch_compat.tracing import fake_tracing


def joined(nothing: Tensor, x: Tensor) -> tuple[Tensor]:
    """Keys that a cache without any is joined with: the result is contiguous, and to Inductor it is the transpose."""
    return (torch.cat([nothing, x.view(3, 10, 4, 4).transpose(1, 2)], -2).view(12, 10, 4) * 2,)


def test_what_joins_nothing_is_viewed():
    with fake_tracing():
        traced = make_fx(joined)(torch.empty(0), torch.empty(3, 10, 16))
    lowered = compile_graph(traced, is_inference=True, is_backward=False)
    given = torch.empty(0), torch.randn(3, 10, 16, generator=torch.Generator().manual_seed(0))
    (result,) = lowered.call([value.clone() for value in given])
    torch.testing.assert_close(result, joined(*given)[0])
