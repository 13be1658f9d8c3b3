"""The one set of decisions: for every call of the forward, whether the backward reads a saved value or recomputes it.

Some are the same under every policy. Views of a whole value are made again. Random draws are saved: a second draw
would be another; so is what a pass has the forward compute for the backward. Gathered parameters, with the chain of
casts and moves around the gather, are recomputed, so that nothing that holds gathered data is saved under another name;
but those of the last block are kept where the backward begins with them.
The user's own ``torch.utils.checkpoint`` regions are recomputed from what enters them, and no policy is asked about
them. The rest is the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import fx

from lightning_autoparallel.compile.blocks import find_blocks
from lightning_autoparallel.compile.policies import Forward, why_idle, wishes_of
from lightning_autoparallel.contracts import CheckpointFunction, Decision, Wish
from lightning_autoparallel.fx import nodes as fxn

aten = fxn.aten

_JOINS = {aten.cat.default, aten.stack.default}


def decide(
    calls: Sequence[fx.Node],
    parameters: Iterable[fx.Node],
    reshard_after_forward: bool,
    policy: str | CheckpointFunction,
    warn: Callable[[str], None] = lambda message: None,
) -> dict[fx.Node, Decision]:
    """The decision for every node of ``calls``, the forward's in order.

    ``warn`` is told of a named policy that finds no block to recompute.

    Raises:
        ConfigError: the user's function gives something else than a wish.
    """
    decided = _decided_anyway(calls, parameters, reshard_after_forward)
    blocks = find_blocks(calls)
    if (message := why_idle(policy, list(dict.fromkeys(blocks.values())))) is not None:
        warn(message)
    leaving = frozenset(_read_elsewhere(calls, blocks.get))
    asked = [node for node in calls if node not in decided and not fxn.is_getitem(node)]
    wishes = wishes_of(policy, Forward(calls=calls, blocks=blocks, leaving=leaving), asked)
    for node in calls:
        if node not in decided:
            # A result of several follows its operator.
            decided[node] = _settled(wishes[_operator_of(node)], node in leaving)
    return {node: decided[node] for node in calls}


def _settled(wish: Wish, leaves_block: bool) -> Decision:
    if wish == "prefer_recompute":
        return "save" if leaves_block else "recompute"
    return wish


def _operator_of(node: fx.Node) -> fx.Node:
    while fxn.is_getitem(node):
        node = node.all_input_nodes[0]
    return node


def _decided_anyway(
    calls: Sequence[fx.Node], parameters: Iterable[fx.Node], reshard_after_forward: bool
) -> dict[fx.Node, Decision]:
    decided: dict[fx.Node, Decision] = {}
    regions = {node: number for node in calls if (number := fxn.custom(node, "checkpoint_region")) is not None}
    read_elsewhere = _read_elsewhere(calls, regions.get)
    gathered = holding_gathered(calls, parameters)
    begins = _where_backward_begins(calls, gathered)
    for node in calls:
        if fxn.is_random(_operator_of(node)) or fxn.is_early(node):
            decided[node] = "save"
        elif fxn.is_view_of_all(node) or (node in gathered and reshard_after_forward and node not in begins):
            decided[node] = "recompute"
        elif node in gathered:
            decided[node] = "save"
        elif node in regions:
            decided[node] = "save" if node in read_elsewhere else "recompute"
    return decided


def _where_backward_begins(calls: Sequence[fx.Node], gathered: Collection[fx.Node]) -> set[fx.Node]:
    """What the last block gathers, where nothing is left for the backward to compute before it needs that again.

    So it is where the forward has computed the gradients behind that block: a gather would be waited for.
    """
    if not any(map(fxn.is_early, calls)):
        return set()
    last = next((block for node in reversed(calls) if node in gathered and (block := _block_of(node))), None)
    return set() if last is None else {node for node in gathered if _block_of(node) == last}


def _block_of(node: fx.Node) -> str | None:
    path = fxn.module_path(node)
    return None if path is None else fxn.block_of(path)


def _read_elsewhere(calls: Sequence[fx.Node], place_of: Callable[[fx.Node], object]) -> set[fx.Node]:
    """What the forward reads at another place than it is computed: directly, or through views, which are made again."""
    members, found = set(calls), set()
    for node in reversed(calls):
        readers = [user for user in node.users if user in members]
        if any(place_of(user) != place_of(node) or (fxn.is_view_of_all(user) and user in found) for user in readers):
            found.add(node)
    return found


def holding_gathered(calls: Sequence[fx.Node], parameters: Iterable[fx.Node]) -> set[fx.Node]:
    """The calls that hold a gathered parameter, or are a shard's way into its gather.

    These are the parameter's gathers, what depends on them and nothing else, and several such values joined to one.
    """
    origin = fxn.parameter_of(calls, parameters)
    gathered: set[fx.Node] = set()
    leading: set[fx.Node] = set()
    for node in calls:
        holding = [argument in gathered for argument in node.all_input_nodes]
        if node in origin and fxn.collective_kind(node) == "all_gather":
            leading |= _calls_before(node)
            gathered.add(node)
        elif any(holding) and (node in origin or (all(holding) and (len(holding) == 1 or node.target in _JOINS))):
            gathered.add(node)
    return gathered | leading


def _calls_before(node: fx.Node) -> set[fx.Node]:
    """The calls that ``node`` depends on."""
    return fxn.with_ancestors(node.all_input_nodes, among=lambda before: before.op == "call_function")
