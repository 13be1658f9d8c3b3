"""cuDNN's attention is cut as the CPU's, whose rows are checked against full tensors; and heads of other numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from lightning_autoparallel.plan.attention_rules import attention_rule
from lightning_autoparallel.plan.rules import OpCall
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode

aten = torch.ops.aten
CUDNN, CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward
CPU, CPU_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
SHARED = {
    None: (),
    (8, 8): (Replicate(), Replicate()),
    (1, 1, 8, 8): (Replicate(), Replicate()),
    (4, 1, 8, 8): (Shard(0), Replicate()),
    (1, 2, 8, 8): (Replicate(), Shard(1)),
    (4, 2, 8, 8): (Shard(0), Shard(1)),
}


def rows(packet: Any, *args: Any, **kwargs: Any) -> list[tuple[dict[int, Placement], dict[str, Placement]]]:
    """Placements of results by their positions, and of arguments by the operator's names for them."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = packet.default(*args, **kwargs)
    outputs = tuple(item if isinstance(item, Tensor) else None for item in results)
    names = [argument.name for argument in packet.default._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    call = OpCall(op=packet.default, args=args, kwargs=kwargs, inputs=tuple(tensors.values()), outputs=outputs)
    return [
        ({i: placement for i, placement in enumerate(made) if placement}, dict(zip(tensors, read, strict=True)))
        for made, read in attention_rule(call)
    ]


def tensors(shape: tuple[int, ...] | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries, keys or values, and a mask of a shape."""
    query = torch.zeros(4, 2, 8, 16, dtype=torch.bfloat16)
    return query, query.clone(), None if shape is None else torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_a_mask_is_cut_where_it_has_a_part_for_each_row_or_head(shape):
    query, key, mask = tensors(shape)
    found = rows(CUDNN, query, key, key, mask, True)
    assert tuple(read["attn_bias"] for _, read in found if mask is not None) == SHARED[shape]
    for dim, (made, read) in enumerate(found):
        assert [read[name] for name in ("query", "key", "value")] == [Shard(dim)] * 3
        assert made == {0: Shard(dim), 1: Shard(dim), 6: Replicate(), 7: Replicate()}  # the last are the draw's state


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_rows_are_those_of_the_cpu(shape):
    query, key, mask = tensors(shape)
    masked = {} if mask is None else {"attn_mask": mask}
    there, here = rows(CUDNN, query, key, key, mask, True), rows(CPU, query, key, key, **masked)
    check_alike(there, here, results=2)
    sums, state = torch.zeros(4, 2, 8, 1), torch.zeros((), dtype=torch.long)
    back = (query, query, key, key, query, sums)
    there = rows(CUDNN_BACKWARD, *back, state, state, mask, None, None, 8, 8, 0.0, False)
    assert all(read["philox_seed"] == read["philox_offset"] == Replicate() for _, read in there)
    check_alike(there, rows(CPU_BACKWARD, *back[:5], sums.squeeze(-1), 0.0, False, **masked), results=3)


def check_alike(there: list[Any], here: list[Any], results: int) -> None:
    assert len(there) == len(here) == 2
    for (made, read), (made_here, read_here) in zip(there, here, strict=True):
        assert {i: made[i] for i in range(results)} == made_here
        if "attn_mask" in read_here:
            assert read["attn_bias"] == read_here.pop("attn_mask")
        assert {name: read[name] for name in read_here} == read_here
