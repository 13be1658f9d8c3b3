"""Dynamo's side of ``torch.compile``: backends over AOTAutograd, and errors that reach the caller as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.torch_compat.inductor import compile_traced, inductor_decompositions

Interpret = Callable[[fx.GraphModule], Callable[[list[Any]], Any]]
PartitionFunction = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def is_functionalizing() -> bool:
    """Whether AOTAutograd is tracing what runs now."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


class TracedConfigError(ConfigError, ShortenTraceback):
    """A ConfigError found while Dynamo traces; what it does not know it wraps as an internal error of its own."""

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)


def compile_with_partition(
    graph_module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionFunction, interpret: Interpret | None
) -> Callable[..., Any]:
    """What a Dynamo backend gives back: the graph under AOTAutograd, lowered by ``interpret``, or by Inductor.

    ``interpret`` makes of a graph a function that empties the list of its arguments.
    """
    if interpret is not None:
        return aot_autograd(fw_compiler=_boxed(interpret), partition_fn=partition)(graph_module, inputs)
    backend = aot_autograd(
        fw_compiler=compile_traced(is_inference=False, is_backward=False),
        bw_compiler=compile_traced(is_inference=False, is_backward=True),
        inference_compiler=compile_traced(is_inference=True, is_backward=False),
        partition_fn=partition,
        decompositions=inductor_decompositions(),
    )
    return backend(graph_module, inputs)


def _boxed(interpret: Interpret) -> Callable[..., Callable[..., Any]]:
    def lower(graph_module: fx.GraphModule, examples: Any) -> Callable[..., Any]:
        run = interpret(graph_module)
        run._boxed_call = True  # type: ignore[attr-defined]  # it empties its list, so that inputs are freed in time
        return run

    return lower
