"""``exchange_reduce_scatters``: over gloo, ranks exchange the parts of a reduce-scatter and add them up themselves.

Torch's gloo has no reduce-scatter of its own: ``ProcessGroupGloo`` reduces the whole tensor on all ranks and copies one
part (torch 2.13, ``reduce_scatter_tensor_coalesced``), so that twice the bytes are sent. In an all-to-all every rank
is sent just the parts that it adds up. Adding is done in the order of ranks, and in float32 where parts are narrower.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls, FakeResults
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten

_ADDED_BY: dict[str, Any] = {"sum": aten.sum.dim_IntList, "avg": aten.mean.dim}


def exchange_reduce_scatters(
    graph: fx.Graph, *, backend: str | None = None, costs: CostModel | None = None
) -> tuple[str, ...]:
    """Replace reduce-scatters by an all-to-all and a sum where ``backend`` is gloo and ``costs`` say that it is faster.

    An all-to-all goes to every rank by itself: where many ranks of a node share its link, the ring of an all-reduce
    may be the faster one. Peak memory grows by what is received, which gloo else allocates where nobody counts it.
    """
    if backend != "gloo" or costs is None:
        return ()
    results = FakeResults()
    notes: Counter[str] = Counter()
    for node in list(fxn.collectives_of(graph)):
        if node.target is not collectives.REDUCE_SCATTER:
            continue
        reason = _reason_against(node, costs)
        if reason is None:
            _exchange(node, results)
        notes["exchanged, and added up on each rank" if reason is None else f"left to gloo: {reason}"] += 1
    return tuple(f"{count} reduce_scatter {note}" for note, count in notes.items())


def _reason_against(node: fx.Node, costs: CostModel) -> str | None:
    operand, reduce_op, _, group = node.args
    assert isinstance(operand, fx.Node)
    value: Tensor = operand.meta["val"]
    if reduce_op not in _ADDED_BY or not value.dtype.is_floating_point:
        return f"{reduce_op} of {value.dtype}"
    if not all(type(size) is int for size in value.shape):
        return "rows of unknown number"
    if len(fxn.waits_of(node)) != len(node.users):
        return "what is waited for is a view of it"
    size_bytes = fxn.collective_size_bytes(node)
    try:
        exchange_us, reduce_us = (
            costs.launch_time_us(kind, size_bytes, str(group)) for kind in ("all_to_all", "all_reduce")
        )
    except UnsupportedOpError:
        return "the cost of its group is not known"
    return None if exchange_us < reduce_us else f"an exchange of {exchange_us:.0f} us is no faster than {reduce_us:.0f}"


def _exchange(node: fx.Node, results: FakeResults) -> None:
    operand, reduce_op, ranks, group = node.args
    assert isinstance(operand, fx.Node) and isinstance(ranks, int)
    call = Calls(node, results=results)
    sent = call.contiguous(operand)
    rows, *rest = sent.meta["val"].shape
    splits = [rows // ranks] * ranks
    exchanged = call(collectives.ALL_TO_ALL, sent, splits, splits, group)
    if fxn.collective_role(node) is not None:
        exchanged.meta["collective_role"] = fxn.collective_role(node)
    for wait in fxn.waits_of(node):
        here = Calls(wait, results=results)
        received = here(collectives.WAIT, exchanged)
        parts = here.view(received, [ranks, rows // ranks, *rest])
        wait.replace_all_uses_with(here(_ADDED_BY[str(reduce_op)], parts, [0]))
        node.graph.erase_node(wait)
    node.graph.erase_node(node)
