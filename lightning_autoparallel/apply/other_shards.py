"""Parameters in shards -> the same parameters in other shards, and with them whatever is kept of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_autoparallel.apply.params import ParameterLayout
from lightning_autoparallel.torch_compat.other_spec import is_held_elsewhere, take_shards
from lightning_autoparallel.torch_compat.tree import tree_leaves, tree_map


@torch.no_grad()
def lie_anew(
    modules: Iterable[nn.Module], layouts: Mapping[str, ParameterLayout], optimizers: Iterable[Optimizer]
) -> None:
    """Move every parameter of ``modules``, which are named alike, into the shards of its layout; every rank calls it.

    What lies there already is left alone. Parameters stay the objects that they are. Their gradients, and what
    ``optimizers`` keep in their shape, follow. One parameter is whole at a time.
    """
    places: dict[int, ParameterLayout] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if isinstance(parameter, DTensor) and name in layouts and not _lies_so(parameter, layouts[name]):
                places[id(parameter)] = layouts[name]
                take_shards(parameter, _in_shards(parameter, layouts[name]))
                if isinstance(parameter.grad, DTensor):
                    take_shards(parameter.grad, _in_shards(parameter.grad, layouts[name]))
    for optimizer in optimizers:
        for trained, state in optimizer.state.items():
            if id(trained) in places:
                follow = partial(_follow, trained.shape, places[id(trained)])
                state.update({key: tree_map(follow, value) for key, value in state.items()})


def followers(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, tuple[str, ...] | None]:
    """What moves with each parameter in shards, by all of their names: its gradient, and what optimizers keep of it.

    None for those that must stay where this rank has them: something else holds their memory, such as a ``p.data``
    that was taken, or an optimizer keeps what is cut otherwise than they are. Neither can follow.
    """
    states = {id(trained): state for each in optimizers for trained, state in each.state.items()}
    return {
        name: _following(parameter, states.get(id(parameter), {}))
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor)
    }


def _following(parameter: DTensor, state: Mapping[str, Any]) -> tuple[str, ...] | None:
    leaves = {key: tree_leaves(value) for key, value in state.items()}
    if is_held_elsewhere(parameter) or any(_stays(parameter.shape, leaf) for each in leaves.values() for leaf in each):
        return None
    kept = [
        f"{key} {sum(isinstance(leaf, DTensor) and leaf.shape == parameter.shape for leaf in each)}"
        for key, each in leaves.items()
    ]
    return tuple(kept if parameter.grad is None else ["grad", *kept])


def _stays(shape: torch.Size, kept: Any) -> bool:
    return isinstance(kept, Tensor) and kept.dim() > 0 and not (isinstance(kept, DTensor) and kept.shape == shape)


def _lies_so(value: DTensor, layout: ParameterLayout) -> bool:
    return value.device_mesh == layout.mesh and tuple(value.placements) == (layout.placements or (Replicate(),))


def _follow(shape: torch.Size, layout: ParameterLayout, kept: Any) -> Any:
    return _in_shards(kept, layout) if isinstance(kept, DTensor) and kept.shape == shape else kept


def _in_shards(value: DTensor, layout: ParameterLayout) -> DTensor:
    local = layout.shard_of(value.full_tensor())
    if local.untyped_storage().nbytes() > local.nbytes:  # what pads uneven shards is behind it
        local = local.clone(memory_format=torch.contiguous_format)
    return layout.distribute(local)
