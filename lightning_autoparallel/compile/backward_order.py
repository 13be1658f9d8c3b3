"""The order of a backward's calls, recomputed ones among them, and what must be saved for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from torch import fx


class BackwardOrder(NamedTuple):
    """The backward's calls in their order, those of them that are the forward's, and what it reads from the forward."""

    calls: list[fx.Node]
    recomputed: list[fx.Node]
    saved: list[fx.Node]


def backward_order(
    nodes: Iterable[fx.Node],
    needed: Collection[fx.Node],
    gradients: Sequence[fx.Node],
    given: Collection[fx.Node],
    is_recomputed: Callable[[fx.Node], bool],
) -> BackwardOrder:
    """The calls among ``needed`` as they stand in ``nodes``, each recomputed one right before its first use.

    ``given`` are the backward's own inputs. What else the calls or ``gradients`` read is recomputed where
    ``is_recomputed`` says so, from arguments that are had in the same way, and saved where not.
    """
    order = _Order(given, is_recomputed)
    for node in nodes:
        if node.op == "call_function" and node in needed:
            order.require(node.all_input_nodes)
            order.calls[node] = None
    order.require(gradients)
    return BackwardOrder(list(order.calls), order.recomputed, list(order.saved))


class _Order:
    def __init__(self, given: Collection[fx.Node], is_recomputed: Callable[[fx.Node], bool]) -> None:
        self._given, self._is_recomputed = given, is_recomputed
        self.calls: dict[fx.Node, None] = {}
        self.recomputed: list[fx.Node] = []
        self.saved: dict[fx.Node, None] = {}

    def require(self, nodes: Sequence[fx.Node]) -> None:
        """Have ``nodes`` at hand: saved, or recomputed from what is, arguments first."""
        pending = list(reversed(nodes))
        while pending:
            node = pending.pop()
            if self._is_at_hand(node):
                continue
            if not self._is_recomputed(node):
                self.saved[node] = None
                continue
            missing = [argument for argument in node.all_input_nodes if not self._is_at_hand(argument)]
            if missing:
                pending += [node, *reversed(missing)]
            else:
                self.calls[node] = None
                self.recomputed.append(node)

    def _is_at_hand(self, node: fx.Node) -> bool:
        return node in self.calls or node in self.saved or node in self._given
