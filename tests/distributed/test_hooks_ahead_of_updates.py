"""Hooks between backward and update read numbers of gradients as on one device, and save none that lies in shards."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.worlds import Worlds


class Histograms(Net):
    """Of gradients, as loggers make them."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, optimizer):
        gradients = [parameter.grad for parameter in self.parameters()]
        counts, _ = np.histogram(gradients[0].detach().cpu().numpy(), bins=3)
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        self.seen.append((counts.tolist(), gradients[1].tolist(), float(norm), np.asarray(gradients[2]).sum()))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        largest = max(np.abs(parameter.grad.numpy()).max() for parameter in self.parameters())
        for parameter in self.parameters():
            parameter.grad.mul_(0.1 / largest)

    def extra(self) -> Any:
        return self.seen


class HistogramsOfCopies(Histograms):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


@pytest.mark.parametrize("kind", [Histograms, HistogramsOfCopies])
def test_numbers_of_gradients_are_those_of_one_device(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None)
    outcomes = worlds(2).run(train, kind, MESH)
    assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        for (counts, *rest), (counts_1, *rest_1) in zip(outcome.extra, expected.extra, strict=True):
            assert counts == counts_1
            torch.testing.assert_close(rest, rest_1, rtol=1e-4, atol=1e-6)


class Saving(Net):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}

    def on_before_optimizer_step(self, optimizer):
        gradient, self.told = self.net[0].weight.grad, []
        for does in (lambda: torch.save(gradient, io.BytesIO()), lambda: gradient.numpy().fill(0)):
            try:
                does()
            except Exception as error:
                self.told.append(f"{type(error).__name__}: {error}")

    def extra(self) -> Any:
        return self.told


def test_a_part_of_a_gradient_is_not_saved_and_no_copy_written(worlds: Worlds) -> None:
    for outcome in worlds(2).run(train, Saving, MESH):
        saves, writes = outcome.extra
        assert saves.startswith("CheckpointError") and "which this rank has (5, 6)" in saves
        assert writes == "ValueError: assignment destination is read-only"
