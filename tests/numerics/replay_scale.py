"""Both partitions of LLaMA-3 8B on a fake world, in this one process, without its weights.

    python -m tests.numerics.replay_scale [LAYERS] [RANKS] [CHECKPOINTING]

Prints what `parallelize` and a `torch.compile` around it launch and save, and the seconds that both took.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import autoparallel_backend, parallelize
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.torch_compat.collectives import init_fake_world
from tests.support.replay import Halves, first_partition, launches, saved_bytes, second_partitions


class Language(nn.Module):
    """LLaMA-3 8B, its loss included; nothing is drawn, as no values are computed."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net = Llama3(llama3_config("8B", {"n_layers": layers}))
        for module in self.net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters = lambda: None

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten())


def main(layers: int, ranks: int, checkpointing: str = "none", rows: int = 2, sequence: int = 8192) -> None:
    """Print the figures; leaves no process group."""
    init_fake_world(ranks)
    start = time.perf_counter()
    batch = [torch.zeros(rows * ranks, sequence, dtype=torch.long) for _ in range(2)]
    parallel = parallelize(
        Language(layers), (*batch,), {"dp_shard": ranks}, "fsdp", compile=False, activation_checkpointing=checkpointing
    )
    planned = time.perf_counter()
    first = Halves.of(first_partition(parallel))
    with second_partitions(lower=False) as seen:
        torch.compile(parallel, backend=autoparallel_backend(compile=False), fullgraph=True)(*(b[:rows] for b in batch))
    (second,) = seen
    for name, halves in {"first": first, "second": second}.items():
        print(name, "forward", launches(halves.forward), "backward", launches(halves.backward))
        print(name, "saved bytes", saved_bytes(halves))
    print(f"seconds: parallelize {planned - start:.1f}, second partition {time.perf_counter() - planned:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    given = sys.argv[1:] or ["32", "64"]
    main(int(given[0]), int(given[1]), *given[2:])
