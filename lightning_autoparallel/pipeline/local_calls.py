"""Calls of one submodule as local programs: what they compute with, and what tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autoparallel.contracts import CapturedGraph, PassedOn
from lightning_autoparallel.torch_compat.regions import saving_is_hooked
from lightning_autoparallel.torch_compat.tree import tree_flatten


def records_gradients(owner: nn.Module, arguments: Sequence[Any]) -> bool:
    """Whether autograd records a call of ``owner`` now: something that it is given or holds requires a gradient."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    tensors = (argument for argument in arguments if isinstance(argument, Tensor))
    return any(tensor.requires_grad for tensor in tensors) or any(p.requires_grad for p in owner.parameters())


def call_state(owner: nn.Module, training: bool, device: torch.device) -> Any:
    """What besides the arguments changes the graph.

    Modes, frozen parameters, dtypes, names in each submodule that hold a tensor now, whether autograd records,
    autocast, and whether a checkpoint region is open.
    """
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    tables = (table for submodule in owner.modules() for table in (submodule._parameters, submodule._buffers))
    return (
        tuple(tuple(name for name, tensor in table.items() if tensor is not None) for table in tables),
        tuple(submodule.training for submodule in owner.modules()),
        tuple((parameter.requires_grad, parameter.dtype) for parameter in owner.parameters()),
        training,
        autocast,
        saving_is_hooked(),
    )


def named_state(root: nn.Module, path: str) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """The parameters and the buffers of the submodule at ``path``, by their names in ``root``."""
    owner = root.get_submodule(path)
    own = {id(tensor) for tensor in (*owner.parameters(), *owner.buffers())}
    parameters = {name: parameter for name, parameter in root.named_parameters() if id(parameter) in own}
    return parameters, {name: buffer for name, buffer in root.named_buffers() if id(buffer) in own}


def state_of(root: nn.Module, captured: CapturedGraph) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The parameters that a graph reads, in order, and its buffers by name, as ``root`` has them now."""
    parameters = [root.get_parameter(item.name) for item in captured.inputs if item.kind == "parameter"]
    buffers = {item.name: root.get_buffer(item.name) for item in captured.inputs if item.kind == "buffer"}
    return list(parameters), buffers


def runs_again(
    root: nn.Module, captured: CapturedGraph, run: Callable[[list[Tensor]], Any], device: torch.device
) -> Callable[[Sequence[Tensor]], list[Tensor | None]]:
    """The call without its graph: from the graph's inputs, whole, its results, recorded by autograd.

    Those stand where the graph has them among outputs that are no gradients; None where it has a buffer.

    ``run`` takes the batch's tensors. It starts from the buffers that there are now, of which it changes copies, and
    runs under the autocast that there is now.
    """
    names = [item.name for item in captured.inputs if item.kind in ("parameter", "buffer")]
    changed = [item.name for item in captured.outputs if item.kind == "buffer"]
    buffers = {name: root.get_buffer(name).clone() for name in changed}
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    own = [item.kind == "output" for item in captured.outputs if item.kind != "gradient"]

    def again(inputs: Sequence[Tensor]) -> list[Tensor | None]:
        state = dict(zip(names, inputs, strict=False)) | {name: value.clone() for name, value in buffers.items()}
        called = {f"root.{name}": value for name, value in state.items()}
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            result = torch.func.functional_call(_Called(root, run), called, (list(inputs[len(names) :]),))
        made = [leaf for i, leaf in enumerate(tree_flatten(result)[0]) if i not in captured.static_outputs]
        assert len(made) == sum(own)
        results = iter(made)
        return [next(results) if is_own else None for is_own in own]

    return again


class _Called(nn.Module):
    """``run`` as a module around the state that it reads."""

    def __init__(self, root: nn.Module, run: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.root, self._run = root, run

    def forward(self, batch: list[Tensor]) -> Any:
        return self._run(batch)


def passed_on(statics: Mapping[int, Any], batch: Sequence[Tensor]) -> dict[int, Any]:
    """``statics`` with the tensors of the batch that are returned as they are."""
    return {i: batch[value.position] if isinstance(value, PassedOn) else value for i, value in statics.items()}
