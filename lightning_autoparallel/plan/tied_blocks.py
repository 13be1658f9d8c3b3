"""Which calls and parameters of a graph decide alike: those at one place of blocks that are equal.

A block is a repeated module (``layers.3``). Blocks of one kind whose calls are the same, in the same order, are tied;
the first and the last of a kind are kept apart, which have other neighbours. What lies in no module (a sum of
gradients) belongs to the block of its arguments that comes first: a sum over layers would tie nothing otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from lightning_autoparallel.fx import nodes as fxn

Class = Hashable
Part = Hashable


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The class of each node, and the part of the model that it is of: a block, blocks that are tied, or None.

    ``places`` say how far into its block a node is, from 0 to 1; of those in none it has nothing.
    """

    classes: Mapping[fx.Node, Class]
    parts: Mapping[fx.Node, Part | None]
    places: Mapping[fx.Node, float]


def repeats(
    nodes: Sequence[fx.Node],
    names: Mapping[fx.Node, str],
    signature: Callable[[fx.Node], Hashable],
    tied: bool = True,
) -> Repeats:
    """Classes and parts of ``nodes``, in graph order; nodes of one class have equal signatures.

    Args:
        nodes: calls and placeholders.
        names: of placeholders that are parameters.
        signature: what must be equal for two nodes to decide alike.
        tied: whether any do.
    """
    members: dict[str, list[fx.Node]] = defaultdict(list)
    parts: dict[fx.Node, Part | None] = dict.fromkeys(nodes)
    for node, block in _blocks(nodes, names).items():
        members[block].append(node)
        parts[node] = block
    found: dict[fx.Node, Class] = {node: node for node in nodes}
    for block, kind in (_tied(members, signature) if tied else {}).items():
        found.update({node: (kind, place) for place, node in enumerate(members[block])})
        parts.update(dict.fromkeys(members[block], kind))
    places = {node: place / len(all_of) for all_of in members.values() for place, node in enumerate(all_of)}
    return Repeats(classes=found, parts=parts, places=places)


def _blocks(nodes: Sequence[fx.Node], names: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """The block of each node that lies in one."""
    found: dict[fx.Node, str] = {}
    for node in nodes:
        path = names.get(node) or fxn.module_path(node)
        if path:
            block = fxn.block_of(path)
        else:
            inputs = (_call(argument) for argument in node.all_input_nodes)
            block = min((found[argument] for argument in inputs if argument in found), key=_number, default=None)
        if block is not None:
            found[node] = block
    return found


def _call(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if fxn.is_getitem(node) else node


def _number(block: str) -> int:
    return int(block.rpartition(".")[2])


def _tied(
    members: Mapping[str, Sequence[fx.Node]], signature: Callable[[fx.Node], Hashable]
) -> dict[str, tuple[str, int]]:
    """For each block that is tied, its kind and which of the kind's variants it is."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for block in members:
        kinds[fxn.kind_of(block)].append(block)
    found = {}
    for kind, blocks in kinds.items():
        variants: dict[Hashable, int] = {}
        for block in sorted(blocks, key=_number)[1:-1]:
            whole = tuple(signature(node) for node in members[block])
            found[block] = (kind, variants.setdefault(whole, len(variants)))
    return found
