"""The backend ``autoparallel`` of ``torch.compile``, for callers of modules that ``parallelize`` made.

Dynamo sees a call of such a module as one node. AOTAutograd traces through it, down to the two graphs of the first
partition, and the second partition replays the first (``replay.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, fx

from lightning_autoparallel.compile.backend import check_compiler, interpreted
from lightning_autoparallel.compile.replay import replay_partition
from lightning_autoparallel.torch_compat.dynamo import compile_with_partition

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
CALL_ATTRIBUTE = "parallel_call"


@runtime_checkable
class ParallelCall(Protocol):
    """What a node's target has as its attribute ``parallel_call``: the batch is the node's third argument."""

    @property
    def device_type(self) -> str: ...

    def accepted(self) -> contextlib.AbstractContextManager[None]:
        """Entered while the node is traced through: this backend does what the node asks of it."""

    def around(self, batch: Sequence[Tensor | None]) -> contextlib.AbstractContextManager[None]:
        """Entered at every real call with the batch's tensors, None for those that the compiled code makes itself."""


def autoparallel_backend(*, compile: bool = True) -> Backend:
    """A backend for ``torch.compile(parallel_module, backend=autoparallel_backend())``.

    Around modules that ``parallelize`` made it keeps their partition: what is saved, what is recomputed, and the order
    of calls in both halves. ``compile=False`` runs the graphs as they are, for debugging and tests.

    Raises:
        ConfigError: (from the backend) Inductor needs a C++ compiler and finds none.
    """

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        calls = _parallel_calls(graph_module)
        with contextlib.ExitStack() as stack:
            for call, _ in calls:
                if compile:
                    check_compiler(call.device_type)
                stack.enter_context(call.accepted())
            interpret = None if compile else interpreted
            compiled = compile_with_partition(graph_module, inputs, replay_partition, interpret)
        return _with_calls(compiled, calls) if calls else compiled

    return backend


def autoparallel(graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend under its name: ``torch.compile(parallel_module, backend="autoparallel")``.

    ``options`` of ``torch.compile`` are the arguments of ``autoparallel_backend``.
    """
    return autoparallel_backend(**(options.get("options") or {}))(graph_module, inputs)


# With the positions of its batch among the arguments of the compiled code.
Call = tuple[ParallelCall, tuple[int | None, ...]]


def _parallel_calls(graph_module: fx.GraphModule) -> list[Call]:
    positions = {node: i for i, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    found: list[Call] = []
    # A region of torch.utils.checkpoint is a graph of its own, below the caller's.
    for graph in (module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)):
        for node in graph.nodes:
            call = getattr(node.target, CALL_ATTRIBUTE, None)
            if isinstance(call, ParallelCall):
                found.append((call, tuple(positions.get(tensor) for tensor in node.args[2])))
    return found


def _with_calls(compiled: Callable[..., Any], calls: Sequence[Call]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with _entered(calls, arguments):
            return compiled(*arguments)

    return run


@contextlib.contextmanager
def _entered(calls: Sequence[Call], arguments: Sequence[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for call, positions in calls:
            stack.enter_context(call.around([None if i is None else arguments[i] for i in positions]))
        yield
