"""Nodes moved with what they need, or with what needs them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx


def hoist(node: fx.Node, anchor: fx.Node) -> None:
    """Move ``node``, and what it needs that is not there yet, right before ``anchor``; their order is kept."""
    late: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current not in late and current.op == "call_function" and not current < anchor:
            late.add(current)
            pending.extend(current.all_input_nodes)
    for needed in sorted(late):  # nodes compare by their place in the graph
        anchor.prepend(needed)


def sink(nodes: Iterable[fx.Node], anchor: fx.Node) -> None:
    """Move ``nodes``, and what needs them, down to right before ``anchor``; their order is kept."""
    early: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        current = pending.pop()
        if current not in early and current < anchor:
            early.add(current)
            pending.extend(current.users)
    for reader in sorted(early):
        anchor.prepend(reader)
