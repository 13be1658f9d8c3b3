"""``chunk_loss_head``: the widest value of a step, a language model's logits, is never whole.

The product with the vocabulary, the loss of its rows and their gradients are computed for some rows at a time, in the
forward: what a loss's gradient is a multiple of is known there. The backward scales what it finds. No product is
computed twice, and neither logits nor probabilities are kept. ``loss_head/`` says which calls these are.

The idea of computing a head's gradient beside its loss is that of Liger Kernel (Hsu et al. 2024, arXiv:2410.10989,
sec. 3.2), which has it as one operator for one loss; here it is whatever a step does with its rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import fx

from lightning_autoparallel.contracts import GraphInput, MemoryShare
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.memory import StepMemory
from lightning_autoparallel.errors import ConfigError, UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls, results_beside
from lightning_autoparallel.fx.in_order import sort_calls
from lightning_autoparallel.passes.decompose.product_parts import cast, product_of
from lightning_autoparallel.passes.loss_head import ChunkOptions, HeadRegion, NotChunkable, find_region, write_chunks
from lightning_autoparallel.passes.loss_head.head_times import extra_time_us, products_time_us
from lightning_autoparallel.passes.loss_head.linearity import (
    check_linear,
    late_calls,
    the_tangent,
    with_unit_tangent,
)

aten = torch.ops.aten

MemoryOf = Callable[[fx.Graph], StepMemory]

_TRIED = 4  # products, the widest first
_LOWER, _SLOWER = 0.95, 0.01  # of the peak, and of the time of a step's products
_MOST_CHUNKS = 32


def chunk_loss_head(
    graph: fx.Graph,
    *,
    inputs: Sequence[GraphInput] = (),
    options: ChunkOptions | None = None,
    costs: CostModel | None = None,
    memory_of: MemoryOf | None = None,
) -> tuple[str, ...]:
    """Compute heads of losses in chunks of their rows.

    ``inputs`` are the graph's, ``memory_of`` predicts a graph's memory once it is partitioned. Without it, or
    ``costs``, only what ``options`` force is computed in chunks.
    """
    chunks = (options or ChunkOptions()).chunks
    placeholders = graph.find_nodes(op="placeholder")
    tangents = [node for node, item in zip(placeholders, inputs, strict=False) if item.kind == "tangent"]
    if chunks is not None:
        return _forced(graph, tangents, chunks)
    if costs is None or memory_of is None:
        return ()
    try:
        return _predicted(graph, tangents, costs, memory_of)
    except (UnsupportedOpError, ConfigError) as error:
        return (f"every head stays whole: {error}",)


def _forced(graph: fx.Graph, tangents: Collection[fx.Node], chunks: int) -> tuple[str, ...]:
    notes = []
    for name in _widest_products(graph, tangents):
        if (product := _named(graph, name)) is None or chunks == 1:
            continue
        try:
            chunk_head(graph, find_region(graph, product, chunks), tangents)
            notes.append(f"{fxn.describe(product)}: {chunks} chunks of rows")
        except NotChunkable as reason:
            notes.append(f"{fxn.describe(product)} stays whole: {reason}")
    return tuple(notes)


def _predicted(
    graph: fx.Graph, tangents: Collection[fx.Node], costs: CostModel, memory_of: MemoryOf
) -> tuple[str, ...]:
    """The heads that lower the peak by what is worth it, for hardly any time."""
    regions = {name: _region(graph, _named(graph, name)) for name in _widest_products(graph, tangents)}
    heads = [name for name, region in regions.items() if region]
    if not heads:
        return ()
    memory = memory_of(graph)
    before = memory.peak_bytes
    at_peak = _bytes_of({name for region in regions.values() for name in region}, memory.contributors)
    if before - at_peak > before * _LOWER:  # whatever else is alive there stays
        return ()
    whole = _copied(graph)
    try:
        chosen = _chosen(graph, heads, tangents, costs, before)
        after = memory_of(graph).peak_bytes if chosen else before
    except (UnsupportedOpError, ConfigError):  # of a head that comes behind one that is written already
        _restore(graph, whole)
        raise
    if not chosen:
        return ()
    if after > before * _LOWER:
        _restore(graph, whole)
        return ()
    written = ", ".join(f"{name} in {chunks} chunks of rows" for name, chunks in chosen.items())
    return (f"{written}: peak of the calls as they stand {before / 2**30:.2f} -> {after / 2**30:.2f} GiB",)


def _chosen(
    graph: fx.Graph, heads: Sequence[str], tangents: Collection[fx.Node], costs: CostModel, peak_bytes: int
) -> dict[str, int]:
    """In how many chunks each head was written that the budget of all has time for."""
    budget_us = _SLOWER * products_time_us(graph, costs)
    chosen: dict[str, int] = {}
    for name in heads:
        chunks, spent_us = _chunked_within(graph, name, tangents, costs, budget_us, peak_bytes)
        if chunks > 1:
            chosen[name], budget_us = chunks, budget_us - spent_us
    return chosen


def _chunked_within(
    graph: fx.Graph, name: str, tangents: Collection[fx.Node], costs: CostModel, budget_us: float, peak_bytes: int
) -> tuple[int, float]:
    """Compute a head in as many chunks as the budget has time for: how many, 1 for none, and the time."""
    product = _named(graph, name)
    chunks = 1 if product is None else _wanted_chunks(product, peak_bytes)
    while product is not None and chunks > 1:
        with contextlib.suppress(NotChunkable):
            region = find_region(graph, product, chunks)
            spent_us = extra_time_us(region, costs)
            if spent_us <= budget_us:
                chunk_head(graph, region, tangents)
                return chunks, spent_us
        chunks //= 2
    return 1, 0.0


def _restore(graph: fx.Graph, whole: fx.Graph) -> None:
    """Write all of another graph in the place of what is there."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    graph.output(graph.graph_copy(whole, {}))


