"""Where no plan fits a rank: which single change would make the leanest one fit, by estimate.

Fewer rows and more recomputing shrink what the backward reads, more ranks their shards, which are taken to divide on.
Everything else is taken to stay as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from lightning_autoparallel.contracts import CapturedGraph, ShardingPlan
from lightning_autoparallel.cost import HardwareSpec
from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import is_shard
from lightning_autoparallel.pipeline.predict import global_rows, stored_bytes
from lightning_autoparallel.pipeline.rank_memory import read_bytes, saved_bytes
from lightning_autoparallel.plan import Activations

_MOST_TIMES = 64  # as many ranks
_AT_ONCE = 3  # whole copies of a block's parameters: gathered, the next one's, and gradients
ActivationsWith = Callable[[str], Activations]


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """The leanest plan of a step, for which a rank needs more than the ``budget_bytes`` that it may use.

    ``kept_bytes`` are those of parameters and the optimizer's state, ``activations`` what its backward reads.
    Axes other than dp_* stay in a node of the ``hardware``. Parameters are ``gathered_again`` for the backward, or all
    stay gathered until then. Gradients of micro-batches ``add_up``, or what earlier ones would take is not counted yet.
    """

    captured: CapturedGraph
    plan: ShardingPlan
    needed_bytes: float
    kept_bytes: float
    activations: Activations
    budget_bytes: float
    hardware: HardwareSpec
    gathered_again: bool
    add_up: bool


class TooLargeError(InfeasiblePlanError):
    """No plan fits the memory of a rank: ``shortfall`` is that of the leanest one that was found."""

    def __init__(self, message: str, shortfall: Shortfall) -> None:
        super().__init__(message)
        self.shortfall = shortfall


def remedies(short: Shortfall, shards: int, stronger: Collection[str], activations_with: ActivationsWith) -> str:
    """Single changes after which the plan would fit, each with the GiB that a rank would need then.

    The batch is in so many ``shards``. ``stronger`` are policies that recompute more than was asked for, with which the
    backward reads ``activations_with``.
    """
    changes = [
        *_recomputing(short, stronger, activations_with),
        *_fewer_rows(short, shards),
        *_more_ranks(short),
    ]
    fitting = [f"{what} ({_gib(needed)} GiB)" for what, needed in changes if needed <= short.budget_bytes]
    if fitting:
        return f"by estimate one of these changes is enough: {', or '.join(fitting)}"
    what, needed = min(changes, key=lambda change: change[1])
    still = f"{what} still takes {_gib(needed)} GiB"
    return f"no single change of recomputing, rows or ranks is enough by estimate: {still}"


def _recomputing(
    short: Shortfall, stronger: Collection[str], activations_with: ActivationsWith
) -> Iterator[tuple[str, float]]:
    """The weakest policy that is enough, or else the strongest, if it helps."""
    before_bytes = read_bytes(short.captured, short.plan, short.activations)
    for place, policy in enumerate(stronger):
        with_it = read_bytes(short.captured, short.plan, activations_with(policy))
        needed = short.needed_bytes + short.hardware.reserved_bytes(with_it - before_bytes)
        if needed >= short.needed_bytes:
            continue
        if needed <= short.budget_bytes or place == len(stronger) - 1:
            yield f"activation_checkpointing {policy!r}", needed
            return


def _fewer_rows(short: Shortfall, shards: int) -> Iterator[tuple[str, float]]:
    """The fewest parts that the rows of a rank are taken in, or else one row at a time."""
    rows = (global_rows(short.captured) or 0) // shards
    of_rows = _bytes_of_rows(short)
    added_to = 0.0 if short.add_up else _gradients(short)
    for parts in (parts for parts in range(2, rows + 1) if rows % parts == 0):
        needed = short.needed_bytes + short.hardware.reserved_bytes(added_to - of_rows * (1 - 1 / parts))
        if needed <= short.budget_bytes or parts == rows:
            what = f"{rows // parts} rows per rank, not {rows}, with accumulate_grad_batches {parts} times as large"
            yield what, needed
            return


def _bytes_of_rows(short: Shortfall) -> float:
    """Of the peak, what is neither gradients nor what is gathered for two blocks, and a gradient before it is reduced.

    Those are reckoned as if nothing was cast for computing, which is the most that they may be.
    """
    shapes = zip(short.captured.graph_module.graph.find_nodes(op="placeholder"), short.captured.inputs, strict=True)
    blocks: Counter[str | None] = Counter()
    for node, item in shapes:
        if item.kind == "parameter":
            blocks[fxn.block_of(item.name)] += fxn.size_bytes(node.meta["val"])
    largest = max(blocks.values(), default=0)
    passing = _AT_ONCE * largest if short.gathered_again else blocks.total() + (_AT_ONCE - 1) * largest
    gradients = _gradients(short)
    peak = short.hardware.usable_bytes(short.needed_bytes) - short.kept_bytes
    return max(peak - gradients - passing, min(_saved_bytes(short), peak))


def _more_ranks(short: Shortfall) -> Iterator[tuple[str, float]]:
    """As few times more ranks on an axis as are enough, or else the most that are looked at."""
    stays = short.kept_bytes + _gradients(short)
    yield from _times_more(short, "dp_shard", stays, _MOST_TIMES)
    for position, axis in enumerate(short.plan.axes):
        if not axis.shards_batch:
            cut = {name for name in short.activations.saved if _is_cut(short.plan, name, position)}
            shared_out = stays + _sum(saved_bytes(short.captured, short.plan, cut))
            yield from _times_more(short, axis.name, shared_out, short.hardware.ranks_per_node // axis.size)


def _times_more(short: Shortfall, axis: str, shared_out: float, most: int) -> Iterator[tuple[str, float]]:
    times, needed = 1, math.inf
    while needed > short.budget_bytes and times * 2 <= most:
        times *= 2
        needed = short.needed_bytes - short.hardware.reserved_bytes(shared_out * (1 - 1 / times))
    if times > 1:
        yield f"{times} times the ranks on {axis}", needed


def _is_cut(plan: ShardingPlan, name: str, position: int) -> bool:
    placements = plan.nodes[name].outputs[0] or ()
    return position < len(placements) and is_shard(placements[position])


def _gradients(short: Shortfall) -> float:
    """Of a micro-batch, and of earlier ones where they add up."""
    copies = 2 if short.add_up else 1
    return copies * _sum(stored_bytes(short.captured, short.plan, trained_only=True))


def _saved_bytes(short: Shortfall) -> float:
    return _sum(saved_bytes(short.captured, short.plan, short.activations.saved))


def _sum(sizes_bytes: Mapping[str, float]) -> float:
    return sum(sizes_bytes.values())


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.3g}"
