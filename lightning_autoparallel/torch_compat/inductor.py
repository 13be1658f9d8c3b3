"""Inductor's lowering of one graph."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from lightning_autoparallel.torch_compat.compiled_on_disk import kept_on_disk
from lightning_autoparallel.torch_compat.tracing import fake_mode_of

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default

# What Inductor's decompositions make of a transposed tensor may be laid out otherwise than what was captured.
_RESHAPES = dict.fromkeys(
    (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default), torch.ops.aten.reshape.default
)

_SETTINGS = {
    # The pass that gives random operators kernels of Inductor's own runs before this entry; torch's are kept, which
    # draw what the interpreted graph draws.
    "fallback_random": True,
    # Passes have put the calls in order, transfers beside what hides them. To save memory Inductor would move waits up
    # to right behind the start of what they wait for, and for inference bring what starts a collective to the front.
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
}


def find_cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would call on CPU, or None."""
    configured = torch._inductor.config.cpp.cxx
    candidates = [name for name in (configured if isinstance(configured, (list, tuple)) else [configured]) if name]
    for name in (*candidates, "g++", "clang++"):
        if found := shutil.which(name):
            return found
    return None


def _lowering() -> Callable[..., Any]:
    """Inductor's entry; importing it takes a second, which what is only planned does without."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner


@dataclass(frozen=True, kw_only=True)
class LoweredGraph:
    """A callable that takes a list of tensors, which it may empty, and its results' strides where it knows them."""

    call: Callable[..., Any]
    output_strides: tuple[tuple[int, ...] | None, ...]


def compile_graph(
    graph_module: fx.GraphModule,
    is_inference: bool,
    is_backward: bool,
    input_strides: Mapping[str, tuple[int, ...]] | None = None,
) -> LoweredGraph:
    """Lower ``graph_module`` with Inductor.

    The graph is traced once more with Inductor's decompositions, which it insists on. ``input_strides`` are those of
    placeholders that arrive in another layout than they were traced with: a forward lowered before chooses its own.
    """
    compile_inner, decompositions = _lowering(), inductor_decompositions()
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    traced = [_example(node, {}) for node in placeholders]
    # Lowering copes with any strides; tracing would stumble over views that the captured ones allowed.
    examples = [_example(node, input_strides or {}) for node in placeholders]
    fake_mode = detect_fake_mode(examples)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(fake_mode)))
        strides = stack.enter_context(TracingContext.report_output_strides())
        with fx_traceback.preserve_node_meta():
            decomposed = make_fx(_Reshaping(graph_module).run, decomposition_table=decompositions)(*traced)
        send_bools_as_bytes(decomposed)
        stack.enter_context(inductor_config.patch(_SETTINGS))
        stack.enter_context(kept_on_disk(fake_mode, _has_cpu_tensors(decomposed.graph)))
        compiled = compile_inner(decomposed, examples, is_inference=is_inference, is_backward=is_backward)
    return LoweredGraph(call=_boxed(compiled), output_strides=tuple(strides or ()))


class _Reshaping(fx.Interpreter):
    """Runs a graph whose views may meet other strides than it was captured with: they copy where they must."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(_RESHAPES.get(target, target), args, kwargs)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that a graph must be traced with before Inductor lowers it."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def compile_traced(is_inference: bool, is_backward: bool) -> Callable[[fx.GraphModule, Any], Callable[..., Any]]:
    """A compiler for graphs that were traced with ``inductor_decompositions``, as AOTAutograd calls it."""

    compile_inner = _lowering()

    def compile(graph_module: fx.GraphModule, examples: Any) -> Callable[..., Any]:
        send_bools_as_bytes(graph_module)
        # Graphs that take the mesh of a DTensor as an input cannot be kept in Inductor's cache, which warns at length.
        with inductor_config.patch({**_SETTINGS, "fx_graph_cache": False}):
            return compile_inner(graph_module, examples, is_inference=is_inference, is_backward=is_backward)

    return compile


def send_bools_as_bytes(graph_module: fx.GraphModule) -> None:
    """Have gathers of booleans move bytes, in place.

    Inductor promotes what it gathers with the group's size, a number: its gathered booleans would be int64.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not _GATHER or node.args[0].meta["val"].dtype is not torch.bool:
            continue
        with graph.inserting_before(node):
            node.replace_input_with(node.args[0], _converted(graph, node.args[0], torch.uint8))
        waits = [user for user in node.users if user.target is _WAIT]
        assert len(waits) == len(node.users), f"{node.format_node()} is read before its wait"
        for made in (node, *waits):
            made.meta["val"] = _as_dtype(made.meta["val"], torch.uint8)
        for wait in waits:
            with graph.inserting_after(wait):
                booleans = _converted(graph, wait, torch.bool)
            wait.replace_all_uses_with(booleans, delete_user_cb=lambda user, own=booleans: user is not own)
    graph_module.recompile()


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    made = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    made.meta = {**node.meta, "val": _as_dtype(node.meta["val"], dtype)}
    return made


def _as_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    with fake_mode_of(value):
        return value.to(dtype)


def _example(node: fx.Node, input_strides: Mapping[str, tuple[int, ...]]) -> Tensor:
    """A fake tensor of the placeholder's geometry, of its own: tracing tells inputs apart by identity."""
    value: Tensor = node.meta["val"]
    strides = input_strides.get(node.name, value.stride())
    with fake_mode_of(value):
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)


def _has_cpu_tensors(graph: fx.Graph) -> bool:
    values = tree_leaves([node.meta.get("val") for node in graph.nodes])
    return any(isinstance(value, Tensor) and value.device.type == "cpu" for value in values)


def _boxed(compiled: Any) -> Callable[..., Any]:
    if getattr(compiled, "_boxed_call", False):
        return compiled
    return lambda arguments: compiled(*arguments)
