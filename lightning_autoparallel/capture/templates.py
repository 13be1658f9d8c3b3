"""One traced call of a block, and the copies of it that take the place of other calls.

A template is the joint graph of one block alone. Where a captured graph has a call of ``torch_compat.blocks``, copies
of the template's nodes go in: forward ones at the call, backward ones at its backward, annotated as the block's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_autoparallel.capture.block_calls import BlockInputs, BlockResults, call_on
from lightning_autoparallel.capture.edges import is_edge
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.block_operators import BLOCK, BLOCK_BACKWARD, describe_tensors
from lightning_autoparallel.torch_compat.constants import copy_constant
from lightning_autoparallel.torch_compat.regions import REGION_KEY
from lightning_autoparallel.torch_compat.tracing import JointExport, export_joint, fake_tensor_like, nested_tracing
from lightning_autoparallel.torch_compat.tree import tree_flatten


@dataclass(frozen=True, kw_only=True)
class Template:
    """A block's joint graph; ``path`` is the block's that was traced, ``inputs`` and ``results`` are of that call."""

    path: str
    inputs: BlockInputs
    results: BlockResults
    graph_module: fx.GraphModule
    differentiated: tuple[int, ...]  # positions of the inputs that get gradients, in the order of the graph's
    result_geometry: str
    gradient_geometry: str


class _Flat(nn.Module):
    """The block as a function of flat tensors."""

    def __init__(self, block: nn.Module, inputs: BlockInputs) -> None:
        super().__init__()
        self._call: Callable[..., Any] = lambda tensors: call_on(block, inputs, tensors)
        self._like = inputs.tensors

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        for source, tensor in zip(self._like, tensors, strict=True):
            copy_constant(source, tensor)
        given = {id(tensor) for tensor in tensors}
        leaves = tree_flatten(self._call(tensors))[0]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in given]


def make_template(
    path: str,
    block: nn.Module,
    inputs: BlockInputs,
    results: BlockResults,
    decompositions: dict[Any, Callable[..., Any]],
) -> Template | None:
    """Trace ``block`` on tensors like ``inputs``; None if it changes an input, or is not differentiated throughout."""
    tensors = [_fresh(tensor) for tensor in inputs.tensors]
    with nested_tracing(), torch.set_grad_enabled(bool(inputs.ambient[0])):
        export = export_joint(_Flat(block, inputs), tuple(tensors), decompositions)
    kinds = [kind for kind, _ in filter(None, export.outputs)]
    tangents = [position for kind, position in export.inputs if kind == "tangent"]
    made = len(results.tensors)
    differentiated = any(tensor.requires_grad for tensor in results.tensors)
    if "mutation" in kinds or kinds.count("output") != made or len(tangents) != (made if differentiated else 0):
        return None
    return Template(
        path=path,
        inputs=inputs,
        results=results,
        graph_module=export.graph_module,
        differentiated=tuple(position for kind, position in filter(None, export.outputs) if kind == "gradient"),
        result_geometry=describe_tensors(results.tensors),
        gradient_geometry=describe_tensors(_gradients(export)),
    )


def _fresh(tensor: Tensor) -> Tensor:
    return fake_tensor_like(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _gradients(export: JointExport) -> list[Tensor]:
    (output,) = [node for node in export.graph_module.graph.nodes if node.op == "output"]
    pairs = zip(output.args[0], export.outputs, strict=True)
    return [node.meta["val"] for node, kind in pairs if kind is not None and kind[0] == "gradient"]


@dataclass
class TemplateCopies:
    """Writes copies of templates into one captured graph, in place."""

    graph_module: fx.GraphModule
    templates: Sequence[Template]
    paths: Mapping[int, str]  # call number -> path of the block that was called
    _forward: dict[int, dict[fx.Node, fx.Node]] = field(default_factory=dict)
    _numbers: dict[tuple[int, Any], int] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=lambda: itertools.count(-1, -1))  # others count up from 0

    def write(self) -> None:
        """Replace every stand-in of a call."""
        for node in list(self.graph_module.graph.nodes):
            if node.op == "call_function" and node.target in (BLOCK, BLOCK_BACKWARD):
                self._replace(node)
        self.graph_module.graph.lint()

    def _replace(self, stand_in: fx.Node) -> None:
        given, _, which, number = stand_in.args
        template = self.templates[which]  # type: ignore[index]
        backward = stand_in.target is BLOCK_BACKWARD
        nodes = list(template.graph_module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        count = len(template.inputs.tensors)
        if backward:
            env = self._forward[number]  # type: ignore[index]
            env.update(zip(placeholders[count:], given, strict=True))  # type: ignore[arg-type]
        else:
            env = self._forward[number] = dict(zip(placeholders[:count], given, strict=True))  # type: ignore[arg-type, index]
        with self.graph_module.graph.inserting_before(stand_in):
            for node in nodes:
                if node.op in ("call_function", "get_attr") and fxn.is_backward(node) == backward:
                    env[node] = self._copy(node, env, template, stand_in)
        self._give_results(stand_in, template, env)

    def _copy(self, node: fx.Node, env: dict[fx.Node, fx.Node], template: Template, stand_in: fx.Node) -> fx.Node:
        which, number = stand_in.args[2:]
        copied = self.graph_module.graph.node_copy(node, env.__getitem__)
        if node.op == "get_attr":
            copied.target = f"_template{which}_{node.target}"
            setattr(self.graph_module, copied.target, getattr(template.graph_module, str(node.target)))
        if is_edge(node):
            value, name, old = copied.args
            kind, _, path = str(name).partition(":")
            own_name = f"{kind}:{self._path(path, template, number)}"
            copied.args = (value, own_name, self._renumbered(number, ("edge", old)))
        copied.meta["custom"] = self._custom(node, stand_in, template)
        copied.meta.pop("seq_nr", None)  # another trace's numbers
        return copied

    def _custom(self, node: fx.Node, stand_in: fx.Node, template: Template) -> dict[str, Any]:
        number = stand_in.args[3]
        around: dict[str, Any] = stand_in.meta.get("custom") or {}
        own: dict[str, Any] = dict(node.meta.get("custom") or {})
        own["module"] = self._path(own.get("module") or template.path, template, number)
        if REGION_KEY in own:
            own[REGION_KEY] = self._renumbered(number, (REGION_KEY, own[REGION_KEY]))
        elif REGION_KEY in around:
            own[REGION_KEY] = around[REGION_KEY]
        return own

    def _path(self, path: str, template: Template, number: Any) -> str:
        return self.paths[number] + path.removeprefix(template.path)

    def _renumbered(self, number: Any, key: Any) -> int:
        if (number, key) not in self._numbers:
            self._numbers[number, key] = next(self._fresh)
        return self._numbers[number, key]

    def _give_results(self, stand_in: fx.Node, template: Template, env: dict[fx.Node, fx.Node]) -> None:
        """Whoever picks a result of the stand-in reads the copy's."""
        (output,) = [node for node in template.graph_module.graph.nodes if node.op == "output"]
        flat = list(output.args[0])
        made = len(template.results.tensors)
        results = flat[made:] if stand_in.target is BLOCK_BACKWARD else flat[:made]
        results = [item for item in results if item is not None]
        for user in list(stand_in.users):
            assert fxn.is_getitem(user), f"{user.format_node()} reads all results of a block at once"
            user.replace_all_uses_with(env[results[user.args[1]]])  # type: ignore[index, call-overload]
            self.graph_module.graph.erase_node(user)
        self.graph_module.graph.erase_node(stand_in)
