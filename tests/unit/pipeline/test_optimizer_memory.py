"""Predicted bytes of optimizer state are those of a real optimizer after a real step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.contracts import ParameterReport
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.pipeline.optimizer_memory import OptimizerProbe


def _module(device="meta"):
    with torch.device(device):
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
        module[1].weight = module[0].weight
        module[2].bias.requires_grad_(False)
    return module


def _reports(module):
    return {
        name: ParameterReport(
            shape=tuple(parameter.shape),
            local_shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            placements={},
            parameter_bytes=parameter.numel() * parameter.element_size(),
            gradient_bytes=parameter.numel() * parameter.element_size() if parameter.requires_grad else 0,
        )
        for name, parameter in module.named_parameters()
    }


def _real_bytes(make):
    module = _module("cpu")
    optimizer = make(module)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    found = {}
    for name, parameter in module.named_parameters():
        tensors = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor) and v.dim()]
        found[name] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return found


def _in_groups(module):
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() == 1]
    return torch.optim.SGD([{"params": matrices, "momentum": 0.9}, {"params": vectors}], lr=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda module: torch.optim.AdamW(module.parameters()),
        lambda module: torch.optim.AdamW(module.parameters(), fused=True),
        lambda module: torch.optim.Adam(module.parameters(), amsgrad=True, foreach=True),
        lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        lambda module: torch.optim.RMSprop(module.parameters(), momentum=0.9, centered=True),
        _in_groups,
    ],
    ids=["adamw", "fused", "amsgrad", "sgd", "rmsprop", "groups"],
)
def test_predicted_bytes_are_the_real_ones(make):
    module = _module()
    before = list(module.parameters())
    probe = OptimizerProbe(module)
    with probe.standing_in():
        assert module[1].weight is module[0].weight
        optimizer = make(module)
    assert all(now is then for now, then in zip(module.parameters(), before, strict=True))
    assert probe.state_bytes([optimizer], _reports(module)) == _real_bytes(make)


def test_an_optimizer_that_needs_values_is_refused():
    module = _module()
    probe = OptimizerProbe(module)
    with probe.standing_in():
        optimizer = torch.optim.LBFGS(module.parameters())
    with pytest.raises(ConfigError, match="a step of LBFGS on tensors without values failed"):
        probe.state_bytes([optimizer], _reports(module))


def test_a_parameter_of_nobody_is_refused():
    module = _module()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(ConfigError, match=r"holds a tensor of shape \(3,\)"):
        OptimizerProbe(module).state_bytes([optimizer], _reports(module))
