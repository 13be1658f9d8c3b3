"""Lower partitioned graphs: Inductor, or interpreted as they are."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx

from lightning_autoparallel.contracts import GraphCallable, PartitionedGraph
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.torch_compat.graph_modules import graph_module, run_graph
from lightning_autoparallel.torch_compat.inductor import compile_graph, find_cpp_compiler


def check_compiler(device_type: str) -> None:
    """Refuse to compile for a CPU without a C++ compiler, before anything is captured.

    Raises:
        ConfigError: none is found.
    """
    if device_type == "cpu" and find_cpp_compiler() is None:
        raise ConfigError(
            "compile=True needs a C++ compiler for CPU code and none is on the PATH: install g++ (or set CXX), "
            "or set compile=False to interpret the graphs"
        )


def lower_partitioned(partitioned: PartitionedGraph, compile: bool) -> tuple[GraphCallable, GraphCallable | None]:
    """Callables that take a list of tensors: forward, and backward where there is one."""
    forward, backward = partitioned.forward, partitioned.backward
    if not compile:
        return interpreted(forward), None if backward is None else interpreted(backward)
    lowered = compile_graph(forward, is_inference=backward is None, is_backward=False)
    if backward is None:
        return lowered.call, None
    strides = _saved_strides(partitioned, lowered.output_strides)
    return lowered.call, compile_graph(backward, is_inference=False, is_backward=True, input_strides=strides).call


def _saved_strides(
    partitioned: PartitionedGraph, output_strides: tuple[tuple[int, ...] | None, ...]
) -> dict[str, tuple[int, ...]]:
    """The layouts that the lowered forward gives its saved values, by the backward's placeholder names."""
    assert partitioned.backward is not None
    placeholders = [node.name for node in partitioned.backward.graph.nodes if node.op == "placeholder"]
    start, count = len(partitioned.saved_inputs), partitioned.saved_values
    names = placeholders[start : start + count]
    strides = output_strides[len(output_strides) - count :] if count else ()
    return {name: stride for name, stride in zip(names, strides, strict=True) if stride is not None}


def interpreted(given: fx.GraphModule) -> GraphCallable:
    """A callable of the graph as it is, which empties the list that it is given.

    A caller's list, or a tuple of arguments, would keep every input alive until the graph has returned. Here inputs are
    taken out of the list, and each is freed after its last use, as any other value. The graph is read at the first run:
    what is only planned has none.
    """

    @cache
    def module() -> fx.GraphModule:
        return _taking(given)

    return lambda arguments: run_graph(module(), arguments)


def _taking(given: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    arguments = graph.placeholder("given")
    taken = {
        node: graph.call_function(_take, (arguments, index), name=node.name)
        for index, node in enumerate(given.graph.find_nodes(op="placeholder"))
    }
    graph.output(graph.graph_copy(given.graph, taken))
    return graph_module(given, graph)


def _take(given: list[Any], index: int) -> Any:
    value, given[index] = given[index], None
    return value
