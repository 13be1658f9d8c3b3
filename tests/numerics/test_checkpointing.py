"""Training with every checkpointing policy on two ranks: the same losses to the last bit, from fewer saved bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from tests.numerics.rules import plan_of
from tests.support.sgd import sgd_losses
from tests.support.worlds import Worlds

POLICIES = ("none", "selective", "full")
ROWS, STEPS = 4, 5


class Scored(nn.Module):
    """A small LLaMA and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama3(llama3_config("debug", {"n_layers": 2, "dim": 32, "vocab_size": 64}))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())


def train(axis: str) -> dict[str, tuple[list[float], int]]:
    """The losses of a few steps and the bytes saved in each, by policy."""
    tokens = torch.randint(0, 64, (ROWS, 17), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found = {}
    for policy in POLICIES:
        torch.manual_seed(0)
        plan = plan_of("llama3", "rules") if axis == "tp" else "fsdp"
        parallel = parallelize(
            Scored(), (inputs, targets), {axis: 2}, plan, compile=False, activation_checkpointing=policy
        )
        shards, rank = (1, 0) if axis == "tp" else (2, dist.get_rank())
        losses = sgd_losses(parallel, STEPS, inputs.chunk(shards)[rank], targets.chunk(shards)[rank])
        found[policy] = losses, parallel.report.saved_bytes
    return found


@pytest.mark.parametrize("axis", ["dp_shard", pytest.param("tp", marks=pytest.mark.matrix)])
def test_policies_train_alike_and_save_less(axis: str, worlds: Worlds):
    found = worlds(2).run(train, axis)[0]
    losses, saved = zip(*(found[policy] for policy in POLICIES), strict=True)
    assert losses[0][-1] < losses[0][0]
    assert losses[0] == losses[1] == losses[2]
    assert saved[0] > saved[1] > saved[2]
