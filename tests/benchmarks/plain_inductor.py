"""A step of ours on one device beside ``torch.compile`` of the same module, which plans and shards nothing.

    python -m tests.benchmarks.plain_inductor [--device cuda] [--layers 8] [--dim 2048] [--rows 4] [--length 2048]

One process trains two copies of a LLaMA, in bfloat16 on a GPU and in float32 on a CPU, with fused AdamW: one compiled
by `parallelize` for a mesh of one rank, one by `torch.compile`. They take turns, some steps each. It prints medians of
the milliseconds of forward and backward and of whole steps, and their ratios; ours over Inductor's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.models.llama3 import Llama3, llama3_config

VOCABULARY = 32_000
WARM = 5


class WithLoss(nn.Module):
    """A LLaMA that returns its loss, so that the loss is compiled with it."""

    def __init__(self, layers: int, dim: int, length: int) -> None:
        super().__init__()
        heads = max(dim // 128, 1)
        sizes = {"n_layers": layers, "dim": dim, "n_heads": heads, "n_kv_heads": heads, "vocab_size": VOCABULARY}
        self.model = Llama3(llama3_config("debug", {**sizes, "max_seq_len": length}))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What runs, and the optimizer of its parameters."""

    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer


@dataclass(kw_only=True)
class Milliseconds:
    """Of single steps: forward and backward, and with the optimizer."""

    graphs: list[float]
    steps: list[float]


def contenders(given: argparse.Namespace, batch: tuple[Tensor, Tensor]) -> dict[str, Contender]:
    """Two copies of one module."""
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    torch.manual_seed(0)
    plain = WithLoss(given.layers, given.dim, given.length).to(given.device, dtype)
    sharded = WithLoss(given.layers, given.dim, given.length).to(given.device, dtype)
    sharded.load_state_dict(plain.state_dict())
    parallel = parallelize(sharded, batch, {"dp_shard": 1}, "ddp", loss_chunks=given.loss_chunks)
    return {
        "ours": Contender(loss=parallel, optimizer=torch.optim.AdamW(sharded.parameters(), fused=True)),
        "inductor": Contender(loss=torch.compile(plain), optimizer=torch.optim.AdamW(plain.parameters(), fused=True)),
    }


def step(contender: Contender, batch: tuple[Tensor, Tensor], wait: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds until gradients are there, and until parameters are new."""
    contender.optimizer.zero_grad()
    wait()
    start = time.perf_counter()
    contender.loss(*batch).backward()
    wait()
    between = time.perf_counter()
    contender.optimizer.step()
    wait()
    return (between - start) * 1e3, (time.perf_counter() - start) * 1e3


def run_in_turns(
    by_name: dict[str, Contender], batch: tuple[Tensor, Tensor], device: str, steps: int, rounds: int
) -> dict[str, Milliseconds]:
    """Every contender's times, some steps each in every round."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken = {name: Milliseconds(graphs=[], steps=[]) for name in by_name}
    for round_ in range(rounds + 1):
        for name, contender in by_name.items():
            for _ in range(steps if round_ else WARM):
                graphs, whole = step(contender, batch, wait)
                if round_:
                    taken[name].graphs.append(graphs)
                    taken[name].steps.append(whole)
    return taken


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--loss-chunks", type=int, default=1, help="the head is computed whole by Inductor")
    for name, default in (("layers", 8), ("dim", 2048), ("rows", 4), ("length", 2048), ("steps", 10), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (given.rows, given.length + 1), device=given.device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    taken = run_in_turns(contenders(given, batch), batch, given.device, given.steps, given.rounds)
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    print(
        f"{name}; {given.layers} layers of {given.dim}, {given.rows} x {given.length} tokens; medians in milliseconds"
    )
    for label, of in (("forward and backward", "graphs"), ("whole steps", "steps")):
        ours, plain = (statistics.median(getattr(taken[name], of)) for name in ("ours", "inductor"))
        print(f"{label:<22} ours {ours:9.3f}   inductor {plain:9.3f}   ratio {ours / plain:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
