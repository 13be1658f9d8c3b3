"""What a step's backward reads of its forward, by a policy: what is saved, and what is recomputed and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import fx

from lightning_autoparallel.compile import backward_of
from lightning_autoparallel.contracts import CapturedGraph, CheckpointFunction
from lightning_autoparallel.cost.storage import resolve_storages
from lightning_autoparallel.plan import Activations


def read_activations(
    captured: CapturedGraph, reshard_after_forward: bool, activation_checkpointing: str | CheckpointFunction
) -> Activations:
    """Before it is known how anything lies on the mesh; what follows from parameters alone is not of it.

    Raises:
        ConfigError: ``activation_checkpointing`` is a function that gives something else than a wish.
    """
    order = backward_of(captured, reshard_after_forward, activation_checkpointing)
    saved = frozenset(node.name for node in order.saved)
    if not order.recomputed:
        return Activations(saved=saved)
    storages = resolve_storages(captured.graph_module.graph)
    made = {node: [storages.storages[index].node for index in storages.of(node)] for node in order.calls}
    read = {
        node: [each for argument in node.all_input_nodes for each in made.get(argument, ())] for node in order.calls
    }
    own = {node for node in order.recomputed if node in made[node]}
    together = _meeting(order.calls, own, read)
    return Activations(saved=saved, recomputed=tuple(tuple(node.name for node in nodes) for nodes in together))


def _meeting(calls: list[fx.Node], made: set[fx.Node], read: dict[fx.Node, list[fx.Node]]) -> Iterator[list[fx.Node]]:
    """The largest sets of what is ``made`` and alive at once, from its call to the last that has ``read`` it.

    Each is what there is right before some of it goes, where something was added since that was so.
    """
    going: dict[int, list[fx.Node]] = defaultdict(list)
    last = {each: position for position, node in enumerate(calls) for each in (node, *read[node])}
    for node in made:
        going[last[node]].append(node)
    alive: dict[fx.Node, None] = {}
    grown = False
    for position, node in enumerate(calls):
        if node in made:
            alive[node] = None
            grown = True
        if going[position] and grown:
            yield list(alive)
            grown = False
        for gone in going[position]:
            del alive[gone]
