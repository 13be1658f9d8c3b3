"""What was built on the meta device gets memory: shards of drawn values, or room for values that are read later."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply.params import ParameterLayout
from lightning_autoparallel.errors import ConfigError

NOTHING: frozenset[str] = frozenset()


def materialise_module(
    module: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    device: torch.device,
    given: Container[str] = NOTHING,
) -> None:
    """Initialise what is on meta, one submodule at a time, keeping this rank's shards only.

    Ranks draw alike (they start from rank 0's random state) and each draws a submodule's whole parameters, so that the
    values are those of one device; no more than one submodule's full parameters exist at any time. Models of
    transformers initialise themselves by their ``_init_weights``, in another order than on one device.

    Args:
        given: parameters and buffers, under each of their names, whose values come later: they get room for this
            rank's shards, and none is ever whole.

    Raises:
        ConfigError: something on meta is not given, and its module does not initialise it.
    """
    _share_random_state(device)
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def room(parameter: nn.Parameter) -> Tensor:
        layout = layouts[names[id(parameter)]]
        return layout.distribute(torch.empty(layout.local_shape, dtype=parameter.dtype, device=device))

    def shard(parameter: nn.Parameter, full: Tensor) -> Tensor:
        layout = layouts[names[id(parameter)]]
        return layout.distribute(layout.shard_of(full))

    _materialise(module, device, given, room, shard)


def materialise_whole(module: nn.Module, device: torch.device, given: Container[str]) -> None:
    """As ``materialise_module``, in whole tensors; DTensors that others have made stay what they are.

    Raises:
        ConfigError: something on meta is not given, and its module does not initialise it.
    """

    def room(parameter: nn.Parameter) -> Tensor:
        own = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else device
        return torch.empty_like(parameter, device=own, requires_grad=False)

    _materialise(module, device, given, room, lambda parameter, full: full)


def _materialise(
    module: nn.Module,
    device: torch.device,
    given: Container[str],
    room: Callable[[nn.Parameter], Tensor],
    shard: Callable[[nn.Parameter, Tensor], Tensor],
) -> None:
    tied: dict[int, nn.Parameter] = {}
    for path, submodule in module.named_modules():
        on_meta = {key: t for key, t in _tensors(submodule).items() if t.is_meta}
        drawn = [key for key in on_meta if f"{path}.{key}".removeprefix(".") not in given]
        if drawn:
            _initialise(module, path, submodule, device, drawn)
        for key, original in on_meta.items():
            if not isinstance(original, nn.Parameter):
                if not drawn:
                    submodule._buffers[key] = torch.empty_like(original, device=device)
                continue
            if id(original) not in tied:
                made = shard(original, submodule.get_parameter(key).detach()) if drawn else room(original)
                tied[id(original)] = nn.Parameter(made, requires_grad=original.requires_grad)
            submodule._parameters[key] = tied[id(original)]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {key: t for key, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _initialise(root: nn.Module, path: str, submodule: nn.Module, device: torch.device, drawn: Sequence[str]) -> None:
    """Give what one submodule has on meta memory, and ``drawn`` the values that it starts with."""
    reset = getattr(submodule, "reset_parameters", None)
    owner = _pretrained_model(root, path)
    if not callable(reset) and owner is None:
        raise ConfigError(
            f"module '{path}' ({type(submodule).__name__}) is on the meta device and has no reset_parameters(): its "
            "parameters cannot be initialised; add that method, or build the module on a real device"
        )
    for key, tensor in _tensors(submodule).items():
        if tensor.is_meta:
            empty = torch.empty_like(tensor, device=device, requires_grad=False)
            if isinstance(tensor, nn.Parameter):
                submodule._parameters[key] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            else:
                submodule._buffers[key] = empty
    if owner is None:
        reset()  # type: ignore[misc]
        return
    untouched = _untouched_by(
        lambda: (reset() if callable(reset) else None, owner._init_weights(submodule)),
        {key: tensor.detach() for key, tensor in _tensors(submodule).items() if key in drawn},
    )
    if untouched:
        raise ConfigError(
            f"{', '.join(untouched)} of module '{path}' ({type(submodule).__name__}) is on the meta device, and "
            f"{type(owner).__name__}._init_weights does not set it: build it on a real device (for a buffer, the model "
            "inside accelerate's init_empty_weights(include_buffers=False) rather than on meta)"
        )


def _pretrained_model(root: nn.Module, path: str) -> Any:
    """The innermost model of transformers around a submodule: its ``_init_weights`` takes any module inside it."""
    parts = path.split(".")
    owners = [root.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]
    return next((owner for owner in owners if any(c.__name__ == "PreTrainedModel" for c in type(owner).__mro__)), None)


def _untouched_by(initialise: Callable[[], object], tensors: Mapping[str, Tensor]) -> list[str]:
    """Which tensors are not set, or not as a whole, by a call that is to set them."""
    for tensor in tensors.values():
        tensor.fill_(_never(tensor.dtype))
    initialise()
    untouched = {key: _is_never(tensor) for key, tensor in tensors.items() if tensor.dtype is not torch.bool}
    flags = {key: tensor.clone() for key, tensor in tensors.items() if tensor.dtype is torch.bool}
    if flags:  # both values are ordinary: what follows another first value was not set
        for key in flags:
            tensors[key].fill_(True)
        initialise()
    untouched |= {key: tensors[key] != before for key, before in flags.items()}
    return [key for key, found in untouched.items() if bool(found.any())]


def _never(dtype: torch.dtype) -> float | int | bool:
    """A value that nothing starts with."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min or torch.iinfo(dtype).max


def _is_never(tensor: Tensor) -> Tensor:
    never = _never(tensor.dtype)
    return tensor.isnan() if never != never else tensor == never


def _share_random_state(device: torch.device) -> None:
    if not dist.is_initialized() or dist.get_backend() == "fake" or dist.get_world_size() == 1:
        return
    on_cuda = device.type == "cuda"
    states: list[Any] = [torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None]
    dist.broadcast_object_list(states, src=0)
    torch.set_rng_state(states[0])
    if on_cuda:
        torch.cuda.set_rng_state(states[1], device)
