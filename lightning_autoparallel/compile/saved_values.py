"""What the backward of a captured step will read of its forward, before it is known how anything lies on the mesh."""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.compile.backward_order import BackwardOrder
from lightning_autoparallel.compile.partition import decided_backward
from lightning_autoparallel.contracts import CapturedGraph, CheckpointFunction, ShardedGraph


def backward_of(
    captured: CapturedGraph, reshard_after_forward: bool, activation_checkpointing: str | CheckpointFunction
) -> BackwardOrder:
    """The backward's order as the partition would decide it on one device.

    Its ``calls`` are all; ``saved`` and ``recomputed`` are calls of the forward that need more than parameters alone.

    Raises:
        ConfigError: ``activation_checkpointing`` is a function that gives something else than a wish.
    """
    whole = ShardedGraph(
        name=captured.name,
        graph_module=captured.graph_module,
        inputs=captured.inputs,
        outputs=captured.outputs,
        output_placements=(),
        axes=(),
        has_backward=captured.has_backward,
    )
    graph = captured.graph_module.graph
    pairs = zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    derived = _following([node for node, item in pairs if item.kind == "parameter"], graph)
    order = decided_backward(whole, reshard_after_forward, activation_checkpointing)
    saved = [node for node in order.saved if node.op != "placeholder" and node not in derived]
    return order._replace(recomputed=[node for node in order.recomputed if node not in derived], saved=saved)


def saved_values(
    captured: CapturedGraph, reshard_after_forward: bool, activation_checkpointing: str | CheckpointFunction
) -> frozenset[str]:
    """The names of the nodes of ``captured`` whose values are saved, but those that follow from parameters alone.

    It is what the partition would decide on one device. What ranks exchange is saved, too, where it is written later.

    Raises:
        ConfigError: ``activation_checkpointing`` is a function that gives something else than a wish.
    """
    return frozenset(node.name for node in backward_of(captured, reshard_after_forward, activation_checkpointing).saved)


def _following(parameters: list[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """What depends on parameters and nothing else."""
    found = set(parameters)
    for node in graph.nodes:
        arguments = node.all_input_nodes
        if node.op == "call_function" and arguments and found.issuperset(arguments):
            found.add(node)
    return found
