"""Parameters as DTensors of their planned placement."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.parameter import is_lazy

from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx.placements import cut_order, explicit, local_shape
from lightning_autoparallel.torch_compat.autograd import Attached
from lightning_autoparallel.torch_compat.dtensors import Description, around, described


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """How one parameter lies on this rank: global geometry, mesh, and placements over the plan's axes.

    A dim need not divide: graphs take and give shards padded to one size, DTensors hold none of the padding. Plans let
    several axes cut a dim only where it divides.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mesh: DeviceMesh
    placements: Placements
    axes: tuple[PlanAxis, ...]
    _described: dict[torch.dtype, Description] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of every rank's shard with padding: what graphs take and give."""
        return tuple(local_shape(self.shape, self.placements, self.axes))

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return tuple(end - start for start, end in self.bounds())

    @cached_property
    def pads(self) -> bool:
        """Whether this rank's shard is smaller than what graphs take."""
        return self.padded_shape != self.local_shape

    @property
    def unpads(self) -> bool:
        """Whether its part of the gradient is smaller than what graphs give: they lie alike."""
        return self.pads

    def bounds(self) -> list[tuple[int, int]]:
        """First and last (exclusive) index of this rank in every dim."""
        cuts = explicit(self.placements, self.axes)
        bounds = []
        for dim, size in enumerate(self.shape):
            start, end = 0, size
            for i in cut_order(cuts, dim):
                part = math.ceil((end - start) / self.axes[i].size)
                start = min(start + self.axes[i].rank * part, end)
                end = min(start + part, end)
            bounds.append((start, end))
        return bounds

    def shard_of(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor, in memory of its own where it is a part."""
        local = full.detach()
        for dim, (start, end) in enumerate(self.bounds()):
            local = local.narrow(dim, start, end - start)
        return local.clone(memory_format=torch.contiguous_format) if local.shape != full.shape else local

    def distribute(self, local: Tensor) -> DTensor:
        """A DTensor of this rank's part, which is its own from here on, and no graph of gradients leads to."""
        description = self._described.get(local.dtype)
        if description is None:
            placements = self.placements or (Replicate(),)
            description = described(self.mesh, placements, self.shape, self.stride, local.dtype)
            self._described[local.dtype] = description
        return around(local, description)

    def padded(self, local: Tensor) -> Tensor:
        """``local`` as large as every other rank's shard."""
        missing = [wanted - size for wanted, size in zip(self.padded_shape, local.shape, strict=True)]
        if not any(missing):
            return local
        return torch.nn.functional.pad(local, [width for size in reversed(missing) for width in (0, size)])

    def unpadded(self, local: Tensor) -> Tensor:
        """``local`` without padding."""
        for dim, size in enumerate(self.local_shape):
            local = local.narrow(dim, 0, size) if local.shape[dim] != size else local
        return local


def parameter_layouts(
    module: nn.Module, mesh: DeviceMesh, axes: tuple[PlanAxis, ...], storage: Mapping[str, Placements]
) -> dict[str, ParameterLayout]:
    """The layout of every parameter of ``module``, tied ones once; ``mesh`` has a dim per plan axis."""
    return {
        name: ParameterLayout(
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()),
            mesh=mesh,
            placements=storage[name],
            axes=axes,
        )
        for name, parameter in module.named_parameters()
    }


@dataclass(frozen=True)
class Replacements:
    """Which parameter took the place of which; what nobody else holds is let go of."""

    _pairs: list[tuple[weakref.ref[nn.Parameter], nn.Parameter]] = field(default_factory=list)

    def note(self, before: nn.Parameter, now: nn.Parameter) -> None:
        """``now`` is in the module where ``before`` was."""
        self._pairs.append((weakref.ref(before), now))

    def settle(self) -> None:
        """Where what took a place was replaced itself, remember the last one only, and what is gone not at all."""
        latest = {id(before): now for ref, now in self._pairs if (before := ref()) is not None}
        settled = []
        for ref, now in self._pairs:
            while id(now) in latest:
                now = latest[id(now)]
            settled.append((ref, now))
        self._pairs[:] = [(ref, now) for ref, now in settled if ref() is not None]

    def living(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """What somebody still holds, and what is in its place."""
        return ((before, now) for ref, now in self._pairs if (before := ref()) is not None)

    def rebind(self, groups: Iterable[dict[str, Any]]) -> None:
        """Put what is in the module now into an optimizer's groups, in place."""
        held = {id(before): now for before, now in self.living()}
        for group in groups:
            group["params"][:] = [held.get(id(parameter), parameter) for parameter in group["params"]]


def shard_module(
    module: nn.Module,
    layouts: Mapping[str, ParameterLayout],
    device: torch.device,
    replacements: Replacements | None = None,
) -> None:
    """Replace every parameter by its shard on ``device``, starting from rank 0's values; tied ones stay tied.

    Parameters that are DTensors already are left alone; parameters on meta must have been materialised.
    """
    replaced: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for submodule in module.modules():
        for attribute, parameter in list(submodule._parameters.items()):
            if parameter is None or isinstance(parameter, DTensor) or id(parameter) not in names:
                continue
            if id(parameter) not in replaced:
                layout = layouts[names[id(parameter)]]
                replaced[id(parameter)] = _sharded_parameter(parameter, layout, device)
                if replacements is not None:
                    replacements.note(parameter, replaced[id(parameter)])
            submodule._parameters[attribute] = replaced[id(parameter)]
    if replacements is not None:
        replacements.settle()


def _sharded_parameter(parameter: nn.Parameter, layout: ParameterLayout, device: torch.device) -> nn.Parameter:
    full = parameter.detach().to(device)
    from_first_rank(full)
    return nn.Parameter(layout.distribute(layout.shard_of(full)), requires_grad=parameter.requires_grad)


@contextlib.contextmanager
def attached_kept(module: nn.Module) -> Iterator[None]:
    """Attributes and hooks of parameters are on those that take their places inside."""
    attached = {name: Attached.of(parameter) for name, parameter in module.named_parameters()}
    yield
    for name, parameter in module.named_parameters():
        attached[name].put_on(parameter)


def share_buffers(module: nn.Module) -> None:
    """Give every rank rank 0's buffers: plans take them for equal, as those of one device are."""
    for buffer in module.buffers():
        if not isinstance(buffer, DTensor) and buffer.layout is torch.strided:
            from_first_rank(buffer.detach())


def from_first_rank(tensor: Tensor) -> None:
    """Give every rank rank 0's values, in place."""
    if dist.get_backend() != "fake" and dist.get_world_size() > 1 and tensor.numel():
        contiguous = tensor.contiguous()
        dist.broadcast(contiguous.view(-1).view(torch.uint8), src=0)  # gloo does not know every dtype
        if contiguous is not tensor and not torch.equal(contiguous, tensor):
            tensor.copy_(contiguous)


def check_initialised(module: nn.Module) -> None:
    """Lazy submodules must have seen a batch: their parameters have no shape before.

    Raises:
        ConfigError: one has not.
    """
    for path, submodule in module.named_modules():
        if any(is_lazy(tensor) for tensor in (*submodule._parameters.values(), *submodule._buffers.values())):
            raise ConfigError(
                f"module '{path}' ({type(submodule).__name__}) is lazy and its parameters have no shape yet: call the "
                "module once on a sample batch at the end of __init__, or give the layer its input size"
            )
