"""The conventions of AOTAutograd's joint graphs: what a partition function is given, and what it must give back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import (
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes, free_symbols

from lightning_autoparallel.torch_compat import collectives

__all__ = [
    "binding_symbols",
    "close_backward",
    "close_forward",
    "has_effect",
    "is_backward_input",
    "is_sym_node",
    "joint_outputs",
    "saved_order",
]

# Tensors that were kept on ctx without save_for_backward: AOTAutograd wants them behind the others.
_UNCHECKED = "saved_tensor_with_no_vc_check"


def is_backward_input(node: fx.Node) -> bool:
    """Whether a placeholder exists in the backward only: a tangent, or the seed of its random draws."""
    return node.op == "placeholder" and any(word in str(node.target) for word in ("tangents", "bwd_"))


def joint_outputs(graph: fx.Graph, num_fwd_outputs: int) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Results and gradients (nodes or constants), then the descriptors of each."""
    (output,) = graph.find_nodes(op="output")
    values = list(output.args[0])
    descriptors = list(output.meta.get("desc", [None] * len(values)))
    return (
        values[:num_fwd_outputs],
        values[num_fwd_outputs:],
        descriptors[:num_fwd_outputs],
        descriptors[num_fwd_outputs:],
    )


def has_effect(node: fx.Node) -> bool:
    """Whether a call must run though nobody reads it; waits and random draws need not."""
    return node.op == "call_function" and node.target is not collectives.WAIT and node.is_impure(impure_random=False)


def saved_order(values: Iterable[fx.Node]) -> list[fx.Node]:
    """What is saved but symbols, in the order that AOTAutograd slices it in: tensors, then the meshes of DTensors."""
    return sorted(values, key=lambda node: (not isinstance(node.meta["val"], Tensor), bool(node.meta.get(_UNCHECKED))))


def binding_symbols(graph: fx.Graph, nodes: Iterable[fx.Node], saved: Sequence[fx.Node]) -> list[fx.Node]:
    """``saved`` symbols, after those that the shapes of ``nodes`` and the derived ones of ``saved`` are written in."""
    binding = find_symbol_binding_fx_nodes(graph)
    if not binding:
        return list(saved)
    symbols = [symbol for node in (*saved, *nodes) for symbol in sorted(_symbols_of(node), key=str)]
    bound = list(dict.fromkeys(binding[symbol] for symbol in symbols if symbol in binding))
    return [*bound, *(node for node in saved if node not in bound)]


def _symbols_of(node: fx.Node) -> Iterable[Any]:
    value = node.meta["val"]
    return free_symbols(value) if isinstance(value, Tensor) or is_sym_node(node) else ()


def close_forward(graph: fx.Graph, results: list[Any], saved: list[Any], descriptors: list[Any]) -> None:
    """The forward's output node: results, saved tensors, saved symbols."""
    kinds = [
        SavedForBackwardsNoVcCheckAOTOutput if node.meta.get(_UNCHECKED) else SavedForBackwardsAOTOutput
        for node in saved
    ]
    _close(graph, [*results, *saved], [*descriptors, *(kind(i) for i, kind in enumerate(kinds))])


def close_backward(graph: fx.Graph, gradients: list[Any], descriptors: list[Any]) -> None:
    """The backward's output node; its calls are marked as autograd's."""
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True
    _close(graph, gradients, descriptors)


def _close(graph: fx.Graph, values: list[Any], descriptors: list[Any]) -> None:
    output = graph.output(tuple(values))
    output.meta["desc"] = descriptors
    graph.lint()
