"""Plans as JSON files: readable, versioned, and bound to the graph that they were made for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import CapturedGraph, NodePlacement, Placements, ShardingPlan
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import placement_text, shard
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.plan.fingerprint import call_text
from lightning_autoparallel.plan.planner import joint_axes, plan_axes

VERSION = 1


def plan_document(
    captured: CapturedGraph, plan: ShardingPlan, spec: PlanSpec, mesh: ParallelMesh, recomputes: str | None = None
) -> dict[str, Any]:
    """What a plan file holds: mesh, base and rules, parameter placements, and every node's call and placements.

    Also whether the plan was found, whether what it gathers stays so until the backward, and the policy of activation
    checkpointing by which its backward ``recomputes``.
    """
    nodes = _nodes(captured)
    calls = [call_text(node) for node in nodes]
    return {
        "version": VERSION,
        "graph": captured.name,
        "fingerprint": _fingerprint(calls),
        "mesh": mesh.sizes,
        "axes": [axis.name for axis in plan.axes],
        **spec.as_written(),
        "found": spec.found,
        "keeps_gathered": plan.keeps_gathered,
        "activation_checkpointing": recomputes,
        "parameters": {name: _texts(placements) for name, placements in plan.parameters.items()},
        "outputs": [_texts(placements) for placements in plan.outputs],
        "nodes": [
            _node_entry(place, call, plan.nodes[node.name])
            for node, place, call in zip(nodes, _described(captured), calls, strict=True)
        ],
    }


def is_of_graph(document: Mapping[str, Any], captured: CapturedGraph) -> bool:
    """Whether the document's plan was made for this very graph."""
    calls = [call_text(node) for node in _nodes(captured)]
    return bool(document["graph"] == captured.name and document["fingerprint"] == _fingerprint(calls))


def _nodes(captured: CapturedGraph) -> list[fx.Node]:
    return [node for node in captured.graph_module.graph.nodes if node.op != "output"]


def _described(captured: CapturedGraph) -> list[str]:
    """Where each node comes from: what an input stands for, or the user's line."""
    nodes, inputs = _nodes(captured), iter(captured.inputs)
    stood_for = {node: next(inputs) for node in nodes if node.op == "placeholder"}
    names = {node: f"{each.kind} {each.name}".rstrip() for node, each in stood_for.items()}
    return [names.get(node) or fxn.describe(node) for node in nodes]


def _node_entry(place: str, call: str, placement: NodePlacement) -> dict[str, Any]:
    return {
        "at": place,
        "call": call,
        "inputs": [_texts(placements) for placements in placement.inputs],
        "outputs": [_texts(placements) for placements in placement.outputs],
    }


def _texts(placements: Placements | None) -> list[str] | None:
    return None if placements is None else [placement_text(placement) for placement in placements]


def _fingerprint(calls: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(calls).encode(), digest_size=16).hexdigest()


def read_plan(path: str | Path) -> dict[str, Any]:
    """The document in a plan file.

    Raises:
        ConfigError: no such file, no plan, or a plan of another version.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"plan file {path} cannot be read: {error}") from error
    if not isinstance(document, dict) or "version" not in document or "nodes" not in document:
        raise ConfigError(f"{path} is no plan file: dump one with dump_dir=... or `lightning-autoparallel plan --dump`")
    if document["version"] != VERSION:
        raise ConfigError(
            f"plan file {path} has version {document['version']}, this package reads {VERSION}: dump anew"
        )
    return document


def restore_plan(
    document: Mapping[str, Any], captured: CapturedGraph, spec: PlanSpec, mesh: ParallelMesh
) -> ShardingPlan:
    """The plan of a file, for the graph and the mesh that it was made for.

    Raises:
        ConfigError: the graph or the mesh is another one; the message names the first difference.
    """
    _check_same_mesh(document, mesh)
    _check_same_graph(document, captured)
    return _plan_of(document, captured, spec, mesh)


def kept_plan_of(
    document: Mapping[str, Any], captured: CapturedGraph, spec: PlanSpec, mesh: ParallelMesh
) -> ShardingPlan | None:
    """The plan of a document if it was made for this very graph, else None.

    Raises:
        ConfigError: it was, but for another mesh.
    """
    if not is_of_graph(document, captured):
        return None
    _check_same_mesh(document, mesh)
    return _plan_of(document, captured, spec, mesh)


def _plan_of(document: Mapping[str, Any], captured: CapturedGraph, spec: PlanSpec, mesh: ParallelMesh) -> ShardingPlan:
    axes, nodes, entries = plan_axes(spec, mesh), _nodes(captured), document["nodes"]
    if [axis.name for axis in axes] != document["axes"]:
        raise ConfigError(
            f"the plan file's placements are on axes {document['axes']}, its base and rules have "
            f"{[axis.name for axis in axes]}: they were changed by hand; plan anew"
        )
    return ShardingPlan(
        name=spec.name,
        axes=axes,
        nodes={
            node.name: NodePlacement(
                inputs=tuple(_placements(texts) or () for texts in entry["inputs"]),
                outputs=tuple(_placements(texts) for texts in entry["outputs"]),
            )
            for node, entry in zip(nodes, entries, strict=True)
        },
        parameters={name: _placements(texts) or () for name, texts in document["parameters"].items()},
        outputs=tuple(_placements(texts) for texts in document["outputs"]),
        joint_axes=joint_axes(axes, mesh),
        keeps_gathered=bool(document.get("keeps_gathered")),
    )


def _check_same_mesh(document: Mapping[str, Any], mesh: ParallelMesh) -> None:
    if list(document["mesh"].items()) != list(mesh.sizes.items()):  # placements are in the order of its axes
        raise ConfigError(f"the plan file was made for mesh {document['mesh']}, this job has {mesh.sizes}")


def _check_same_graph(document: Mapping[str, Any], captured: CapturedGraph) -> None:
    calls, entries = [call_text(node) for node in _nodes(captured)], document["nodes"]
    if document["fingerprint"] == _fingerprint(calls):
        return
    for place, call, entry in zip(_described(captured), calls, entries, strict=False):
        if call != entry["call"]:
            raise ConfigError(
                f"the plan file was made for another graph: {place} is `{call}` here, {entry['at']} is "
                f"`{entry['call']}` in the file; plan anew"
            )
    if len(calls) == len(entries):
        raise ConfigError("the plan file's fingerprint is not that of its own nodes: it was changed by hand; plan anew")
    raise ConfigError(
        f"the plan file was made for another graph: it has {len(entries)} nodes, this one {len(calls)}; plan anew"
    )


def _placements(texts: Sequence[str] | None) -> Placements | None:
    return None if texts is None else _parsed(tuple(texts))


@cache  # a plan of thousands of nodes has a handful of them
def _parsed(texts: tuple[str, ...]) -> Placements:
    return tuple(map(_placement, texts))


def _placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    if match := re.fullmatch(r"S\((\d+)(?:, (\d+) blocks)?\)", text):
        return shard(int(match[1]), int(match[2] or 1))
    if match := re.fullmatch(r"P\((\w+)\)", text):
        return Partial(match[1])
    raise ConfigError(f"placement {text!r} of the plan file is none of R, S(dim), S(dim, n blocks), P(sum)")
