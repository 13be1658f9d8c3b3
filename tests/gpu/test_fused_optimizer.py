"""Fused optimizers on a GPU refuse gradients that lie otherwise than their parameters: ours lie as they do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.jobs import make_strategy, make_trainer
from tests.distributed.test_gradient_layouts import ChannelsLast, Experts, Fused
from tests.numerics.training import full

pytestmark = pytest.mark.gpu


def trained(kind: type[Fused], compiled: bool | None, accelerator: str) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after training, without us where ``compiled`` is None, and gradients with other strides."""
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    module = kind()
    strategy = None if compiled is None else make_strategy({"dp_shard": 1}, {"compile": compiled, "plan": "ddp"})
    module.train_dataloader = lambda: module.loader(0, 1)
    make_trainer(strategy, 1, accelerator=accelerator).fit(module)
    return {name: full(parameter) for name, parameter in module.named_parameters()}, module.others


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
@pytest.mark.parametrize("kind", [Experts, ChannelsLast])
def test_it_updates_as_without_us(kind: type[Fused], compiled: bool, accelerator: str, gpu_world):
    ours, others = gpu_world().run(trained, kind, compiled, accelerator)[0]
    theirs, _ = gpu_world().run(trained, kind, None, accelerator)[0]
    assert others == []
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
