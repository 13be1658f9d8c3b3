"""Rows of the rules of this GPU's attention: what parts of rows or heads compute, beside the kernel on full tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.cost.placement import GENERIC
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.plan.candidates import CandidateTable
from lightning_autoparallel.torch_compat.collectives import init_fake_world
from tests.support.placements import joined
from tests.support.simulate import axis_of, node_of, run_on_ranks

pytestmark = pytest.mark.gpu

aten = torch.ops.aten
ROWS, HEADS, LENGTH, WIDTH, RANKS = 4, 4, 128, 64, 2
MASKS = [None, (LENGTH, LENGTH), (ROWS, 1, LENGTH, LENGTH), (1, HEADS, LENGTH, LENGTH), (ROWS, HEADS, LENGTH, LENGTH)]
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}  # parts may be computed in another order, in bfloat16


@pytest.fixture
def table() -> Iterator[CandidateTable]:
    """Of an axis of two ranks; a rule that fails fails the test."""

    def refuse(message: str) -> None:
        raise AssertionError(message)

    init_fake_world(RANKS, 0)
    mesh = build_mesh(MeshSpec.from_mapping({"dp_shard": RANKS}), "cpu")
    yield CandidateTable(axis_of(RANKS), mesh.submesh(("dp_shard",)), GENERIC, refuse)
    dist.destroy_process_group()


def check(table: CandidateTable, op: Any, args: tuple[Any, ...]) -> Any:
    """All rows, two of which at least cut something; the results of one device."""
    node = node_of(op, args, {})
    rows = table.of(node, (1,))
    assert sum(any(placement.is_shard() for placement in row.inputs) for row in rows) >= 2
    for row in rows:
        parts = run_on_ranks(node, row, RANKS)
        for i, (alone, placement) in enumerate(zip(fxn.values(node), row.outputs, strict=True)):
            if alone is not None and alone.is_floating_point():  # and no state of the rank's generator
                together = joined([part[i] for part in parts], placement, alone.shape)
                torch.testing.assert_close(together, alone, **TOLERANCE, msg=lambda m, row=row: f"{row}\n{m}")
    return node.meta["val"]


def drawn(accelerator: str, key_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and the gradient of what comes out."""
    torch.manual_seed(0)
    device = "cuda" if accelerator == "gpu" else "cpu"

    def made(heads: int) -> Tensor:
        return torch.randn(ROWS, LENGTH, heads, WIDTH, device=device, dtype=torch.bfloat16).transpose(1, 2)

    return made(HEADS), made(key_heads), made(key_heads), made(HEADS)


def mask_of(shape: tuple[int, ...] | None, like: Tensor) -> Tensor | None:
    """One that hides a third of the keys."""
    if shape is None:
        return None
    return torch.zeros(shape, dtype=like.dtype, device=like.device).masked_fill(
        torch.rand(shape, device=like.device) < 1 / 3, -100.0
    )


@pytest.mark.parametrize("key_heads", [HEADS, RANKS])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_cudnn(shape, key_heads: int, table, accelerator: str):
    if accelerator == "cpu":
        pytest.skip("needs cuDNN")
    query, key, value, grad = drawn(accelerator, key_heads)
    mask = mask_of(shape, query)
    forward = aten._scaled_dot_product_cudnn_attention.default
    out, sums, _, _, most_queries, most_keys, seed, offset, _ = check(
        table, forward, (query, key, value, mask, True, 0.0, shape is None)
    )
    saved = (out, sums, seed, offset, mask, None, None, most_queries, most_keys, 0.0, shape is None)
    check(table, aten._scaled_dot_product_cudnn_attention_backward.default, (grad, query, key, value, *saved))


def test_flash(table, accelerator: str):
    if accelerator == "cpu":
        pytest.skip("a CPU has a kernel of its own")
    query, key, value, grad = drawn(accelerator)
    forward = aten._scaled_dot_product_flash_attention.default
    results = check(table, forward, (query, key, value, 0.0, True))
    out, sums, queries_at, keys_at, most_queries, most_keys, seed, offset, _ = results
    saved = (out, sums, queries_at, keys_at, most_queries, most_keys, 0.0, True, seed, offset)
    check(table, aten._scaled_dot_product_flash_attention_backward.default, (grad, query, key, value, *saved))


@pytest.mark.parametrize("is_masked", [False, True])
def test_efficient(is_masked: bool, table, accelerator: str):
    if accelerator == "cpu":
        pytest.skip("a CPU has a kernel of its own")
    query, key, value, grad = drawn(accelerator)
    mask = mask_of(MASKS[-1] if is_masked else None, query)
    forward = aten._scaled_dot_product_efficient_attention.default
    out, sums, seed, offset = check(table, forward, (query, key, value, mask, True))
    saved = (mask, out, sums, seed, offset, 0.0, [True, True, True, False])
    check(table, aten._scaled_dot_product_efficient_attention_backward.default, (grad, query, key, value, *saved))


def test_the_cpus(table, accelerator: str):
    query, key, value, grad = (tensor.cpu() for tensor in drawn(accelerator))
    out, sums = check(table, aten._scaled_dot_product_flash_attention_for_cpu.default, (query, key, value))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    check(table, backward, (grad, query, key, value, out, sums, 0.0, False))
