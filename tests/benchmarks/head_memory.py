"""What the head of a language model takes: a process's peak with the loss whole, and in chunks of its rows.

    python -m tests.benchmarks.head_memory [--ranks 4] [--tokens 1536] [--chunks 8] [--interpreted]

Ranks train one layer of Llama 3 with its vocabulary of 128,256, in bfloat16 autocast, under fsdp over gloo. A peak is
the most that a step's process held above what it held before the step (Linux's `VmHWM`), of the rank with most, after a
first step. Beside it stands what is predicted: tensors that calls keep alive, and neither what kernels take for
themselves nor what compiled ones leave out.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.callbacks.peak_memory import memory_probe
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from tests.support.worlds import World

LENGTH = 256
OVERRIDES = {"n_layers": 1, "vocab_size": 128_256}
TIMEOUT_S = 900


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bytes of one step on one rank, and its loss."""

    measured_bytes: int
    predicted_bytes: int
    loss: float


class Speaker(nn.Module):
    """The loss of one layer between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama3(llama3_config("debug", OVERRIDES))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def step_peak(tokens: int, chunks: int, compiles: bool) -> Peak:
    """The second of two steps, on this rank."""
    torch.manual_seed(0)
    rows, ranks = max(1, tokens // LENGTH), torch.distributed.get_world_size()
    whole = [torch.randint(0, OVERRIDES["vocab_size"], (rows * ranks, LENGTH)) for _ in range(2)]
    mesh = {"dp_shard": ranks}
    parallel = parallelize(Speaker(), tuple(whole), mesh, "fsdp", compile=compiles, loss_chunks=chunks)
    batch = [tensor[:rows] for tensor in whole]
    parallel(*batch).backward()
    parallel.zero_grad()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    probe = memory_probe(torch.device("cpu"))
    probe.reset()
    before = probe.peak_bytes()
    loss = parallel(*batch)
    loss.backward()
    predicted = parallel.report.predicted_peak_bytes
    assert predicted is not None, parallel.report.notes
    return Peak(
        measured_bytes=probe.peak_bytes() - before,
        predicted_bytes=predicted,
        loss=loss.item(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both sides and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1536, help="of each rank")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--interpreted", action="store_true", help="as the graph's calls stand, not compiled")
    given = parser.parse_args(arguments)
    measured: list[int] = []
    predicted: list[int] = []
    for chunks in (1, given.chunks):
        world = World(given.ranks)
        peaks = world.run(step_peak, given.tokens, chunks, not given.interpreted, timeout_s=TIMEOUT_S)
        world.stop()
        measured.append(max(peak.measured_bytes for peak in peaks))
        predicted.append(max(peak.predicted_bytes for peak in peaks))
        mib = f"measured {measured[-1] / 2**20:8.1f} MiB, predicted {predicted[-1] / 2**20:8.1f} MiB"
        print(f"{chunks:>3} chunks: {mib}, loss {peaks[0].loss:.6f}", flush=True)
    print(f"in chunks / whole: measured {measured[1] / measured[0]:.2f}, predicted {predicted[1] / predicted[0]:.2f}")


if __name__ == "__main__":
    main()
