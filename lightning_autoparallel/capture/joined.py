"""Calls of modules as one graph: what a step computes in its captured calls, for a plan to be found for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.contracts import CapturedGraph, GraphInput, GraphOutput
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.graph_modules import graph_module
from lightning_autoparallel.torch_compat.tracing import fake_mode_of, fake_tensor_like
from lightning_autoparallel.torch_compat.tree import tree_map

aten = torch.ops.aten
_SHARED = ("parameter", "buffer")  # inputs that all calls have in common, by their names


def join_calls(name: str, calls: Sequence[CapturedGraph]) -> CapturedGraph:
    """One local graph of ``calls`` in their order: all forwards, then the backwards, the last one's first.

    Parameters and buffers are inputs once, and the gradients of a parameter that several calls read are added up. What
    the step computes between calls is not in it: results are outputs, and their gradients are inputs.
    """
    assert calls, "there is nothing to join"
    joining = _Joining()
    parts = [_Part(joining, number, call) for number, call in enumerate(calls)]
    for part in parts:
        part.placeholders()
    for part in parts:
        part.copy(backward=False)
    for part in reversed(parts):
        part.copy(backward=True)
    for part in parts:
        part.results()
    for part in reversed(parts):
        part.gradients()
    joining.graph.output([node for _, node in joining.outputs])
    return CapturedGraph(
        name=name,
        graph_module=graph_module(torch.nn.Module(), joining.graph),
        inputs=tuple(joining.inputs),
        outputs=tuple(item for item, _ in joining.outputs),
        output_spec=None,
        constants={f"{i}.{key}": value for i, call in enumerate(calls) for key, value in call.constants.items()},
        has_backward=any(call.has_backward for call in calls),
        local=True,
    )


@dataclass
class _Joining:
    """The graph that is made, on the fake mode of the first call's."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[GraphInput] = field(default_factory=list)
    outputs: list[tuple[GraphOutput, fx.Node]] = field(default_factory=list)
    shared: dict[tuple[str, str], fx.Node] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)  # of parameters: where in the outputs they are
    _mode: Any = None

    def own(self, value: Any) -> Any:
        """A value of another trace as one of this graph's; what is no tensor stays."""
        return tree_map(self._like, value)

    def _like(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self._mode = self._mode or fake_mode_of(value)
        with self._mode:
            return fake_tensor_like(value.shape, value.stride(), value.dtype, value.device)

    def sum(self, first: fx.Node, second: fx.Node) -> fx.Node:
        """Both added up, in the backward."""
        node = self.graph.call_function(aten.add.Tensor, (first, second))
        node.meta = {**second.meta, "val": self.own(second.meta["val"])}
        return node


class _Part:
    """One call, and what its nodes are in the joined graph."""

    def __init__(self, joining: _Joining, number: int, call: CapturedGraph) -> None:
        self._joining, self._number, self._call = joining, number, call
        self._env: dict[fx.Node, fx.Node] = {}
        nodes = list(call.graph_module.graph.nodes)
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        self._calls = [node for node in nodes if node.op == "call_function"]
        (output,) = [node for node in nodes if node.op == "output"]
        self._results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
        self._late = self._after_tangents()

    def _after_tangents(self) -> set[fx.Node]:
        """What depends on gradients of the call's results."""
        pairs = zip(self._placeholders, self._call.inputs, strict=True)
        found = {node for node, item in pairs if item.kind == "tangent"}
        for node in self._calls:
            if found.intersection(node.all_input_nodes):
                found.add(node)
        return found

    def placeholders(self) -> None:
        for node, item in zip(self._placeholders, self._call.inputs, strict=True):
            key = (item.kind, item.name)
            if item.kind in _SHARED and key in self._joining.shared:
                self._env[node] = self._joining.shared[key]
                continue
            made = self._joining.graph.placeholder(node.name)
            self._describe(node, made)
            self._env[node] = made
            if item.kind in _SHARED:
                self._joining.shared[key] = made
            self._joining.inputs.append(item if item.kind in _SHARED else self._numbered(item))

    def copy(self, backward: bool) -> None:
        for node in self._calls:
            is_late = node in self._late or fxn.is_backward(node)
            if is_late == backward:
                made = self._joining.graph.node_copy(node, self._env.__getitem__)
                self._describe(node, made)
                self._env[node] = made

    def results(self) -> None:
        self._joining.outputs += [
            (self._numbered(item), node) for item, node in self._ends() if item.kind != "gradient"
        ]

    def gradients(self) -> None:
        outputs, places = self._joining.outputs, self._joining.gradients
        for item, node in self._ends():
            if item.kind != "gradient":
                continue
            if not item.is_parameter_gradient:
                outputs.append((self._numbered(item), node))
            elif item.name in places:
                known, before = outputs[places[item.name]]
                outputs[places[item.name]] = known, self._joining.sum(before, node)
            else:
                places[item.name] = len(outputs)
                outputs.append((item, node))

    def _ends(self) -> Iterable[tuple[GraphOutput, fx.Node]]:
        return [(item, self._env[node]) for item, node in zip(self._call.outputs, self._results, strict=True)]

    def _numbered(self, item: Any) -> Any:
        """An input or output that is this call's own; buffers keep their names."""
        return item if item.kind == "buffer" else dataclasses.replace(item, name=f"{self._number}.{item.name}")

    def _describe(self, node: fx.Node, made: fx.Node) -> None:
        made.meta = {**node.meta, "val": self._joining.own(node.meta.get("val"))}
