"""Inductor's lowering of one graph."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._dynamo.utils import detect_fake_mode
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx


def find_cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would call on CPU, or None."""
    configured = torch._inductor.config.cpp.cxx
    candidates = [name for name in (configured if isinstance(configured, (list, tuple)) else [configured]) if name]
    for name in (*candidates, "g++", "clang++"):
        if found := shutil.which(name):
            return found
    return None


def compile_graph(graph_module: fx.GraphModule, is_inference: bool, is_backward: bool) -> Callable[..., Any]:
    """A callable for ``graph_module``; it takes a list of tensors, may empty it, and returns the outputs.

    The graph is traced once more with Inductor's decompositions, which it insists on.
    """
    examples = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    fake_mode = detect_fake_mode(examples)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(fx_traceback.preserve_node_meta())
        decomposed = _decompose(graph_module, examples)
        compiled = compile_fx_inner(decomposed, examples, is_inference=is_inference, is_backward=is_backward)
    return _boxed(compiled)


def _decompose(graph_module: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    interpreter = fx.Interpreter(graph_module)
    return make_fx(interpreter.run, decomposition_table=select_decomp_table())(*examples)


def _boxed(compiled: Any) -> Callable[..., Any]:
    if getattr(compiled, "_boxed_call", False):
        return compiled
    return lambda arguments: compiled(*arguments)
