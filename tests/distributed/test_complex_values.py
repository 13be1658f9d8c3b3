"""Complex values that ranks hand to each other: torch's backends know none of their dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.worlds import Worlds

RULES = {"net.0.*": {"tp": "S(0)"}, "net.2.weight": {"tp": "S(1)"}}


class Transformed(Net):
    """Channels are cut, and transformed as complex numbers along their dim: each rank is given other rows for it."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": {"base": "fsdp", "rules": RULES}, "capture": "step"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def transformed(self, channels: Tensor) -> Tensor:
        return torch.fft.fft(channels, dim=1)

    def loss(self, batch: Any) -> Tensor:
        channels = torch.view_as_complex(self.net[:2](batch[0]).view(-1, 4, 2))
        found = self.transformed(channels) * self.weight
        return F.cross_entropy(self.net[2](torch.view_as_real(found.resolve_conj()).flatten(1)), batch[1])


class Conjugated(Transformed):
    """By torch's lazy conjugates, which have no memory of their own."""

    def transformed(self, channels: Tensor) -> Tensor:
        return torch.fft.fft(channels.conj(), dim=1).conj()


class Summed(Transformed):
    def transformed(self, channels: Tensor) -> Tensor:
        return channels.cumsum(1) + channels.flip(1)


@pytest.mark.parametrize("kind", [Transformed, Conjugated, Summed])
def test_they_are_those_of_one_device(kind: type[Net], worlds: Worlds) -> None:
    assert_equals_one_device(worlds(2).run(train, kind, {"tp": 2}), train(kind, None))


class Rotating(nn.Module):
    """Of complex parameters alone, of several shapes: they are gathered in one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.view_as_complex(torch.stack([x, x.sin()], -1)) @ self.weight + self.bias
        return torch.view_as_real(found).sum(-1)


class Rotated(Net):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp", "capture": "forward", "compile": False}

    def __init__(self) -> None:
        super().__init__()
        self.rotating = Rotating()

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.rotating(batch[0]), batch[1]))


def test_several_complex_parameters_are_gathered_in_forward_mode(worlds: Worlds) -> None:
    expected = train(Rotated, None).parameters
    for outcome in worlds(2).run(train, Rotated, MESH):
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)
