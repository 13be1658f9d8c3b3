"""A LightningModule written for one device, changed as its user would change it for FSDP2 or `torch.compile`."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lightning_autoparallel.lightning_compat import LightningModule

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


def prepare_module(module: LightningModule, *, shard: bool, compiled: bool) -> None:
    """Shard ``module`` with FSDP2, compile it, or both, at the end of its ``configure_model``.

    Compiled are the blocks where the module is sharded, and otherwise what calls them.
    """
    build = module.configure_model

    def configure_model(self: LightningModule) -> None:
        build()
        if compiled:
            for part in (blocks(self) if shard else []) or parts(self):
                part.compile()
        if shard:
            self.trainer.precision_plugin.convert_module(self)
            assert self.device_mesh is not None, "ModelParallelStrategy makes it before this hook"
            shard_fully(self, self.device_mesh["data_parallel"], str(self.trainer.precision))

    # A method of the instance, as Lightning asks whether the hook is there. A subclass would change its name.
    module.configure_model = MethodType(configure_model, module)  # type: ignore[method-assign]


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated modules: members of the outermost lists of two or more modules of one class with parameters."""
    found: list[nn.Module] = []
    for child in module.children():
        found += list(child.children()) if _repeats(child) else blocks(child)
    return found


def parts(module: nn.Module) -> list[nn.Module]:
    """The outermost modules below ``module`` that have parameters and a forward: lists are looked into."""
    found: list[nn.Module] = []
    for child in module.children():
        if any(True for _ in child.parameters()):
            found += parts(child) if isinstance(child, _WITHOUT_FORWARD) else [child]
    return found


def shard_fully(module: LightningModule, mesh: DeviceMesh, precision: str) -> None:
    """`fully_shard` every block, then the root: the network that ``module`` holds, if it is one and all.

    Otherwise the module itself is the root, whose parameters are gathered around ``training_step``.
    """
    for block in blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy(precision))
    roots, whole = parts(module), list(module.parameters())
    if len(roots) == 1 and len(list(roots[0].parameters())) == len(whole):
        fully_shard(roots[0], mesh=mesh, mp_policy=policy(precision))
        return
    # The root's inputs are then the batch: its targets keep their precision.
    fully_shard(module, mesh=mesh, mp_policy=policy(precision, cast_forward_inputs=False))
    register_fsdp_forward_method(module, "training_step")


def policy(precision: str, cast_forward_inputs: bool = True) -> MixedPrecisionPolicy:
    """For ``bf16-mixed`` parameters are gathered in bfloat16 and gradients reduced in float32; else as they are."""
    if precision != "bf16-mixed":
        return MixedPrecisionPolicy(cast_forward_inputs=cast_forward_inputs)
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=cast_forward_inputs
    )


def _repeats(container: nn.Module) -> bool:
    members = list(container.children())
    if not isinstance(container, _LISTS) or len(members) < 2:
        return False
    have_parameters = all(any(True for _ in member.parameters()) for member in members)
    return have_parameters and len({type(member) for member in members}) == 1
