"""Joint export under fake tensors: the one place that enters and leaves a fake mode."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._higher_order_ops.effects import with_effects
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec

from lightning_autoparallel.torch_compat import cuda_guards
from lightning_autoparallel.torch_compat.constants import KnownConstants

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FakeTensorMode",
    "JointExport",
    "MutatedInputError",
    "OrderedCallError",
    "TorchCall",
    "active_fake_mode",
    "annotate_nodes",
    "collection_paused",
    "export_joint",
    "fake_evaluated",
    "fake_mode_of",
    "fake_tensor_like",
    "fake_tracing",
    "is_fake",
    "is_real",
    "lazy_graph_module",
    "mark_parameter",
    "nested_tracing",
    "plain_type",
    "pretend_compiling",
    "record_frames",
    "stands_for_parameter",
    "unset_fake_temporarily",
]


@dataclass(frozen=True, kw_only=True)
class JointExport:
    """A joint graph and what its inputs and outputs stand for, as positions of flat arguments and results."""

    graph_module: fx.GraphModule
    inputs: tuple[tuple[str, int], ...]  # ("argument" | "tangent", position of the argument or of the result)
    outputs: tuple[tuple[str, int] | None, ...]  # ("output" | "mutation" | "gradient", position)
    output_spec: TreeSpec


class MutatedInputError(Exception):
    """The traced module changes an argument that is differentiated in place; ``position`` is that of the argument."""

    def __init__(self, position: int) -> None:
        super().__init__(f"argument {position} is changed in place (InputMutationAOTOutput)")
        self.position = position


class OrderedCallError(Exception):
    """The traced module makes a call that torch keeps in its place by tokens, as one that has effects: ``node``'s."""

    def __init__(self, node: fx.Node) -> None:
        self.operator = str(node.args[1])
        super().__init__(f"{self.operator} is called in order (with_effects)")
        self.node = node


@contextlib.contextmanager
def fake_tracing() -> Iterator[FakeTensorMode]:
    """A fresh fake mode with its tracing context; closed on failure too, so that no fake mode leaks."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(fake_mode)
        yield fake_mode


@contextlib.contextmanager
def nested_tracing() -> Iterator[None]:
    """For a trace of its own inside of ``fake_tracing``, on the same fake mode."""
    with tracing(TracingContext(detect_fake_mode())):
        yield


def fake_tensor_like(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool = False
) -> Tensor:
    """A fake tensor of this geometry; call it inside ``fake_tracing`` or under the graph's fake mode."""
    tensor = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=device)
    return tensor.requires_grad_(requires_grad)


def is_fake(tensor: Tensor) -> bool:
    """Whether a trace made the tensor: it has no values."""
    return isinstance(tensor, FakeTensor)


def is_real(tensor: Tensor) -> bool:
    """Whether no trace made the tensor: it has values."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    )


def plain_type(tensor: Tensor) -> type:
    """The type of what a trace's tensor stands for; of others their own."""
    if type(tensor) not in (FunctionalTensor, FakeTensor):
        return type(tensor)
    return nn.Parameter if stands_for_parameter(tensor) else Tensor


def mark_parameter(tensor: Tensor) -> None:
    """Note that a trace's tensor stands for an ``nn.Parameter``; to torch it is none, as it is no leaf."""
    tensor._stands_for_parameter = True  # type: ignore[attr-defined]


def stands_for_parameter(value: Any) -> bool:
    """Whether ``value`` is a trace's tensor in the place of a parameter."""
    return type(value) in (FunctionalTensor, FakeTensor) and hasattr(value, "_stands_for_parameter")


def fake_mode_of(tensor: Tensor) -> FakeTensorMode:
    """The fake mode that a fake tensor belongs to."""
    mode = detect_fake_mode([tensor])
    assert mode is not None, "not a fake tensor"
    return mode


