"""`torch.compile` around a parallel module on real ranks: the training of the module without it, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import autoparallel_backend, parallelize
from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.pipeline import ParallelModule
from tests.numerics.training import full
from tests.support.worlds import Worlds

STEPS = 4


class Language(nn.Module):
    """A small LLaMA with dropout before its loss; uneven shards, and a buffer that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Llama3(llama3_config("debug", {"n_layers": 1, "vocab_size": 61}))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.rows += tokens.shape[0]
        scores = F.dropout(self.net(tokens[:, :-1]), 0.1, training=self.training)
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss, "best": scores.amax(-1)}


def parallel_language() -> ParallelModule:
    torch.manual_seed(0)
    size = dist.get_world_size()
    sample = torch.zeros(4 * size, 9, dtype=torch.long)
    return parallelize(Language(), (sample,), {"dp_shard": size}, "fsdp", compile=False)


def tokens(step: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, 61, (rows, 9), generator=generator)


def train(parallel: ParallelModule, called: Any, smaller: int) -> tuple[list[float], list[Tensor], float]:
    """Losses, the last step's gradients, and what the buffer has counted; the third batch has fewer rows."""
    # Not Adam: it makes whole steps of gradients that are the noise of another order of adding.
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        result = called(tokens(step, rows=smaller if step == 2 else 4))
        (result["loss"] + 0.01 * result["best"].square().sum()).backward()
        optimizer.step()
        losses.append(float(result["loss"].detach()))
    gradients = [full(parameter.grad) for parameter in parallel.parameters()]
    return losses, gradients, float(parallel.module.rows)


def refusals(compiled: Any) -> list[str]:
    """What ranks are told of batches that were not prepared, or that differ between them; batches of 4 and 2 are."""
    rank, told = dist.get_rank(), []
    compiled(tokens(0))
    for rows in (3, 2 + 2 * rank, 3 + rank):
        try:
            compiled(tokens(0, rows=rows))
        except AutoParallelError as error:
            told.append(f"{type(error).__bases__[0].__name__}: {error}")
    compiled(tokens(0))
    return told


def trained_both_ways(compile: bool) -> tuple[Any, Any, list[str]]:
    """`train` without torch.compile, interpreted, and with it; what the latter is told of other batches after it."""
    plain, parallel = parallel_language(), parallel_language()
    smaller = 4 if compile else 2  # Inductor lowers one size
    expected = train(plain, plain, smaller)
    parallel.prepare(tokens(0, rows=smaller))
    compiled = torch.compile(parallel, backend=autoparallel_backend(compile=compile), fullgraph=True)
    actual = train(parallel, compiled, smaller)
    told = [] if compile else refusals(compiled)
    torch._dynamo.reset()
    return expected, actual, told


@pytest.mark.matrix
@pytest.mark.parametrize("compile", [False, True])
def test_it_trains_as_the_module_alone(compile: bool, worlds: Worlds) -> None:
    """And, interpreted, a batch that was not prepared is refused on all ranks."""
    for alone, called, told in worlds(2).run(trained_both_ways, compile):
        (losses, gradients, rows), (compiled_losses, compiled_gradients, compiled_rows) = alone, called
        assert compiled_losses == pytest.approx(losses, rel=1e-5 if compile else 1e-6)
        torch.testing.assert_close(compiled_gradients, gradients, rtol=1e-6, atol=1e-6 if compile else 1e-7)
        assert compiled_rows == rows > 0
        if not compile:
            assert_refused(*told)


def assert_refused(unknown: str, different: str, unknown_on_one: str) -> None:
    assert "torch.compile met a batch that the module was not prepared for (0.0: int64[3, 9]; with grad" in unknown
    assert "ranks hold different batches: rank 0 has forward_backward on 0.0: int64[2, 9], rank 1 has" in different
    assert "ranks hold different batches: rank 0 has forward_backward on 0.0: int64[3, 9]" in unknown_on_one
