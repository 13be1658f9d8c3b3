"""What a planned step takes of a rank's memory, by what it is for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping

from lightning_autoparallel.contracts import CapturedGraph, MemoryShare, ShardingPlan
from lightning_autoparallel.cost import HardwareSpec
from lightning_autoparallel.cost.optimizer import ADAMW, OptimizerState
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import is_shard
from lightning_autoparallel.pipeline.fastest_plan import Contender
from lightning_autoparallel.pipeline.predict import stored_bytes
from lightning_autoparallel.plan import Activations

_SHOWN = 3


def kept_bytes(captured: CapturedGraph, plan: ShardingPlan, state: OptimizerState = ADAMW) -> float:
    """Of parameters, and of the optimizer's state of those that are trained, on one rank."""
    trained = stored_bytes(captured, plan, trained_only=True)
    kept = sum(size * state.of(name) for name, size in trained.items())
    return sum(stored_bytes(captured, plan).values()) + kept


def may_be_spared_bytes(captured: CapturedGraph, plan: ShardingPlan, state: OptimizerState, ranks: int) -> float:
    """Of parameters, gradients and the optimizer's state on a rank, what is more than its share of them."""
    stored, trained = stored_bytes(captured, plan), stored_bytes(captured, plan, trained_only=True)
    spared = 0.0
    for node, item in zip(captured.graph_module.graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        if item.kind == "parameter":
            share = fxn.size_bytes(node.meta["val"]) / ranks
            copies = 2 + state.of(item.name) if item.name in trained else 1
            spared += max(stored[item.name] - share, 0.0) * copies
    return spared


def most_bytes(captured: CapturedGraph) -> float:
    """More than a step can take: all that it ever makes, at once."""
    nodes = [node for node in captured.graph_module.graph.nodes if node.op == "call_function"]
    made = [value for node in nodes if not fxn.is_getitem(node) for value in fxn.values(node) if value is not None]
    return float(sum(map(fxn.size_bytes, made)))


def saved_bytes(captured: CapturedGraph, plan: ShardingPlan, saved: Collection[str]) -> dict[str, float]:
    """Bytes on a rank of each of these values, by the node that makes it."""
    found = {}
    for node in captured.graph_module.graph.nodes:
        value = fxn.values(node)[0] if node.name in saved else None
        if value is not None:
            placements = plan.nodes[node.name].outputs[0] or ()
            pairs = zip(placements, plan.axes, strict=False)
            parts = math.prod(axis.size for placement, axis in pairs if is_shard(placement))
            found[node.name] = fxn.size_bytes(value) / parts
    return found


def read_bytes(captured: CapturedGraph, plan: ShardingPlan, activations: Activations) -> float:
    """On a rank of what the backward reads: all that is saved, and the largest set of what is recomputed."""
    named = {name for again in activations.recomputed for name in again}
    sizes = saved_bytes(captured, plan, named)
    again = (sum(sizes.get(name, 0.0) for name in together) for together in activations.recomputed)
    return sum(saved_bytes(captured, plan, activations.saved).values()) + max(again, default=0.0)


def why_over(
    captured: CapturedGraph,
    leanest: Contender,
    saved: Mapping[str, float],
    hardware: HardwareSpec,
    budget_bytes: float,
) -> str:
    """Why the plan that takes least, of those that were found, is too large."""
    kinds: Counter[str] = Counter()
    for node in captured.graph_module.graph.nodes:
        if node.name in saved:
            path = fxn.module_path(node)
            kinds[fxn.kind_of(path) if path else "the step itself"] += int(saved[node.name])
    shown = ((kind, hardware.reserved_bytes(size)) for kind, size in kinds.most_common(_SHOWN))
    most = ", ".join(f"{kind} {size / 2**30:.3g}" for kind, size in shown)
    shares = leanest.forecast.largest
    largest = ", ".join(f"{_called(share)} {share.size_bytes / 2**30:.3g}" for share in shares)
    if shares and shares[0].module and hardware.reserved_bytes(shares[0].size_bytes) > budget_bytes:
        largest += ": no plan makes the first of them smaller, other axes of the mesh (tp) may, or a smaller module"
    total, peak = hardware.reserved_bytes(sum(saved.values())), hardware.reserved_bytes(leanest.forecast.peak_bytes)
    kept = hardware.reserved_bytes(leanest.kept_bytes)
    return (
        f"the leanest plan that was found needs {leanest.needed_bytes / 2**30:.3g} GiB of a rank, of "
        f"{budget_bytes / 2**30:.3g} that it may use: activations, gradients and what is gathered take "
        f"{peak / 2**30:.3g} at the step's peak, beside {kept / 2**30:.3g} of parameters and "
        f"the optimizer's state; what the backward reads is {total / 2**30:.3g} of it (most: {most}), the largest "
        f"values are {largest}"
    )


def _called(share: MemoryShare) -> str:
    return f"{share.name} of {share.module}" if share.module else share.name