def fake_evaluated(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives on the recorded values of its arguments: fake tensors, or ones on the meta device."""
    args, kwargs = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    tensors: list[Tensor] = []
    fx.node.map_aggregate((args, kwargs), lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None)
    with detect_fake_mode(tensors) or contextlib.nullcontext():
        return target(*args, **kwargs)


def active_fake_mode() -> FakeTensorMode | None:
    """The fake mode on the stack, if any: tests use it to find leaks."""
    return detect_fake_mode()


def export_joint(
    module: nn.Module, args: tuple[Any, ...], decompositions: dict[Any, Callable[..., Any]]
) -> JointExport:
    """Trace ``module(*args)`` forward and backward; ``args`` hold fake tensors, parameters included.

    The module is run more than once; its Python effects are the caller's to handle.
    """
    with contextlib.ExitStack() as stack, _use_lazy_graph_module(True):
        if torch.cuda.is_available():
            stack.enter_context(cuda_guards.pinned_as_copies())
        exported = aot_export_joint_with_descriptors(stack, module, args, decompositions=decompositions)
        graph_module = exported.graph_module
    for node in graph_module.graph.find_nodes(op="call_function", target=with_effects):
        raise OrderedCallError(node)
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = tuple(_input_position(node.meta["desc"]) for node in placeholders)
    (output,) = [node for node in graph_module.graph.nodes if node.op == "output"]
    # A parameter that requires a gradient but gets none has a descriptor and no value.
    pairs = zip(output.args[0], output.meta["desc"], strict=True)
    outputs = tuple(None if value is None else _output_position(desc) for value, desc in pairs)
    return JointExport(graph_module=graph_module, inputs=inputs, outputs=outputs, output_spec=exported.out_spec)


def lazy_graph_module(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs ``graph``; its Python code is written when it is first called."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(nn.Module(), graph)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic garbage collection inside: tracing only ever adds objects, and each collection visits all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _input_position(desc: object) -> tuple[str, int]:
    if isinstance(desc, PlainAOTInput):
        return "argument", desc.idx
    assert isinstance(desc, TangentAOTInput), f"unknown graph input {desc}"
    if isinstance(desc.output, InputMutationAOTOutput) and isinstance(desc.output.mutated_input, PlainAOTInput):
        raise MutatedInputError(desc.output.mutated_input.idx)
    assert isinstance(desc.output, PlainAOTOutput), f"unknown graph input {desc}"
    return "tangent", desc.output.idx


def _output_position(desc: object) -> tuple[str, int] | None:
    if desc is None:
        return None
    if isinstance(desc, PlainAOTOutput):
        return "output", desc.idx
    if isinstance(desc, InputMutationAOTOutput) and isinstance(desc.mutated_input, PlainAOTInput):
        return "mutation", desc.mutated_input.idx
    if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput):
        return "gradient", desc.grad_of.idx
    raise AssertionError(f"unknown graph output {desc}")


@contextlib.contextmanager
def annotate_nodes(**values: Any) -> Iterator[None]:
    """Put ``values`` into ``node.meta["custom"]`` of every node traced inside, and of their backward nodes."""
    with fx_traceback.annotate(values):
        yield


@contextlib.contextmanager
def pretend_compiling() -> Generator[None]:
    """``torch.compiler.is_compiling()`` is True inside.

    Hugging Face models choose masks without reading tensor values only when they believe they are compiled.
    """
    previous = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = previous


# Most of the calls that a mode sees: torch's own Python asks for them, and they leave no node.
_QUESTIONS = {
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    Tensor.is_quantized.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dim,
    Tensor.numel,
    Tensor.size,
    Tensor.storage_offset,
    Tensor.stride,
    Tensor.untyped_storage,
}


TorchCall = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _call_it(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class record_frames(TorchFunctionMode):
    """Annotate every node with what ``describe(frame)`` says of the Python frame that called torch.

    ``call(function, args, kwargs)`` makes each call that the step makes. Reading the value of a tensor that the step
    made out of Python numbers gives that value.
    """

    def __init__(self, describe: Callable[[Any], dict[str, Any]], call: TorchCall | None = None) -> None:
        super().__init__()
        self._describe, self._call = describe, call or _call_it
        self._constants = KnownConstants()
        self._inside = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._inside or func in _QUESTIONS or isinstance(func, (OpOverload, OpOverloadPacket)):
            return func(*args, **(kwargs or {}))
        if torch._C._meta_in_tls_dispatch_include():
            # Torch's own Python, while it traces what the step called.
            return func(*args, **(kwargs or {}))
        known, value = self._constants.read(func, args)
        if known:
            return value
        self._inside = True
        try:
            args = self._constants.with_places(func, args)
            with fx_traceback.annotate(self._describe(sys._getframe(1))):
                result = self._call(func, args, kwargs or {})
        finally:
            self._inside = False
        self._constants.observe(func, args, kwargs or {}, result)
        return result
