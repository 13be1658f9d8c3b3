"""Run the graphs of all ranks side by side in one process, their collectives computed on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat import collectives
from tests.support.placements import reduced

Groups = Mapping[str, Sequence[Sequence[int]]]  # group name -> the ranks that share it, one list per instance


def one_group(name: str, size: int) -> Groups:
    """All ranks in one group."""
    return {name: [list(range(size))]}


def run_lockstep(graphs: Sequence[fx.Graph], inputs: Sequence[Sequence[Tensor]], groups: Groups) -> list[list[Tensor]]:
    """The outputs of every rank; ``graphs`` and ``inputs`` have one entry per rank.

    Ranks must run the same operators in the same order, as they must in a real world: anything else would hang there.
    """
    envs: list[dict[fx.Node, Any]] = [{} for _ in graphs]
    remaining = [iter(tensors) for tensors in inputs]
    outputs: list[list[Tensor]] = []
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        first = nodes[0]
        assert len({(node.op, str(node.target)) for node in nodes}) == 1, f"ranks disagree: {nodes}"
        if first.op == "placeholder":
            results = [next(tensors) for tensors in remaining]
        elif first.op == "output":
            outputs = [list(_evaluated(node.args[0], env)) for node, env in zip(nodes, envs, strict=True)]
            break
        elif fxn.collective_kind(first):
            results = _communicate(nodes, envs, groups)
        elif fxn.is_wait(first):
            results = [env[node.args[0]] for node, env in zip(nodes, envs, strict=True)]
        else:
            results = [
                node.target(*_evaluated(node.args, env), **_evaluated(dict(node.kwargs), env))
                for node, env in zip(nodes, envs, strict=True)
            ]
        for node, env, result in zip(nodes, envs, results, strict=True):
            env[node] = result
    return outputs


def _evaluated(arguments: Any, env: Mapping[fx.Node, Any]) -> Any:
    return fx.map_arg(arguments, lambda node: env[node])


def _communicate(nodes: Sequence[fx.Node], envs: Sequence[Mapping[fx.Node, Any]], groups: Groups) -> list[Any]:
    results: dict[int, Any] = {}
    for ranks in groups[fxn.group_of(nodes[0])]:
        sent = [_evaluated(nodes[rank].args[0], envs[rank]) for rank in ranks]
        arguments = [nodes[rank].args[1:-1] for rank in ranks]
        if nodes[0].target is collectives.ALL_GATHER_SEVERAL:
            assert len({tensor.dtype for tensors in sent for tensor in tensors}) == 1, "gloo rounds to the first dtype"
            each = [_run(collectives.ALL_GATHER, list(tensors), arguments) for tensors in zip(*sent, strict=True)]
            received: list[Any] = [list(results) for results in zip(*each, strict=True)]
        else:
            received = _run(nodes[0].target, sent, arguments)
        results |= dict(zip(ranks, received, strict=True))
    return [results[rank] for rank in range(len(nodes))]


def _run(target: Any, sent: list[Tensor], arguments: list[Any]) -> list[Tensor]:
    assert len({tensor.shape for tensor in sent}) == 1, "ranks send different shapes"
    assert all(tensor.is_contiguous() for tensor in sent), "collectives need contiguous tensors"
    return _COLLECTIVES[target](sent, arguments)


def _all_gather(sent: list[Tensor], arguments: list[Any]) -> list[Tensor]:
    assert all(size == len(sent) for (size,) in arguments)
    return [torch.cat([part.reshape(-1, *part.shape[1:]) for part in sent]) for _ in sent]


def _all_reduce(sent: list[Tensor], arguments: list[Any]) -> list[Tensor]:
    (reduce_op,) = {given for (given,) in arguments}
    return [reduced(sent, reduce_op) for _ in sent]


def _reduce_scatter(sent: list[Tensor], arguments: list[Any]) -> list[Tensor]:
    ((reduce_op, size),) = set(arguments)
    assert size == len(sent)
    return list(reduced(sent, reduce_op).chunk(size))


def _all_to_all(sent: list[Tensor], arguments: list[Any]) -> list[Tensor]:
    pieces = [tensor.split(input_sizes) for tensor, (_, input_sizes) in zip(sent, arguments, strict=True)]
    received = [torch.cat([piece[rank] for piece in pieces]) for rank in range(len(sent))]
    assert all(sum(output_sizes) == len(r) for r, (output_sizes, _) in zip(received, arguments, strict=True))
    return received


def _broadcast(sent: list[Tensor], arguments: list[Any]) -> list[Tensor]:
    return [sent[source].clone() for (source,) in arguments]


_COLLECTIVES: dict[Any, Callable[[list[Tensor], list[Any]], list[Tensor]]] = {
    collectives.ALL_GATHER: _all_gather,
    collectives.ALL_REDUCE: _all_reduce,
    collectives.REDUCE_SCATTER: _reduce_scatter,
    collectives.ALL_TO_ALL: _all_to_all,
    collectives.BROADCAST: _broadcast,
}
