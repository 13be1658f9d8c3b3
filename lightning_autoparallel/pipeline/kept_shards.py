"""Weights that somebody has kept in shards during a fit, the best so far: a module that is whole again loads them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.pipeline.agreement import ControlGroup

_REMEDY = (
    "every rank must load them (not only where is_global_zero is True), or whole ones be kept, which every rank makes "
    "during the fit: {name: tensor.full_tensor() if hasattr(tensor, 'full_tensor') else tensor.clone() ...}"
)


class MakesWhole:
    """Before ``load_state_dict`` of a module without shards: those that it is given are made whole, by all ranks alike.

    It stays on the module after the fit. Copies of the module have it, too. A pickle has something of torch's instead
    that does nothing, so that who loads it needs neither this package nor a process group.
    """

    def __init__(self, control: ControlGroup) -> None:
        self._control = control

    def __call__(self, module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        """As torch calls hooks before it loads; ``state`` is a copy that nobody else has.

        Raises:
            CheckpointError: other ranks do not load the same, or have ended.
        """
        shards = {key: value for key, value in state.items() if isinstance(value, DTensor)}
        if not shards or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return
        if any(not placement.is_replicate() for value in shards.values() for placement in value.placements):
            self._meet(f"loads {[(key, tuple(value.shape)) for key, value in shards.items()]}")
        state.update({key: _whole(value) for key, value in shards.items()})

    def __deepcopy__(self, memo: Any) -> MakesWhole:
        return self

    def __reduce__(self) -> Any:
        return partial, (nn.Identity,)

    def _meet(self, place: str) -> None:
        line = user_line()
        waits = (
            f"autoparallel: {line} loads weights that lie in shards on rank {dist.get_rank()}, and waits for ranks "
            f"that have not come there: {_REMEDY}"
        )
        try:
            if self._control.meet(place, waits):
                return
        except RuntimeError as ended:
            raise CheckpointError(f"{line} loads weights that lie in shards, and other ranks end: {_REMEDY}") from ended
        raise CheckpointError(f"{line} loads weights that lie in shards, and other ranks do something else: {_REMEDY}")


def make_whole_before_loading(module: nn.Module, control: ControlGroup) -> None:
    """Let ``load_state_dict`` of the module and its parts take shards, once after any number of fits."""
    hook = MakesWhole(control)
    for part in module.modules():
        hooks = part._load_state_dict_pre_hooks
        for key in [key for key, found in hooks.items() if isinstance(getattr(found, "hook", found), MakesWhole)]:
            del hooks[key]
        part.register_load_state_dict_pre_hook(hook)


def _whole(value: DTensor) -> Tensor:
    """From the device of its mesh, where ranks can talk: it may have been kept on the host."""
    there: Any = value.detach().to(value.device_mesh.device_type)
    whole: Tensor = there.full_tensor()
    return whole
