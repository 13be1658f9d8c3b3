"""Products that are added to a sum of products on a GPU: wider than their operands, and where the sum lies."""

from __future__ import annotations

import pytest
import torch

from lightning_autoparallel.torch_compat.rank_operators import ADD_PRODUCT, ADD_PRODUCT_IN_PLACE

pytestmark = pytest.mark.gpu


def added(dtype: torch.dtype, is_transposed: bool, accelerator: str) -> tuple[float, float, int]:
    """How far the sum is from that of float64, by itself and in its place, and what was allocated for the latter."""
    device = "cpu" if accelerator == "cpu" else "cuda"
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(96, 64, generator=generator).to(device)
    left = torch.randn(96, 32, generator=generator).to(device, dtype)
    right = torch.randn(64, 32, generator=generator).to(device, dtype).t()
    right = right if is_transposed else right.contiguous()
    expected = total.double() + left.double() @ right.double()
    alone = float((ADD_PRODUCT(left, right, total) - expected).abs().max())
    place, taken = total.data_ptr(), 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        taken = -torch.cuda.memory_allocated()
    ADD_PRODUCT_IN_PLACE(left, right, total)
    if device == "cuda":
        taken += torch.cuda.max_memory_allocated()
    assert total.data_ptr() == place
    return alone, float((total - expected).abs().max()), taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_are_added_in_float32_where_the_sum_lies(
    dtype: torch.dtype, is_transposed: bool, accelerator: str, gpu_world
):
    alone, in_place, taken = gpu_world().run(added, dtype, is_transposed, accelerator)[0]
    assert max(alone, in_place) < 1e-4  # rounded to its operands' dtype it would be 1e-2
    assert taken < 96 * 64 * 4
