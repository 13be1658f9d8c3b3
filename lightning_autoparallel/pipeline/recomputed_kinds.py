"""``activation_checkpointing="auto"``: of all policies for all kinds of blocks those that compute least once more.

The first policy that fits for all blocks may recompute more than is missing. For every kind of block it is known what
each policy has it compute once more: of all combinations the one is tried that computes least of those whose graphs
should take no more memory than there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from lightning_autoparallel.compile import find_blocks
from lightning_autoparallel.contracts import CapturedGraph, ShardingPlan
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline.rank_memory import saved_bytes

MOST_KINDS = 6  # with a policy each; what else there is keeps the policy of all
_MOST_LOOKED_AT = 16  # combinations whose graphs are partitioned to see their memory
_LEAST_GAIN = 0.02  # of what is computed once more: for less nothing is planned again


@dataclass(frozen=True, kw_only=True)
class _Option:
    """A policy for one kind of block: bytes on a rank that the backward reads, and what it computes once more."""

    policy: str
    read_bytes: float
    again_us: float


def lighter_policy(
    captured: CapturedGraph,
    plan: ShardingPlan,
    costs: CostModel,
    policies: Sequence[str],
    policy: str,
    saved_with: Callable[[str], Collection[str]],
    peak_with: Callable[[str], float],
    room_bytes: float,
) -> str | None:
    """One of ``policies`` for every kind of block that should take at most ``room_bytes`` more than ``policy`` does.

    Together they compute less once more than that, which has been found to fit with this ``plan``; the first of
    ``policies`` recomputes nothing. The backward reads ``saved_with`` one, and a step's graphs take ``peak_with`` one,
    but for what passes change. None where no combination is better, or times are not known.
    """
    blocks = find_blocks(node for node in captured.graph_module.graph.nodes if not fxn.is_backward(node))
    kinds = {node: fxn.kind_of(block) for node, block in blocks.items()}
    try:
        times_us = costs.graph_times_us(captured.graph_module.graph)
    except UnsupportedOpError:
        return None
    saved = {each: frozenset(saved_with(each)) for each in policies}
    options = _most_read(dict(_options(captured, plan, kinds, saved, times_us)))
    before_us = sum(option.again_us for own in options.values() for option in own if option.policy == policy)
    most_bytes = peak_with(policy) + room_bytes
    for chosen in _lighter(options, (1 - _LEAST_GAIN) * before_us, most_bytes)[:_MOST_LOOKED_AT]:
        every = {kind: chosen.get(kind, policy) for kind in dict.fromkeys(kinds.values())}
        if peak_with(text := _as_text(every)) <= most_bytes:
            return text
    return None


def _lighter(options: Mapping[str, list[_Option]], most_us: float, most_bytes: float) -> list[dict[str, str]]:
    """Combinations that compute at most so much once more, the least first; what is read has to be there at once."""
    found = []
    for combination in itertools.product(*options.values()):
        again_us, read_bytes = sum(one.again_us for one in combination), sum(one.read_bytes for one in combination)
        if again_us <= most_us and read_bytes <= most_bytes:
            found.append((again_us, read_bytes, {k: one.policy for k, one in zip(options, combination, strict=True)}))
    return [chosen for _, _, chosen in sorted(found, key=lambda each: each[:2])]


def _as_text(by_kind: Mapping[str, str]) -> str:
    """A policy of all blocks by its name; a kind's pattern may match blocks of a longer one, which comes later."""
    if len(names := set(by_kind.values())) == 1:
        return names.pop()
    return ", ".join(f"{kind}={name}" for kind, name in sorted(by_kind.items(), key=lambda item: len(item[0])))


def _options(
    captured: CapturedGraph,
    plan: ShardingPlan,
    kinds: Mapping[fx.Node, str],
    saved: Mapping[str, frozenset[str]],
    times_us: Mapping[fx.Node, float],
) -> Iterator[tuple[str, list[_Option]]]:
    """For every kind what each policy means; what the first one does not have the backward read is never missing."""
    sizes_bytes = {policy: saved_bytes(captured, plan, names) for policy, names in saved.items()}
    read_without = next(iter(saved.values()))
    for kind in dict.fromkeys(kinds.values()):
        own = [node for node, other in kinds.items() if other == kind]
        names = {node.name for node in own}
        yield (
            kind,
            [
                _Option(
                    policy=policy,
                    read_bytes=sum(size for name, size in sizes_bytes[policy].items() if name in names),
                    again_us=sum(times_us.get(node, 0.0) for node in _again(own, read_without - kept, kept)),
                )
                for policy, kept in saved.items()
            ],
        )


def _again(own: Sequence[fx.Node], missing: Collection[str], kept: Collection[str]) -> set[fx.Node]:
    """What is computed once more for the backward to have what is ``missing``, from what is ``kept``."""
    members = set(own)
    waiting = [node for node in own if node.name in missing]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in found or node not in members or node.name in kept:
            continue
        found.add(node)
        waiting += node.all_input_nodes
    return found


def _most_read(options: Mapping[str, list[_Option]]) -> dict[str, list[_Option]]:
    """The kinds whose policies differ most in what the backward reads."""
    sizes = {kind: [option.read_bytes for option in own] for kind, own in options.items()}
    spread = {kind: max(each) - min(each) for kind, each in sizes.items()}
    return {kind: options[kind] for kind in sorted(spread, key=lambda kind: -spread[kind])[:MOST_KINDS]}
