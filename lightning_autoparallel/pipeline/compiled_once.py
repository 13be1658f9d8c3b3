"""Ranks that would compile the same graphs for the same cache: one does, and the others find what it has made."""

from __future__ import annotations

import hashlib
import socket

import torch.distributed as dist
from torch import Tensor

from lightning_autoparallel.contracts import PartitionedGraph
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.plan import call_text
from lightning_autoparallel.torch_compat.compiled_on_disk import cache_folder


def compiling_turn(partitioned: PartitionedGraph, control: ControlGroup) -> tuple[int, int]:
    """The turn, 0 or 1, in which this rank compiles, and how many turns there are; every rank calls it alike.

    Where two keys are equal by mistake the later rank compiles its own graphs, only later.
    """
    if control.group is None:
        return 0, 1
    keys = control.gather(_key(partitioned))
    follows = [key is not None and key in keys[:rank] for rank, key in enumerate(keys)]
    return int(follows[dist.get_rank()]), 1 + any(follows)


def _key(partitioned: PartitionedGraph) -> tuple[str, ...] | None:
    """The same for ranks that read one cache and compile one graph on one device; None where nothing is kept."""
    folder = cache_folder()
    if folder is None:
        return None
    lines, devices = hashlib.blake2b(digest_size=16), set()
    for half in partitioned.graphs().values():
        for node in half.graph.nodes:
            lines.update(f"{call_text(node)}\n".encode())
            if node.op == "placeholder" and isinstance(value := node.meta["val"], Tensor):
                devices.add(str(value.device))
    return socket.gethostname(), folder, *sorted(devices), lines.hexdigest()