def _region(graph: fx.Graph, product: fx.Node | None) -> set[str]:
    """Names of the calls that can be computed in chunks with a product; none where it cannot."""
    with contextlib.suppress(NotChunkable):
        if product is not None:
            return {node.name for node in find_region(graph, product, 2).calls}
    return set()


def _bytes_of(names: Collection[str], shares: Iterable[MemoryShare]) -> int:
    """Bytes of values of these calls, or of one of their results."""
    return sum(share.size_bytes for share in shares if share.name.partition("[")[0] in names)


def _wanted_chunks(product: fx.Node, peak_bytes: int) -> int:
    """The power of 2 at which three float32 copies of one chunk are a twentieth of the peak; 1 if all of it is less."""
    wide = 3 * 4 * product.meta["val"].numel()
    if wide * 20 <= peak_bytes:
        return 1
    return min(_MOST_CHUNKS, 2 ** math.ceil(math.log2(wide * 20 / peak_bytes)))


def _widest_products(graph: fx.Graph, tangents: Collection[fx.Node]) -> list[str]:
    """Names of the products of the forward, by the size of their results."""
    late = late_calls(graph, tangents)
    products = [node for node in graph.nodes if node not in late and product_of(node) is not None]
    return [node.name for node in sorted(products, key=lambda node: -node.meta["val"].numel())[:_TRIED]]


def _named(graph: fx.Graph, name: str) -> fx.Node | None:
    return next((node for node in graph.nodes if node.name == name), None)


def _copied(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def chunk_head(graph: fx.Graph, region: HeadRegion, tangents: Collection[fx.Node]) -> None:
    """Write ``region`` in its chunks.

    Raises:
        NotChunkable: the gradient in it is no multiple of one loss's; nothing is changed then.
    """
    late = late_calls(graph, tangents)
    leading, tangent = _leading_tangent(graph, region, late)
    entries = [node for node in region.entries() if node in late]
    exits = region.exits()
    readers = {node: [user for user in node.users if user not in region.calls] for node in exits}
    first = next(node for node in graph.nodes if any(node in users for users in readers.values()))
    call = Calls(first, {}, results_beside(region.product))
    given = {} if tangent is None else with_unit_tangent(entries, late, tangent, call)
    whole = write_chunks(region, given, call)
    for node in exits:
        value = whole[node]
        value.meta["computed_early"] = True
        if tangent is not None and node in late:
            scale = Calls(_first_of(graph, readers[node]), node.meta)
            value = cast(scale, scale(aten.mul.Tensor, value, scale.view(tangent, [])), node.meta["val"].dtype)
        for user in readers[node]:
            user.replace_input_with(node, value)
    _erase([*leading, *region.calls])
    sort_calls(graph)


def _leading_tangent(
    graph: fx.Graph, region: HeadRegion, late: Collection[fx.Node]
) -> tuple[list[fx.Node], fx.Node | None]:
    """What of the backward comes before ``region``, and the tangent that it begins with; None: it has no gradients.

    Raises:
        NotChunkable: the gradient in it is no multiple of one loss's.
    """
    inside = [node for node in region.calls if node in late]
    entries = [node for node in region.entries() if node in late]
    before = fxn.with_ancestors(entries, among=lambda node: node in late)
    leading = [node for node in graph.nodes if node in before]
    if not inside:
        return leading, None
    tangent = the_tangent(leading)
    _check_range([*leading, *inside])
    check_linear([*leading, *inside], late)
    return leading, tangent


def _first_of(graph: fx.Graph, nodes: Collection[fx.Node]) -> fx.Node:
    return next(node for node in graph.nodes if node in nodes)


def _check_range(late: Sequence[fx.Node]) -> None:
    """Gradients that are narrow in range are not computed unscaled.

    Raises:
        NotChunkable: there are such.
    """
    if any(node.meta["val"].dtype is torch.float16 for node in late):
        raise NotChunkable("gradients in float16 are only computed as large as the loss's scale makes them")


def _erase(nodes: Sequence[fx.Node]) -> None:
    """Those of the calls that nothing reads any more."""
    for node in reversed(nodes):
        if node.op == "call_function" and not node.users:
            node.graph.erase_node(node)
