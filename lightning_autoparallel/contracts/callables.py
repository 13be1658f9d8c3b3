"""What a compiled step is called by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_autoparallel.contracts.reporting import PlanReport
from lightning_autoparallel.contracts.step_graphs import CapturedGraph, PartitionedGraph

GraphCallable = Callable[..., Any]  # takes a list of tensors, returns a list or tuple of tensors


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """Two callables and what is needed to call them; ``compile.step`` runs it under autograd."""

    partitioned: PartitionedGraph
    forward: GraphCallable
    backward: GraphCallable | None
    captured: CapturedGraph
    constants: tuple[Tensor, ...]
    report: PlanReport
    has_random_ops: bool = False
