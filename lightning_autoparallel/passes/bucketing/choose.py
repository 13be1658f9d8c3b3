"""Which collectives are launched as one: near each other, alike, independent, and no more than fills the link."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.bucketing.paths import CollectivePaths

BucketLimit = Callable[[str, str], int]  # (kind, process group) -> bytes of the larger side of one launch

# A bucket holds collectives of one block, and of others at most this share of the limit: a norm behind the last block
# needs no launch of its own, and blocks so small that only latency counts are gathered several at a time.
_GUEST_SHARE = 1 / 64


@dataclass
class _Bucket:
    limit: int
    members: list[fx.Node] = field(default_factory=list)
    bytes_by_span: dict[str, int] = field(default_factory=dict)

    def has_room(self, span: str, size_bytes: int) -> bool:
        sizes = {**self.bytes_by_span, span: self.bytes_by_span.get(span, 0) + size_bytes}
        total = sum(sizes.values())
        return total <= self.limit and total - max(sizes.values()) <= self.limit * _GUEST_SHARE

    def add(self, node: fx.Node, span: str, size_bytes: int) -> None:
        self.members.append(node)
        self.bytes_by_span[span] = self.bytes_by_span.get(span, 0) + size_bytes


def choose_buckets(graph: fx.Graph, limit: BucketLimit) -> list[list[fx.Node]]:
    """Buckets of two or more tagged collectives each, in the order of the graph.

    Members share kind, process group and, where values are reduced, dtype and operator. They follow each other among
    the collectives that could join them, lie in one block, and together are no larger than ``limit``. No path leads
    from one member to another, also not through other buckets.
    """
    paths = CollectivePaths(graph)
    spans = _spans(paths.candidates)
    filling: dict[Any, _Bucket] = {}
    done: list[_Bucket] = []
    for node in paths.candidates:
        size_bytes, span = fxn.collective_size_bytes(node), spans[node]
        key = _key(node)
        most = limit(key[0], key[1])
        if size_bytes > most:
            continue  # it fills the link by itself, and joining anything would copy it
        bucket = filling.get(key)
        if bucket is not None and bucket.has_room(span, size_bytes) and paths.may_merge(bucket.members, node):
            paths.merge(bucket.members, node)
        else:
            bucket = filling[key] = _Bucket(limit=most)
            done.append(bucket)
        bucket.add(node, span, size_bytes)
    return [bucket.members for bucket in done if len(bucket.members) > 1]


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
