"""``prefetch_gathers``: the next parameter is gathered while the last one is computed with.

A gather depends on a parameter's shard only, so it may start as early as its memory is worth. Here each starts before
the one ahead of it (``depth`` ahead) is waited for: at most ``depth`` gathered parameters lie ready and unused.
"""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.fx import nodes as fxn


def prefetch_gathers(graph: fx.Graph, *, depth: int = 1) -> tuple[str, ...]:
    """Start every all-gather of an input before the wait for the gather ``depth`` places ahead of it."""
    gathers = [node for node in graph.nodes if fxn.collective_kind(node) == "all_gather" and _only_from_input(node)]
    position = {node: index for index, node in enumerate(graph.nodes)}
    moved = 0
    for earlier, gather in zip(gathers, gathers[depth:], strict=False):
        wait = next((user for user in earlier.users if fxn.is_wait(user)), None)
        if wait is None or position[wait] > position[gather]:
            continue
        for needed in _chain(gather):
            wait.prepend(needed)
        moved += 1
    return (f"{moved} gathers started {depth} ahead",) if moved else ()


def _chain(node: fx.Node) -> list[fx.Node]:
    """The calls that lead from an input to ``node``, in order, ``node`` last."""
    chain = [node]
    while chain[0].all_input_nodes[0].op != "placeholder":
        chain.insert(0, chain[0].all_input_nodes[0])
    return chain


def _only_from_input(node: fx.Node) -> bool:
    """Whether a straight line of calls without other readers or collectives leads from one input to ``node``."""
    current = node
    while current.op != "placeholder":
        if len(current.all_input_nodes) != 1 or fxn.is_random(current):
            return False
        current = current.all_input_nodes[0]
        if current.op != "placeholder" and (len(current.users) != 1 or fxn.is_wait(current)):
            return False
    return True
