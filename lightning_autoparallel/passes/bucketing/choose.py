"""Which collectives are launched as one: near each other, alike, independent, and no more than fills the link."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.bucketing.paths import CollectivePaths

BucketLimit = Callable[[str, str], int]  # (kind, process group) -> bytes of the larger side of one launch

# What is next to a block and small, at most this share of the limit, belongs to it: the norm behind the last block
# needs no launch of its own, and where all blocks are small only latency counts, which several of them share.
_SMALL_SHARE = 1 / 16


def choose_buckets(graph: fx.Graph, limit: BucketLimit) -> list[list[fx.Node]]:
    """Buckets of two or more tagged collectives each.

    Members share kind, process group and, where values are reduced, dtype and operator. They follow each other among
    the collectives that could join them, lie in one block, and together are no larger than ``limit``. No path leads
    from one member to another, also not through other buckets.
    """
    paths = CollectivePaths(graph)
    spans = _spans(paths.candidates)
    alike: dict[Any, list[fx.Node]] = {}
    for node in paths.candidates:
        # What fills the link by itself is left alone: joining it with anything would only copy it.
        if fxn.collective_size_bytes(node) <= limit(fxn.collective_kind(node) or "", fxn.group_of(node)):
            alike.setdefault(_key(node), []).append(node)
    buckets: list[list[fx.Node]] = []
    for (kind, group, *_), nodes in alike.items():
        most = limit(kind, group)
        for near in _near_each_other(nodes, spans, most * _SMALL_SHARE):
            buckets += _filled(near, most, paths)
    return [bucket for bucket in buckets if len(bucket) > 1]


def _near_each_other(nodes: list[fx.Node], spans: Mapping[fx.Node, str], small_bytes: float) -> list[list[fx.Node]]:
    """Runs of one span; neighbours are joined where all of them but the largest are small together."""
    near: list[list[fx.Node]] = []
    largest = total = 0
    for _, run in itertools.groupby(nodes, key=spans.__getitem__):
        members = list(run)
        size_bytes = sum(map(fxn.collective_size_bytes, members))
        if near and total + size_bytes - max(largest, size_bytes) <= small_bytes:
            near[-1] += members
            largest, total = max(largest, size_bytes), total + size_bytes
        else:
            near.append(members)
            largest = total = size_bytes
    return near


def _filled(nodes: list[fx.Node], most: int, paths: CollectivePaths) -> list[list[fx.Node]]:
    """The nodes in order in as few buckets of at most ``most`` bytes as their order and paths between them allow."""
    buckets: list[list[fx.Node]] = []
    filled = 0
    for node in nodes:
        size_bytes = fxn.collective_size_bytes(node)
        if buckets and filled + size_bytes <= most and paths.may_merge(buckets[-1], node):
            paths.merge(buckets[-1], node)
            buckets[-1].append(node)
            filled += size_bytes
        else:
            buckets.append([node])
            filled = size_bytes
    return buckets


def _key(node: fx.Node) -> tuple[str, str, Any, Any]:
    """What members have in common: gathered bytes are moved as they are, so their dtypes may differ."""
    kind, group = fxn.collective_kind(node) or "", fxn.group_of(node)
    if fxn.collective_role(node) == fxn.PARAMETER_GATHER:
        return kind, group, None, None
    return kind, group, _dtype(node), node.args[1]


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _spans(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """The part of the graph each lies in: its block, or outside of blocks the topmost module that is not all of them.

    A node of no module goes with the one ahead of it.
    """
    nodes = list(nodes)
    paths = {node: path for node in nodes if (path := fxn.module_path(node)) is not None}
    depth = len(common_path(paths.values()).split(".")) if common_path(paths.values()) else 0
    spans: dict[fx.Node, str] = {}
    last = ""
    for node in nodes:
        if node in paths:
            last = fxn.block_of(paths[node]) or ".".join(paths[node].split(".")[: depth + 1])
        spans[node] = last
    return spans


def common_path(paths: Iterable[str]) -> str:
    """``layers.3`` of ``layers.3.norm`` and ``layers.3.attention.wq``: the module that all of them lie in."""
    split = [path.split(".") for path in paths]
    common: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
