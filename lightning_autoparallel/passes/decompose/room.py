"""Whether there is room for the parts of products, which are all kept until they are put together."""

from __future__ import annotations

import torch
from torch import fx

from lightning_autoparallel.cost.liveness import Surroundings, predict_memory
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.decompose.gathers import Gather
from lightning_autoparallel.passes.decompose.product_parts import CutProduct, is_narrow
from lightning_autoparallel.passes.scheduling.live import EXTRA_BYTES


class Room:
    """Live bytes at the calls of a graph in its present order, and how many there may be.

    Raises:
        UnsupportedOpError: a node has no recorded value.
    """

    def __init__(self, graph: fx.Graph, around: Surroundings) -> None:
        memory = predict_memory(graph, surroundings=around)
        self._live_bytes = dict(zip(graph.nodes, memory.live_bytes, strict=True))
        self._most_bytes = max(max(memory.peak_bytes, around.elsewhere_bytes) + EXTRA_BYTES, around.room_bytes)

    def refusal(self, gather: Gather) -> str | None:
        """Why a gather stays whole for the room that its products' parts take; None where there is as much."""
        first = gather.products[0]  # all parts are where the first product is
        left = self._most_bytes - self._live_bytes[first.product.node]
        more = parts_bytes(gather) - fxn.size_bytes(first.product.operand(first.side).meta["val"])
        if more <= left:
            return None
        return f"its products' parts, all kept until the last, would take {more / 2**20:.0f} MiB more: there is no room"


def parts_bytes(gather: Gather) -> int:
    """Of the parts of all products, which are there at once; addends, and their sum, are as large as it or larger."""
    return sum(_bytes_of(one, gather.ranks) for one in gather.products)


def _bytes_of(one: CutProduct, ranks: int) -> int:
    value: torch.Tensor = one.product.node.meta["val"]
    if one.kind != "contracting":
        return fxn.size_bytes(value)
    itemsize = torch.float32.itemsize if is_narrow(value.dtype) else value.dtype.itemsize
    return (ranks + 1) * value.numel() * itemsize
