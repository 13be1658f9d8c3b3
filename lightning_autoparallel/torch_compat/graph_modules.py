"""Modules of graphs whose Python is written when they first run: most are rewritten, or thrown away, before that."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of ``graph`` with the attributes of ``root``; ``recompile`` marks it, its next call writes its code."""
    return _LazyGraphModule(root, graph)


def run_graph(module: fx.GraphModule, *args: Any) -> Any:
    """What the graph makes of ``args``; its code is written at the first run, and no hook of modules is called."""
    _LazyGraphModule.force_recompile(module)
    return module.forward(*args)
