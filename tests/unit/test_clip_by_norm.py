"""Clipping by norm: as torch does it, and without a copy between host and device or a wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autoparallel.precision import clip_by_norm

COPIES = {"aten::lift_fresh", "aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense", "aten::item"}


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_it_is_torchs_and_nothing_is_copied_or_read() -> None:
    for gradients in (
        [torch.randn(3, 4), torch.randn(5)],
        [torch.randn(3, 4, dtype=torch.cfloat), torch.randn(5), torch.randn((), dtype=torch.cfloat)],
    ):
        _check_clipped(gradients)


def test_wide_complex_gradients_have_a_wide_norm() -> None:
    gradients = [torch.randn(3, 4, dtype=torch.cdouble), torch.randn(5, dtype=torch.double)]
    expected = torch.linalg.vector_norm(torch.cat([torch.view_as_real(gradients[0]).flatten(), gradients[1]]))
    torch.testing.assert_close(clip_by_norm(gradients, 0.5, None), expected)


def test_gradients_that_are_conjugates_are_scaled_where_they_lie() -> None:
    """As autograd gives them: views of another tensor's memory, read as its conjugates."""
    gradient = torch.randn(3, 4, dtype=torch.cfloat).conj()
    before = gradient.clone()
    norm = clip_by_norm([gradient], 0.5, None)
    torch.testing.assert_close(norm, torch.view_as_real(before.resolve_conj()).norm())
    torch.testing.assert_close(gradient.resolve_conj(), before.resolve_conj() * (0.5 / (norm + 1e-6)))


def _check_clipped(gradients: list[torch.Tensor]) -> None:
    parameters = [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    with Called() as called:
        norm = clip_by_norm(gradients, 0.5, None)
    torch.testing.assert_close(norm, expected)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert called.names
    assert not called.names & COPIES


def test_what_several_ranks_hold_counts_once(fake_mesh: Any) -> None:
    """Rank 0 of a world whose collectives move nothing: its own share of the sum, over all four ranks."""
    mesh = fake_mesh(dp_replicate=2, dp_shard=2).device_mesh
    part = torch.full((2,), 3.0)
    whole = DTensor.from_local(part.clone(), mesh, (Replicate(), Replicate()), run_check=False)
    cut = DTensor.from_local(part.clone(), mesh, (Replicate(), Shard(0)), run_check=False)
    norm = clip_by_norm([whole, cut, part.clone()], 1e9, mesh._flatten("all"))
    torch.testing.assert_close(norm, torch.tensor(18 * (1 / 4 + 1 / 2 + 1 / 4)).sqrt())
