"""Nodes moved with what they need, or with what needs them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lightning_autoparallel.fx import nodes as fxn


def hoist(node: fx.Node, anchor: fx.Node) -> None:
    """Move ``node``, and what it needs that is not there yet, right before ``anchor``; their order is kept."""
    late = fxn.with_ancestors([node], among=lambda needed: needed.op == "call_function" and not needed < anchor)
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
