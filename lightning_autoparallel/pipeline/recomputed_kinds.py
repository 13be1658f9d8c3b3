"""``activation_checkpointing="auto"``: of all policies for all kinds of blocks those that compute least once more.

The first policy that fits for all blocks may recompute more than is missing. For every kind of block it is known what
each policy has the backward read, and what it has it compute once more. Of all combinations one is chosen that computes
least of those whose graphs should take no more memory than there is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from lightning_autoparallel.compile import find_blocks
from lightning_autoparallel.contracts import CapturedGraph, ShardingPlan
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline.rank_memory import saved_bytes

MOST_KINDS = 6  # with a policy each; what else there is keeps the policy of all
_MOST_LOOKED_AT = 16  # combinations whose graphs are partitioned to see their memory
_LEAST_GAIN = 0.02  # of what is computed once more: for less nothing is planned again


@dataclass(frozen=True, kw_only=True)
class Option:
    """A policy for one kind of block: bytes on a rank that the backward reads, and what it computes once more."""

    policy: str
    read_bytes: float
    again_us: float


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A ``policy`` of every kind of block as text; ``read_bytes`` by kind, in one order for all combinations."""

    policy: str
    read_bytes: tuple[float, ...]
    again_us: float


def combinations(
    captured: CapturedGraph,
    plan: ShardingPlan,
    costs: CostModel,
    policies: Sequence[str],
    known: str,
    saved_with: Callable[[str], Collection[str]],
) -> list[Combination]:
    """Policies by kinds of blocks that compute less once more than ``known`` does for all, the least first.

    The first of ``policies`` recomputes nothing. Of a policy the backward reads the values ``saved_with`` it, which lie
    as ``plan`` says.

    Raises:
        ConfigError, UnsupportedOpError: the time of a call is not known.
    """
    blocks = find_blocks(node for node in captured.graph_module.graph.nodes if not fxn.is_backward(node))
    kinds = {node: fxn.kind_of(block) for node, block in blocks.items()}
    every = list(dict.fromkeys(kinds.values()))
    if not every:
        return []
    times_us = costs.graph_times_us(captured.graph_module.graph)
    saved = {each: frozenset(saved_with(_as_text(dict.fromkeys(every, each)))) for each in policies}
    options = most_read(dict(_options(captured, plan, kinds, saved, times_us)))
    before_us = sum(option.again_us for own in options.values() for option in own if option.policy == known)
    found = []
    for chosen in itertools.product(*options.values()):
        by_kind = dict.fromkeys(every, known) | dict(zip(options, (one.policy for one in chosen), strict=True))
        again_us, read_bytes = sum(one.again_us for one in chosen), tuple(one.read_bytes for one in chosen)
        if again_us <= (1 - _LEAST_GAIN) * before_us:
            found.append(Combination(policy=_as_text(by_kind), read_bytes=read_bytes, again_us=again_us))
    return sorted(found, key=lambda each: (each.again_us, sum(each.read_bytes)))


def first_that_fits(
    found: Sequence[Combination], peak_with: Callable[[str], float], most_bytes: float, refused: Collection[str]
) -> str | None:
    """The policy of the first of ``found`` that takes at most so much; None where none of those looked at does.

    What reads no less of any kind than one that takes more is not looked at, nor is what was ``refused``.
    """
    over: list[tuple[float, ...]] = []
    for each in found:
        if each.policy in refused:
            over.append(each.read_bytes)
        elif sum(each.read_bytes) <= most_bytes and not any(_reads_as_much(each.read_bytes, other) for other in over):
            if len(over) >= _MOST_LOOKED_AT:
                return None
            if peak_with(each.policy) <= most_bytes:
                return each.policy
            over.append(each.read_bytes)
    return None


def _reads_as_much(mine: Sequence[float], other: Sequence[float]) -> bool:
    return all(size >= than for size, than in zip(mine, other, strict=True))


def _as_text(by_kind: Mapping[str, str]) -> str:
    """A policy of all blocks by its name, but one that counts blocks: it counts those of each kind.

    A kind's pattern may match blocks of a longer one, which comes later.
    """
    names = set(by_kind.values())
    if len(names) == 1 and (len(by_kind) == 1 or not next(iter(names)).startswith("layer:")):
        return names.pop()
    return ", ".join(f"{kind}={name}" for kind, name in sorted(by_kind.items(), key=lambda item: len(item[0])))


def _options(
    captured: CapturedGraph,
    plan: ShardingPlan,
    kinds: Mapping[fx.Node, str],
    saved: Mapping[str, frozenset[str]],
    times_us: Mapping[fx.Node, float],
) -> Iterator[tuple[str, list[Option]]]:
    """For every kind what each policy means; what the first one does not have the backward read is never missing."""
    sizes_bytes = {policy: saved_bytes(captured, plan, names) for policy, names in saved.items()}
    read_without = next(iter(saved.values()))
    nodes: dict[str, list[fx.Node]] = {}
    for node, kind in kinds.items():
        nodes.setdefault(kind, []).append(node)
    for kind, own in nodes.items():
        names = {node.name for node in own}
        yield (
            kind,
            [
                Option(
                    policy=policy,
                    read_bytes=sum(sizes_bytes[policy][name] for name in names & sizes_bytes[policy].keys()),
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


def most_read(options: Mapping[str, list[Option]]) -> dict[str, list[Option]]:
    """The kinds whose policies differ most in what the backward reads."""
    sizes = {kind: [option.read_bytes for option in own] for kind, own in options.items()}
    spread = {kind: max(each) - min(each) for kind, each in sizes.items()}
    return {kind: options[kind] for kind in sorted(spread, key=lambda kind: -spread[kind])[:MOST_KINDS]}
