"""Nodes moved with what they need, or with what needs them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lightning_autoparallel.fx import nodes as fxn


def hoist(node: fx.Node, anchor: fx.Node) -> None:
    """Move ``node``, and what it needs that is not there yet, right before ``anchor``; their order is kept."""
    for needed in moving_with([node], anchor):
        anchor.prepend(needed)


def moving_with(nodes: Iterable[fx.Node], anchor: fx.Node) -> list[fx.Node]:
    """What ``hoist`` would move to have ``nodes`` before ``anchor``, in order."""
    # nodes compare by their place in the graph
    return sorted(fxn.with_ancestors(nodes, among=lambda late: late.op == "call_function" and not late < anchor))


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
