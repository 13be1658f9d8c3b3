"""Nodes at one place of equal blocks are of one class; the first and the last block are kept apart."""

from __future__ import annotations

import torch
from torch import fx

from lightning_autoparallel.plan.tied_blocks import repeats

aten = torch.ops.aten


def graph_of(blocks: list[list[object]]) -> dict[str, list[fx.Node]]:
    """Per block a parameter and calls in its module, and after all of them a sum that lies in none."""
    graph = fx.Graph()
    parameters = [graph.placeholder(f"p{i}") for i in range(len(blocks))]
    found: dict[str, list[fx.Node]] = {}
    value = graph.placeholder("x")
    for number, (parameter, targets) in enumerate(zip(parameters, blocks, strict=True)):
        found[f"layers.{number}"] = [parameter]
        for target in targets:
            value = graph.call_function(target, (value, parameter) if target is aten.mul.Tensor else (value,))
            value.meta["custom"] = {"module": f"layers.{number}.inner"}
            found[f"layers.{number}"].append(value)
    found["outside"] = [graph.call_function(aten.add.Tensor, (found["layers.1"][-1], found["layers.2"][-1]))]
    return found


def found_in(nodes: dict[str, list[fx.Node]], tied: bool = True):
    everything = [node for some in nodes.values() for node in some]
    names = {some[0]: f"{block}.weight" for block, some in nodes.items() if block != "outside"}
    return repeats(everything, names, lambda node: str(node.target) if node.op == "call_function" else "", tied)


def test_equal_blocks_between_the_first_and_the_last() -> None:
    alike = [aten.mul.Tensor, aten.relu.default]
    nodes = graph_of([alike] * 6)
    classes = found_in(nodes).classes
    # the sum of what blocks 1 and 2 make belongs to block 1, which is therefore of another kind than 2, 3 and 4
    assert len({tuple(classes[n] for n in nodes[f"layers.{i}"]) for i in (2, 3, 4)}) == 1
    assert classes[nodes["layers.2"][1]] != classes[nodes["layers.2"][2]]
    for other in (0, 1, 5):
        assert classes[nodes[f"layers.{other}"][1]] != classes[nodes["layers.2"][1]]


def test_parts() -> None:
    nodes = graph_of([[aten.relu.default]] * 5)
    parts = found_in(nodes).parts
    assert parts[nodes["layers.2"][1]] == parts[nodes["layers.3"][0]], "tied blocks are one part"
    assert parts[nodes["layers.0"][0]] == parts[nodes["layers.0"][1]] == "layers.0"
    assert parts[nodes["outside"][0]] == parts[nodes["layers.1"][0]]


def test_places_say_how_far_into_its_block_a_node_is() -> None:
    nodes = graph_of([[aten.mul.Tensor, aten.relu.default]] * 5)
    for tied in (True, False):
        places = found_in(nodes, tied).places
        assert [places[node] for node in nodes["layers.2"]] == [0, 1 / 3, 2 / 3], "a parameter and two calls"
        assert [places[node] for node in nodes["layers.4"]] == [places[node] for node in nodes["layers.2"]]


def test_blocks_that_differ_are_not_tied() -> None:
    other = [aten.mul.Tensor, aten.sigmoid.default]
    nodes = graph_of([[aten.mul.Tensor, aten.relu.default], other, other, [aten.mul.Tensor, aten.relu.default], other])
    classes = found_in(nodes).classes
    assert classes[nodes["layers.2"][1]] != classes[nodes["layers.3"][1]]


def test_nothing_is_tied_where_it_is_not_wanted() -> None:
    nodes = graph_of([[aten.relu.default]] * 5)
    classes = found_in(nodes, tied=False).classes
    assert len(set(classes.values())) == len(classes)
