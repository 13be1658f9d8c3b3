"""One rank of `slow_matmul`: the same MLP whole and decomposed, compared and then timed in turns."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.cli.bench.batch_clock import sent_bytes
from lightning_autoparallel.cli.bench.processes import result_path
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from lightning_autoparallel.pipeline import ParallelModule
from tests.benchmarks.slow_matmul import EXCHANGED, RANKS, WHOLE, Measured, Results, gather_ms, write

RULES = {
    "mlp.up.weight": {"tp": "S(0)"},
    "mlp.down.weight": {"tp": "S(1)"},
    "outputs:norm": {"tp": "S(1)"},
    "outputs:mlp": {"tp": "S(1)"},
}
_PROBE, _STEP = 512, 128  # columns of one rank with which a product is timed, and to whose multiples they are rounded


class Mlp(nn.Module):
    """`relu(x @ up) @ down`."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Model(nn.Module):
    """The MLP as blocks have it, `x + mlp(norm(x))`, in shards of rows; `scored` returns a scalar, not all rows."""

    def __init__(self, width: int, hidden: int, scored: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)
        self.scored = scored

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mlp(self.norm(x))
        return y.square().mean() if self.scored else y


def run(arguments: argparse.Namespace) -> None:
    """Compare and time all contenders; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = build_mesh(MeshSpec.from_mapping({"tp": RANKS}), "cpu")
    hidden, product_ms = _fitted(arguments)
    x = torch.randn(1, arguments.rows, arguments.width, generator=torch.Generator().manual_seed(1))
    make = partial(_made, mesh, x, hidden)
    ways = _ways(arguments.orders, arguments.gathers_only)
    with torch.no_grad():
        results = {name: make(way, scored=False)(x) for name, way in ways.items()}
        made = {name: make(way, scored=True) for name, way in ways.items()}
        for _ in range(arguments.warm_up):
            for module in made.values():
                module(x)
        steps: dict[str, list[tuple[float, float, float]]] = {name: [] for name in made}
        names = list(made)
        for turn in range(arguments.rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                steps[name].append(_step(made[name], x))
    whole = results[WHOLE]
    contenders = {}
    for name, module in made.items():
        difference = float((results[name] - whole).norm() / whole.norm())
        contenders[name] = _measured(steps[name], _launches(module), _everywhere(difference))
    if dist.get_rank() == 0:
        found = Results(hidden=hidden, product_ms=product_ms, contenders=contenders)
        result_path(arguments.as_rank_in, 0).write_text(write(found))
    dist.barrier()
    dist.destroy_process_group()


def _ways(orders: Sequence[str], gathers_only: bool) -> dict[str, dict[str, Any]]:
    """What each contender is made with."""
    gloos_own = {"disabled_passes": ("decompose_matmul_scatter", "exchange_reduce_scatters")}
    ways: dict[str, dict[str, Any]] = {WHOLE: {"decompose_matmuls": "never", **gloos_own}}
    if not gathers_only:
        ways[EXCHANGED] = {"decompose_matmuls": "never"}
    kept = gloos_own if gathers_only else {}
    return ways | {order: {"decompose_matmuls": {"when": "always", "order": order}, **kept} for order in orders}


def _made(mesh: ParallelMesh, x: Tensor, hidden: int, way: dict[str, Any], *, scored: bool) -> ParallelModule:
    torch.manual_seed(0)
    module = Model(x.shape[-1], hidden, scored)
    plan = {"base": "fsdp", "rules": RULES}
    return parallelize(module, (x,), mesh, plan, compile=False, **way)


def _fitted(arguments: argparse.Namespace) -> tuple[int, float]:
    """The hidden width, and the milliseconds of one rank's product with it while all ranks multiply."""
    columns = arguments.hidden // RANKS or _PROBE
    product_ms = _product_ms(arguments, columns)
    if arguments.hidden:
        return arguments.hidden, product_ms
    fitting = max(1, round(columns * gather_ms(arguments) / product_ms / _STEP)) * _STEP
    return RANKS * fitting, product_ms * fitting / columns


def _product_ms(arguments: argparse.Namespace, columns: int) -> float:
    left, right = torch.randn(arguments.rows, arguments.width), torch.randn(arguments.width, columns)
    found = []
    for _ in range(6):
        dist.barrier()
        start = time.perf_counter()
        torch.mm(left, right)
        found.append(_everywhere(time.perf_counter() - start) * 1e3)
    return statistics.median(found[1:])


def _step(module: ParallelModule, x: Tensor) -> tuple[float, float, float]:
    """Seconds of the slowest rank, bytes of the busier host, and seconds that all processors computed."""
    dist.barrier()
    sent, cpu, start = _sent(), time.process_time(), time.perf_counter()
    module(x)
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    dist.barrier()
    figures = torch.tensor([seconds, float(_sent() - sent), used], dtype=torch.float64)
    slowest, total = figures.clone(), figures.clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return float(slowest[0]), float(slowest[1]), float(total[2])


def _sent() -> int:
    return sent_bytes(os.environ.get("GLOO_SOCKET_IFNAME"), Path("/proc/net/dev").read_text()) or 0


def _everywhere(value: float) -> float:
    """The largest rank's."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _launches(module: ParallelModule) -> str:
    tables = module.report.collectives.values()
    counts = {kind: sum(one.count for one in axes.values()) for table in tables for kind, axes in table.items()}
    return " ".join(f"{count} {kind}" for kind, count in counts.items())


def _measured(steps: list[tuple[float, float, float]], launches: str, difference: float) -> Measured:
    seconds, sent, cpu = (list(column) for column in zip(*steps, strict=True))
    return Measured(
        step_ms=[1e3 * one for one in seconds],
        sent_bytes=sent,
        cpu_ms=[1e3 * one for one in cpu],
        launches=launches,
        difference=difference,
    )
