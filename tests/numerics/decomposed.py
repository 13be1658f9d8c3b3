"""LLaMA-3's debug size with tensor and sequence parallelism, trained as it is and with its products decomposed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import autoparallel_backend, parallelize
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.pipeline import ParallelModule

VOCABULARY = 128

RULES: dict[str, Any] = {
    "*.tok_embeddings.weight": {"tp": "S(0)"},
    "*.attention.w[qkv].weight": {"tp": "S(0)"},
    "*.attention.wo.weight": {"tp": "S(1)"},
    "*.feed_forward.w[13].weight": {"tp": "S(0)"},
    "*.feed_forward.w2.weight": {"tp": "S(1)"},
    "*.output.weight": {"tp": "S(0)"},
    "outputs:*.tok_embeddings": {"tp": "S(1)"},
    "outputs:*.attention": {"tp": "S(1)"},
    "outputs:*.feed_forward": {"tp": "S(1)"},
}


class Scored(nn.Module):
    """The loss of the network on tokens and their successors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Llama3(llama3_config("debug", {"n_kv_heads": 4}))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())


def parallel_model(decompose: str | dict[str, Any], sample: tuple[Tensor, Tensor]) -> ParallelModule:
    """The same weights in every call, cut over all ranks."""
    torch.manual_seed(0)
    return parallelize(
        Scored(),
        sample,
        {"tp": dist.get_world_size()},
        {"base": "fsdp", "rules": RULES},
        activation_checkpointing="selective",
        compile=False,
        decompose_matmuls=decompose,
    )


def sample_batch() -> tuple[Tensor, Tensor]:
    """Tokens and their successors."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCABULARY, (4, 33), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def traced() -> list[list[float]]:
    """Loss and gradient norms of a decomposed step: by itself, and under torch.compile."""
    batch = sample_batch()
    parallel = parallel_model("always", batch)
    compiled = torch.compile(parallel, backend=autoparallel_backend(compile=False), fullgraph=True)
    found = []
    for run in (parallel, compiled):
        loss = run(*batch)
        loss.backward()
        norms = [float(parameter.grad.full_tensor().norm()) for parameter in parallel.parameters()]
        found.append([float(loss.detach()), *norms])
        parallel.zero_grad()
    return found


def train(decompose: str | dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses, the norm of every gradient at the first step, and what the graphs launch, by half and kind."""
    batch = sample_batch()
    parallel = parallel_model(decompose, batch)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(steps):
        loss = parallel(*batch)
        optimizer.zero_grad()
        loss.backward()
        norms = norms or [float(parameter.grad.full_tensor().norm()) for parameter in parallel.parameters()]
        optimizer.step()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "norms": norms,
        "weights": [float(parameter.full_tensor().norm()) for parameter in parallel.parameters()],
        "launches": {
            half: {kind: sum(one.count for one in per_axes.values()) for kind, per_axes in table.items()}
            for half, table in parallel.report.collectives.items()
        },
    }


def compare(orders: list[str], steps: int) -> list[dict[str, Any]]:
    """The training as it is, then decomposed in each of ``orders``."""
    decomposed = [train({"when": "always", "order": order}, steps) for order in orders]
    return [train("never", steps), *decomposed]
