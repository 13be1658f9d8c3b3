"""``cast_before_gather``: a value that is only read in a narrower dtype is gathered in that dtype.

Autocast casts a weight where it is used, which in the lowered graph is behind its gather: every rank would receive
float32 and throw half of it away. The cast is element by element, so that casting the shard gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import FakeResults

aten = torch.ops.aten

# Besides views of all of a value: what only picks or copies elements.
_MOVES = {aten.slice.Tensor, aten.select.int, aten.clone.default}


def cast_before_gather(graph: fx.Graph) -> tuple[str, ...]:
    """Cast before an all-gather where every path from its result, through moves of elements, ends in the same cast."""
    saved_bytes = moved = 0
    results = FakeResults()
    # The last first: a cast that moves ahead of one gather may stand behind another one then.
    for gather in reversed([node for node in graph.nodes if fxn.collective_kind(node) == "all_gather"]):
        chain = _casts_behind(gather)
        if chain is None:
            continue
        before = fxn.collective_size_bytes(gather)
        _cast_first(graph, gather, *chain, results)
        saved_bytes += before - fxn.collective_size_bytes(gather)
        moved += 1
    return (f"{moved} casts moved before gathers, {saved_bytes} bytes less gathered",) if moved else ()


def _casts_behind(gather: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """The moves behind ``gather`` in order, and the casts they all end in; None if there is any other reader."""
    moves: list[fx.Node] = []
    casts: list[fx.Node] = []
    for reader in _readers(gather):
        if _only_moves(reader):
            moves.append(reader)
        elif _narrows(reader):
            casts.append(reader)
        else:
            return None
    if len({cast.meta["val"].dtype for cast in casts}) != 1:
        return None
    return moves, casts


def _readers(gather: fx.Node) -> Iterator[fx.Node]:
    """What reads the gathered value, directly or through what was read; casts and strangers are not looked behind."""
    pending = [gather]
    while pending:
        source = pending.pop(0)
        for user in source.users:
            yield user
            if _only_moves(user):
                pending.append(user)


def _only_moves(node: fx.Node) -> bool:
    return fxn.is_wait(node) or fxn.is_view_of_all(node) or node.target in _MOVES


def _narrows(node: fx.Node) -> bool:
    """Whether ``node`` does nothing but cast to a floating dtype of fewer bytes."""
    if node.target is not aten._to_copy.default or node.kwargs.get("memory_format") not in (
        None,
        torch.preserve_format,
    ):
        return False
    source, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    narrower = result.dtype.is_floating_point and result.element_size() < source.element_size()
    return narrower and source.dtype.is_floating_point and source.device == result.device


def _cast_first(
    graph: fx.Graph, gather: fx.Node, moves: list[fx.Node], casts: list[fx.Node], results: FakeResults
) -> None:
    shard = gather.args[0]
    assert isinstance(shard, fx.Node)
    with graph.inserting_before(gather):
        narrow = graph.call_function(aten._to_copy.default, (shard,), {"dtype": casts[0].meta["val"].dtype})
    narrow.meta = {key: value for key, value in gather.meta.items() if key != "val"}
    gather.args = (narrow, *gather.args[1:])
    for node in (narrow, gather, *moves):
        node.meta["val"] = results.of(node.target, node.args, node.kwargs)
    for cast in casts:
        _replace(graph, cast)


def _replace(graph: fx.Graph, cast: fx.Node) -> None:
    """Let the readers of ``cast`` read its source, which is narrow now, laid out in memory as the cast was."""
    source = cast.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["val"].stride() != cast.meta["val"].stride():
        with graph.inserting_before(cast):
            copied = graph.call_function(aten.clone.default, (source,))
        copied.meta = dict(cast.meta)
        source = copied
    cast.replace_all_uses_with(source)
    graph.erase_node(cast)
