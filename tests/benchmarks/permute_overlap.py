"""Transfers run beside products: a decomposed gather whose products sleep, against all transfers first.

    python -m tests.benchmarks.permute_overlap [RANKS]

Every product of one shard is replaced by sleeping as long as a transfer takes, so that no processor is needed for it.
Pipelined, as `decompose_gather_matmul` writes it, transfers run while ranks sleep; the other way all of them are waited
for first. Prints the median of both over rounds in turn and their ratio, and ends with status 1 above `LIMIT`. Of d
ranks with equal times the ratio is d / (2 d - 1) if nothing but sleeping and transfers took time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lightning_autoparallel.compile import specialize
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.passes.scheduling.calls import is_heavy
from lightning_autoparallel.torch_compat.collectives import group_place
from tests.support.rings import decompose, rank_inputs, ring_graph
from tests.support.worlds import World

LIMIT = 0.85
RANKS, ROWS, WIDTH = 4, 2048, 1024  # 8 MiB a shard
WARMUP, ROUNDS = 3, 15


def measure() -> tuple[float, float, float]:
    """Seconds of one transfer, of a pipelined gather, and of transfers first: medians over rounds."""
    ranks = dist.get_world_size()
    axis = build_mesh(MeshSpec.from_mapping({"tp": ranks}), "cpu").plan_axis(("tp",))
    assert axis is not None
    graph, given = ring_graph("gather", "rows", ranks, rows=ROWS, width=WIDTH, group=axis.group_name)
    inputs = rank_inputs(given, ranks, torch.float32, integers=True)[axis.rank]
    decompose(graph, "gather")
    specialize(graph, group_place)
    transfers_first = _sleeping(graph, 0.0, in_turn=True)
    for _ in range(WARMUP):
        _seconds(transfers_first, inputs)
    transfer_s = _everywhere(statistics.median(_seconds(transfers_first, inputs) for _ in range(ROUNDS))) / (ranks - 1)
    ways = (_sleeping(graph, transfer_s, in_turn=False), _sleeping(graph, transfer_s, in_turn=True))
    seconds = [[_seconds(way, inputs) for way in ways] for _ in range(ROUNDS)]
    pipelined, in_turn = (_everywhere(statistics.median(column)) for column in zip(*seconds, strict=True))
    return transfer_s, pipelined, in_turn


def _sleeping(graph: fx.Graph, seconds: float, *, in_turn: bool) -> Callable[..., list[Tensor]]:
    """The graph with products that sleep; `in_turn` with all transfers ahead of the first of them."""
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    products = [node for node in copied.nodes if is_heavy(node)]
    if in_turn:
        first = products[0]
        for node in list(copied.nodes):
            if fxn.collective_kind(node) or fxn.is_wait(node):
                first.prepend(node)
    for node in products:
        node.target = _sleeper(seconds)
    return fx.GraphModule(nn.Module(), copied)


def _sleeper(seconds: float) -> Callable[[Tensor, Tensor], Tensor]:
    def sleep(left: Tensor, right: Tensor) -> Tensor:
        time.sleep(seconds)
        return left.new_zeros(left.shape[0], right.shape[1])

    return sleep


def _seconds(run: Callable[..., list[Tensor]], inputs: list[Tensor]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run(*inputs)
    return time.perf_counter() - start


def _everywhere(seconds: float) -> float:
    """The slowest rank's."""
    value = torch.tensor([seconds])
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def main(ranks: int) -> int:
    """Print the figures; the exit status."""
    world = World(ranks)
    try:
        transfer_s, pipelined, in_turn = world.run(measure)[0]
    finally:
        world.stop()
    ratio = pipelined / in_turn
    print(
        f"{ranks} ranks over gloo, one transfer {1e3 * transfer_s:.1f} ms (measured): pipelined {1e3 * pipelined:.1f} "
        f"ms, transfers first {1e3 * in_turn:.1f} ms, ratio {ratio:.2f} (at most {LIMIT})"
    )
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else RANKS))
