"""Whether one decomposition pays, by predicted times.

Whole, a gather and its products take what of the gather is exposed, then the products. In parts, products run beside
transfers, but for the first transfer and what does not fit: the longer of both sums and two transfers more must be
less. Scatters likewise, with what is exposed of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.decompose.gathers import Gather
from lightning_autoparallel.passes.decompose.options import DecomposeOptions
from lightning_autoparallel.passes.decompose.product_parts import Product, is_narrow
from lightning_autoparallel.passes.decompose.scatters import Scatter
from lightning_autoparallel.torch_compat.rank_operators import WIDE_PRODUCT

_FLOOR = 0.5  # of a transfer's bandwidth: smaller shards mostly wait for its latency


@dataclass(frozen=True, kw_only=True)
class Times:
    """Predicted microseconds of a candidate: its products whole and in parts, and its transfers one by one."""

    whole_us: float
    parts_us: float
    transfer_us: float
    transfers: int

    def decomposed_us(self) -> float:
        """The products in parts beside transfers, and two transfers that nothing hides."""
        return max(self.parts_us, self.transfers * self.transfer_us) + 2 * self.transfer_us

    def refusal(self, exposed_us: float) -> str | None:
        """Why it stays whole where ``exposed_us`` of its collective are exposed; None if decomposed it is faster."""
        if self.decomposed_us() < self.whole_us + exposed_us:
            return None
        return (
            f"decomposed {self.decomposed_us():.0f} us (products in parts {self.parts_us:.0f}, {self.transfers} "
            f"transfers of {self.transfer_us:.0f}), whole {self.whole_us + exposed_us:.0f} us (exposed "
            f"{exposed_us:.0f}, products {self.whole_us:.0f})"
        )


def times_of(found: Gather | Scatter, options: DecomposeOptions, costs: CostModel) -> Times:
    """What ``found`` takes, whole and in parts.

    Raises:
        UnsupportedOpError: nothing is known of the process group.
        ConfigError: the hardware has no peak for the dtype of a product.
    """
    broadcasts = options.order == "broadcast" and isinstance(found, Gather)
    products = _products(found)
    return Times(
        whole_us=sum(costs.node_time_us(product.node) for product, _, _ in products),
        parts_us=found.ranks * sum(_part_time_us(*product, found.ranks, costs) for product in products),
        transfer_us=costs.launch_time_us("broadcast" if broadcasts else "permute", shard_bytes(found), found.group),
        transfers=found.ranks if broadcasts else found.ranks - 1,
    )


def shard_bytes(found: Gather | Scatter) -> int:
    """Bytes that one transfer moves."""
    shard: Tensor = (found.shard if isinstance(found, Gather) else found.node).meta["val"]
    return fxn.size_bytes(shard)


def too_small(found: Gather | Scatter, costs: CostModel) -> str | None:
    """Why its shards are too small to be sent one by one; None if they are large enough.

    Raises:
        UnsupportedOpError: nothing is known of the process group.
    """
    floor = costs.saturating_bytes("permute", found.group, _FLOOR)
    size = shard_bytes(found)
    return None if size >= floor else f"shards of {size} bytes are below {floor}: a transfer is mostly latency"


# A product, the dims of its left and its right operand that parts have less of, whether parts are addends.
_Parts = tuple[Product, tuple[int | None, int | None], bool]


def _products(found: Gather | Scatter) -> Sequence[_Parts]:
    if isinstance(found, Gather):
        return [(one.product, one.cut_dims, one.kind == "contracting") for one in found.products]
    return [(product, _scattered_dims(product, found.cuts[product.node].dim), False) for product in found.products]


def _scattered_dims(product: Product, dim: int) -> tuple[int | None, int | None]:
    last = product.node.meta["val"].dim() - 1
    if product.is_batch and dim == 0:
        return 0, 0
    return (None, dim) if dim == last else (dim, None)


def _part_time_us(
    product: Product, dims: tuple[int | None, int | None], adds: bool, ranks: int, costs: CostModel
) -> float:
    """The product of one rank's part, as a call by itself."""
    graph = fx.Graph()
    target, operands = product.node.target, []
    for operand, dim in zip((product.left, product.right), dims, strict=True):
        value: Tensor = operand.meta["val"]
        shape = [size // ranks if axis == dim else size for axis, size in enumerate(value.shape)]
        placeholder = graph.placeholder("operand")
        placeholder.meta["val"] = torch.empty(shape, dtype=value.dtype, device="meta")
        operands.append(placeholder)
    if product.bias is not None or adds:
        target = torch.ops.aten.bmm.default if product.is_batch else torch.ops.aten.mm.default
    if adds and is_narrow(product.node.meta["val"].dtype):
        target = WIDE_PRODUCT
    call = graph.call_function(target, tuple(operands))  # type: ignore[arg-type]
    call.meta["val"] = target(*(operand.meta["val"] for operand in operands))  # type: ignore[operator]
    return costs.node_time_us(call)
