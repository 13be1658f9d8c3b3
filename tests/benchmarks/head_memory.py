"""What the head of a language model takes: a process's peak with the loss whole, and in chunks of its rows.

    python -m tests.benchmarks.head_memory [--ranks 4] [--tokens 1536] [--chunks 8] [--interpreted]

Ranks train one layer of Llama 3 with its vocabulary of 128,256, in bfloat16 autocast, under fsdp over gloo. A peak is
the most that a step's process held above what it held before the step (Linux's `VmHWM`), of the rank with most, after a
first step. Beside it stands what is predicted: tensors that calls keep alive, and neither what kernels take for
themselves nor what compiled ones leave out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_autoparallel import parallelize
from tests.benchmarks.saving import Meter
from tests.numerics.memory import Llama3Loss
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


def step_peak(tokens: int, chunks: int, compiles: bool) -> Peak:
    """The second of two steps, on this rank."""
    torch.manual_seed(0)
    rows, ranks = max(1, tokens // LENGTH), torch.distributed.get_world_size()
    whole = [torch.randint(0, OVERRIDES["vocab_size"], (rows * ranks, LENGTH)) for _ in range(2)]
    mesh = {"dp_shard": ranks}
    module = Llama3Loss(autocast=True, overrides=OVERRIDES)
    parallel = parallelize(module, tuple(whole), mesh, "fsdp", compile=compiles, loss_chunks=chunks)
    batch = [tensor[:rows] for tensor in whole]
    parallel(*batch).backward()
    parallel.zero_grad()
    meter = Meter()
    meter.start()
    loss = parallel(*batch)
    loss.backward()
    predicted = parallel.report.predicted_peak_bytes
    assert predicted is not None, parallel.report.notes
    return Peak(measured_bytes=meter.bytes_above, predicted_bytes=predicted, loss=loss.item())


def peak(ranks: int, tokens: int, chunks: int, compiles: bool) -> Peak:
    """That of the rank with most."""
    world = World(ranks)
    peaks = world.run(step_peak, tokens, chunks, compiles, timeout_s=TIMEOUT_S)
    world.stop()
    return max(peaks, key=lambda one: one.measured_bytes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both sides and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1536, help="of each rank")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--interpreted", action="store_true", help="as the graph's calls stand, not compiled")
    given = parser.parse_args(arguments)
    whole, chunked = (peak(given.ranks, given.tokens, chunks, not given.interpreted) for chunks in (1, given.chunks))
    for chunks, one in ((1, whole), (given.chunks, chunked)):
        mib = f"measured {one.measured_bytes / 2**20:8.1f} MiB, predicted {one.predicted_bytes / 2**20:8.1f} MiB"
        print(f"{chunks:>3} chunks: {mib}, loss {one.loss:.6f}")
    measured, predicted = chunked.measured_bytes / whole.measured_bytes, chunked.predicted_bytes / whole.predicted_bytes
    print(f"in chunks / whole: measured {measured:.2f}, predicted {predicted:.2f}")


if __name__ == "__main__":
    main()
