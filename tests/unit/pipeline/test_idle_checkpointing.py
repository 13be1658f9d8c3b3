"""A named policy of activation checkpointing that finds no block says so, once; one that finds some says nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.mesh import ParallelMesh


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def told(layers: int, policy: str, fake_mesh: Callable[..., ParallelMesh]) -> list[str]:
    """What is said of checkpointing while two steps are captured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = parallelize(
            Net(layers), (torch.zeros(4, 4),), fake_mesh(dp_shard=2), activation_checkpointing=policy, compile=False
        )
        made.prepare(torch.zeros(4, 4))
    messages = [str(warning.message) for warning in caught]
    assert any("captured again" in message for message in messages)
    return [message for message in messages if "checkpointing" in message]


@pytest.mark.parametrize("policy", ["full", "selective", "layer:1"])
def test_a_single_layer_is_no_block(policy: str, fake_mesh: Callable[..., ParallelMesh]):
    (message,) = told(1, policy, fake_mesh)
    assert message.startswith(f"activation_checkpointing={policy!r} has no effect: it recomputes blocks, repeated")
    assert "the step has none; put repeated modules into an nn.ModuleList" in message


def test_every_fifth_of_three_blocks(fake_mesh: Callable[..., ParallelMesh]):
    (message,) = told(3, "layer:5", fake_mesh)
    assert message == (
        "activation_checkpointing='layer:5' has no effect: the step has 3 blocks (layers.0 to layers.2); "
        "give 'layer:N' with N of at most 3, or 'full'"
    )


@pytest.mark.parametrize(
    ("policy", "idle"),
    [
        ("layer.*=full", "layer.*=full"),
        ("layers.1=full, layers.*=none", "layers.1=full"),
        ("layers.*=full, layers.7=none", "layers.7=none"),
    ],
)
def test_a_pattern_that_names_no_block(policy: str, idle: str, fake_mesh: Callable[..., ParallelMesh]):
    (message,) = told(3, policy, fake_mesh)
    assert message == (
        f"activation_checkpointing: {idle} has no effect: it names none of the step's blocks, or a later pattern does "
        "(layers.0, layers.1, layers.2)"
    )


def test_every_fifth_of_the_three_blocks_that_a_pattern_names(fake_mesh: Callable[..., ParallelMesh]):
    (message,) = told(3, "layers.*=layer:5", fake_mesh)
    assert message == (
        "activation_checkpointing: layers.*=layer:5 has no effect: it names 3 blocks (layers.0 to layers.2); "
        "give 'layer:N' with N of at most 3, or 'full'"
    )


@pytest.mark.parametrize(
    ("layers", "policy"), [(1, "none"), (3, "full"), (3, "selective"), (3, "layer:3"), (3, "layers.*=full")]
)
def test_policies_with_an_effect_say_nothing(layers: int, policy: str, fake_mesh: Callable[..., ParallelMesh]):
    assert told(layers, policy, fake_mesh) == []
