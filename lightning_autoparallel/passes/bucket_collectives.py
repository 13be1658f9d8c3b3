"""``bucket_collectives``: parameters of a block are gathered in one launch, and their gradients reduced in one.

A launch costs its latency whatever it moves. What ``tag_collectives`` has tagged is merged, where nothing depends on
another member, up to the size at which the link is full and within one block: what is gathered together waits in memory
together. ``bucketing/`` chooses the buckets and writes them.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.bucketing import BucketLimit, BucketWriter, choose_buckets

# Where nothing is known of the link: a ring of 64 ranks over 8 nodes spends a twentieth of its time on latency at 1 GB.
DEFAULT_BYTES = 1_000_000_000


def bucket_collectives(graph: fx.Graph, *, limit: BucketLimit | None = None) -> tuple[str, ...]:
    """Merge tagged collectives that are near each other, alike and independent.

    ``limit`` gives the bytes that one launch may move at most, by kind and process group: of the gathered, or the not
    yet scattered, tensor.
    """
    writer = BucketWriter(graph)
    members: Counter[str] = Counter()
    buckets: Counter[str] = Counter()
    for bucket in choose_buckets(graph, limit or _default_limit):
        kind = fxn.collective_kind(bucket[0]) or ""
        members[kind] += len(bucket)
        buckets[kind] += 1
        writer.write(bucket)
    return tuple(f"{members[kind]} {kind} in {buckets[kind]} buckets" for kind in buckets)


def _default_limit(kind: str, group: str) -> int:
    return DEFAULT_BYTES
