"""What activation checkpointing wishes for every value of the forward: policies by name, or the user's function.

A wish ``prefer_recompute`` holds within a block: what other code reads of the block is saved all the same, so that
recomputing one block never starts with another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, get_args

from torch import fx

from lightning_autoparallel.compile.blocks import MATMULS
from lightning_autoparallel.config import policies_by_kind
from lightning_autoparallel.contracts import CheckpointFunction, NodeInfo, Wish
from lightning_autoparallel.errors import ConfigError, did_you_mean
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat import collectives

aten = fxn.aten

_REDUCTIONS = {collectives.ALL_REDUCE, collectives.REDUCE_SCATTER, collectives.ALL_TO_ALL}


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The calls of the forward in order, the block of each that is in one, and what other code reads of a block."""

    calls: Sequence[fx.Node]
    blocks: Mapping[fx.Node, str]
    leaving: frozenset[fx.Node]


def wishes_of(policy: str | CheckpointFunction, forward: Forward, asked: Iterable[fx.Node]) -> dict[fx.Node, Wish]:
    """The wish for every node of ``asked``; the others are decided without asking.

    Raises:
        ConfigError: the user's function gives something else than a wish.
    """
    if callable(policy):
        return {node: _answer(policy, node, forward) for node in asked}
    recomputed = _by_name(policy, forward)
    return {node: "prefer_recompute" if node in recomputed else "save" for node in asked}


def why_idle(policy: str | CheckpointFunction, blocks: Sequence[str]) -> str | None:
    """What to tell the user of a named policy that recomputes none of these blocks, and so saves everything."""
    if callable(policy) or policy == "none":
        return None
    idle = f"activation_checkpointing={policy!r} has no effect"
    if not blocks:
        return (
            f"{idle}: it recomputes blocks, repeated modules like model.layers.0 and model.layers.1, and the step has "
            "none; put repeated modules into an nn.ModuleList or nn.Sequential, give a function, which is asked about "
            "every operator, or call torch.utils.checkpoint in the model"
        )
    if by_kind := policies_by_kind(policy):
        return _why_idle_by_kind(by_kind, blocks)
    return _why_too_few(policy, blocks, f"{idle}: the step has")


def _why_too_few(policy: str, blocks: Sequence[str], has: str) -> str | None:
    """What is wrong with every Nth of fewer blocks than N."""
    if int(policy.partition(":")[2] or 1) <= len(blocks):
        return None
    return (
        f"{has} {len(blocks)} blocks ({blocks[0]} to {blocks[-1]}); give 'layer:N' with N of at most {len(blocks)}, "
        "or 'full'"
    )


def _why_idle_by_kind(by_kind: Sequence[tuple[str, str]], blocks: Sequence[str]) -> str | None:
    for entry in by_kind:
        idle = f"activation_checkpointing: {'='.join(entry)} has no effect"
        named = [block for block in blocks if _policy_of(block, by_kind) == entry]
        if not named:
            return (
                f"{idle}: it names none of the step's blocks, or a later pattern does "
                f"({', '.join(blocks[:3])}{', ...' if len(blocks) > 3 else ''})"
            )
        if (message := _why_too_few(entry[1], named, f"{idle}: it names")) is not None:
            return message
    return None


