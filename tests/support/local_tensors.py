"""Run the graphs of all ranks as one program on torch's ``LocalTensor``: a world of fake ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode


def run_on_local_tensors(graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The outputs of every rank; ``graphs`` and ``inputs`` have one entry per rank.

    A call whose constants are the same on all ranks, as those of collectives are, runs once on local tensors under
    ``LocalTensorMode``; where each rank takes another slice, once per rank. Group names are those of rank 0.
    """
    env: dict[fx.Node, Any] = {}  # keyed by the nodes of rank 0
    twins = [dict(zip(graph.nodes, graphs[0].nodes, strict=True)) for graph in graphs]
    remaining = iter([LocalTensor(dict(enumerate(parts))) for parts in zip(*inputs, strict=True)])
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        first = nodes[0]
        assert len({(node.op, str(node.target)) for node in nodes}) == 1, f"ranks disagree: {nodes}"
        if first.op == "placeholder":
            env[first] = next(remaining)
        elif first.op == "output":
            return [[env[value]._local_tensors[rank] for value in first.args[0]] for rank in range(len(graphs))]
        else:
            calls = [fx.map_arg((n.args, dict(n.kwargs)), twin.get) for n, twin in zip(nodes, twins, strict=True)]
            alike = first.all_input_nodes and _all_equal(calls)
            env[first] = _alike(first.target, calls[0], env) if alike else _apart(first.target, calls, env)
    raise AssertionError("a graph without outputs")


def _all_equal(calls: Sequence[Any]) -> bool:
    return all(call == calls[0] for call in calls)


def _alike(target: Any, call: Any, env: dict[fx.Node, Any]) -> Tensor:
    args, kwargs = fx.map_arg(call, env.__getitem__)
    ranks = next(value for value in args if isinstance(value, LocalTensor))._local_tensors
    with LocalTensorMode(frozenset(ranks)):
        return target(*args, **kwargs)


def _apart(target: Any, calls: Sequence[Any], env: dict[fx.Node, Any]) -> Tensor:
    results: dict[int, torch.Tensor] = {}
    for rank, call in enumerate(calls):
        args, kwargs = fx.map_arg(call, lambda node, rank=rank: env[node]._local_tensors[rank])
        results[rank] = target(*args, **kwargs)
    return LocalTensor(results)