def _policy_of(block: str, by_kind: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """The last pattern that matches, with its policy."""
    return next((entry for entry in reversed(by_kind) if fnmatchcase(block, entry[0])), None)


def _by_kind(by_kind: Sequence[tuple[str, str]], forward: Forward) -> set[fx.Node]:
    """What each policy recomputes of its blocks; blocks that no pattern matches are saved."""
    entries = {block: _policy_of(block, by_kind) for block in set(forward.blocks.values())}
    found = set()
    for entry in by_kind:
        own = {node: block for node, block in forward.blocks.items() if entries[block] == entry}
        found |= _by_name(entry[1], replace(forward, blocks=own))
    return found


def _by_name(policy: str, forward: Forward) -> set[fx.Node]:
    """What a named policy recomputes."""
    if policy == "none":
        return set()
    if by_kind := policies_by_kind(policy):
        return _by_kind(by_kind, forward)
    inside = {node for node in forward.calls if node in forward.blocks}
    if policy == "full":
        return inside
    if policy == "selective":
        return inside - _kept_by_selective(forward)
    _, _, every = policy.partition(":")
    blocks = list(dict.fromkeys(forward.blocks[node] for node in forward.calls if node in inside))
    chosen = set(blocks[int(every) - 1 :: int(every)])
    return {node for node in inside if forward.blocks[node] in chosen}


def _kept_by_selective(forward: Forward) -> set[fx.Node]:
    """Attention, every second matmul, the first residual sum of each block, and what ranks have reduced.

    A matmul that ranks add up is of no use before that: what is saved is the sum, which spares its collective too.
    What ranks exchange of a value that is saved is exchanged again: the same numbers would be saved twice, and what
    reads them in the backward, such as the gradient of attention's output projection, seldom holds it up.
    """
    kept: set[fx.Node] = set()
    matmuls: dict[str, int] = {}
    summed: set[str] = set()  # blocks whose first residual sum is found
    members = set(forward.calls)
    for node in forward.calls:
        block = forward.blocks.get(node)
        if block is None:
            continue
        if fxn.is_attention(node) or (_is_reduced(node) and not _is_exchange_of(node, kept)):
            kept.add(node)
        elif node.target in MATMULS:
            matmuls[block] = matmuls.get(block, 0) + 1
            if matmuls[block] % 2 == 0 and not _only_reduced(node, members):
                kept.add(node)
        elif block not in summed and _adds_to_input(node, block, forward.blocks):
            summed.add(block)
            kept.add(_narrower_addend(node, block, forward.blocks))
    return kept


def _is_reduced(node: fx.Node) -> bool:
    """Whether the node waits for what ranks add up or exchange."""
    return fxn.is_wait(node) and node.all_input_nodes[0].target in _REDUCTIONS


def _is_exchange_of(wait: fx.Node, kept: set[fx.Node]) -> bool:
    """Whether what is waited for are the elements of a value in ``kept``, on other ranks."""
    collective = wait.all_input_nodes[0]
    if collective.target is not collectives.ALL_TO_ALL:
        return False
    node = collective.all_input_nodes[0]
    while _moves(node) or fxn.is_getitem(node):
        node = node.all_input_nodes[0]
    return node in kept


def _only_reduced(node: fx.Node, members: set[fx.Node]) -> bool:
    """Whether the forward reads ``node``, through moves of its elements, by reductions over ranks only."""
    readers = [user for user in node.users if user in members]
    return bool(readers) and all(
        user.target in _REDUCTIONS or (_moves(user) and _only_reduced(user, members)) for user in readers
    )


def _moves(node: fx.Node) -> bool:
    return fxn.is_view_of_all(node) or node.target in (aten.clone.default, aten._to_copy.default)


def _source(node: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while fxn.is_view_of_all(node):
        node = node.all_input_nodes[0]
    return node


def _adds_to_input(node: fx.Node, block: str, blocks: Mapping[fx.Node, str]) -> bool:
    """Whether the node adds something of its own shape to what came into the block."""
    if node.target is not aten.add.Tensor or len(fxn.tensor_arguments(node)) != 2:
        return False
    addends = fxn.tensor_arguments(node)
    if any(addend.meta["val"].shape != node.meta["val"].shape for addend in addends):
        return False
    return [blocks.get(_source(addend)) == block for addend in addends].count(False) == 1


def _narrower_addend(node: fx.Node, block: str, blocks: Mapping[fx.Node, str]) -> fx.Node:
    """The residual sum, or what it adds to the block's input where that has fewer bytes: the input is saved anyway."""
    own = next(source for addend in fxn.tensor_arguments(node) if blocks.get(source := _source(addend)) == block)
    narrower = fxn.size_bytes(own.meta["val"]) < fxn.size_bytes(node.meta["val"])
    return own if narrower else node


def _answer(function: CheckpointFunction, node: fx.Node, forward: Forward) -> Wish:
    answer: Any = function(_info(node, forward))
    if answer in get_args(Wish):
        return answer  # type: ignore[no-any-return]
    raise ConfigError(
        f"activation_checkpointing: the function gave {answer!r} for {fxn.describe(node)} ({node.target}); "
        f"it must give {', '.join(map(repr, get_args(Wish)))}{did_you_mean(answer, get_args(Wish))}"
    )


def _info(node: fx.Node, forward: Forward) -> NodeInfo:
    tensors = [value for value in fxn.values(node) if value is not None]
    return NodeInfo(
        name=node.name,
        op=str(node.target),
        module=fxn.module_path(node) or "",
        block=forward.blocks.get(node),
        shape=tuple(tensors[0].shape) if tensors else (),
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        size_bytes=sum(fxn.size_bytes(tensor) for tensor in tensors),
        leaves_block=any(result in forward.leaving for result in (node, *filter(fxn.is_getitem, node.users))),
        source=fxn.custom(node, "source") or "?",
    )
