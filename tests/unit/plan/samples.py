"""Sample calls of every operator that has a rule of ours: real tensors, so that rows can be checked by running them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(7)


@dataclass(frozen=True, kw_only=True)
class Sample:
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [f"{list(a.shape)}" if isinstance(a, Tensor) else str(a) for a in self.args]
        return f"{self.op}({', '.join(shown)})".replace("torch.", "")[:100]


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def call(op: Any, *args: Any, **kwargs: Any) -> Sample:
    return Sample(op=op, args=args, kwargs=kwargs)


REDUCTIONS = [
    call(aten.sum.default, x(4, 8)),
    call(aten.sum.default, x()),
    call(aten.sum.dim_IntList, x(4, 8, 4), [-1]),
    call(aten.sum.dim_IntList, x(4, 8, 4), [0, 2], True),
    call(aten.sum.dim_IntList, x(4, 8), []),
    call(aten.sum.dim_IntList, integers(9, 4, 8), [0]),
    call(aten.sort.default, x(4, 8)),
    call(aten.sort.default, x(4, 8), 0, True),
    call(aten.topk.default, x(4, 8), 3),
    call(aten.topk.default, x(8, 4), 4, 0),
    call(aten.cumsum.default, x(4, 8), 1),
    call(aten.cumsum.default, x(4, 8), -2),
    call(aten.cumprod.default, x(4, 8), -1),
    call(aten.cumprod.default, x(4, 8), 0),
    call(aten.logcumsumexp.default, x(4, 8), -2),
    call(aten.max.dim, x(4, 8, 4), 1),
    call(aten.max.dim, x(4, 8, 4), 1, True),
    call(aten.min.dim, x(4, 8, 4), -1),
    call(aten.argmax.default, x(4, 8)),
    call(aten.argmax.default, x(4, 8), None, True),
    call(aten.argmax.default, x(4, 8, 4), 1),
    call(aten.argmin.default, x(4, 8), 0, True),
    call(aten.argmin.default, x(4, 8)),
]

FACTORIES = [
    call(aten.full.default, [4, 8], 3.0),
    call(aten.full.default, [4, 8], 0),
    call(aten.rand.default, [4, 8]),
    call(aten.randn.default, [4, 8]),
    call(aten.randint.default, 9, [4, 8]),
    call(aten.randint.low, 3, 9, [4, 8]),
    call(aten.arange.default, 8),
    call(aten.arange.start, 2, 10),
    call(aten.arange.start_step, 0, 16, 2),
    call(aten.scalar_tensor.default, 2.5),
    call(aten.empty.memory_format, [4, 8]),
]

CONVOLUTIONS = [
    call(aten.convolution.default, x(4, 3, 8, 8), x(4, 3, 3, 3), x(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    call(aten.convolution.default, x(4, 4, 8), x(4, 2, 3), None, [2], [0], [1], False, [0], 2),
    call(aten.convolution.default, x(4, 4, 8), x(4, 2, 3), x(2), [2], [0], [1], True, [0], 1),
    *(
        call(aten.convolution_backward.default, x(4, 4, 8), x(4, 3, 8), x(4, 3, 3), [4], *rest)
        for rest in (
            ([1], [1], [1], False, [0], 1, [True, True, True]),
            ([1], [1], [1], False, [0], 1, [False, True, False]),
        )
    ),
]

EVALUATED_NORMS = [
    call(aten._native_batch_norm_legit_no_training.default, x(4, 8, 4), *numbers, x(8), x(8).abs() + 1, 0.1, 1e-5)
    for numbers in ((x(8), x(8)), (None, None))
]

_IMAGE = x(4, 4, 8, 8)
_VOLUME = x(4, 4, 4, 4, 4)
_POOLED, _PLACES = aten.max_pool2d_with_indices.default(_IMAGE, [2, 2])
_POOLED3, _PLACES3 = aten.max_pool3d_with_indices.default(_VOLUME, [2, 2, 2])
_POOL2 = ([2, 2], [2, 2], [0, 0])
_POOL3 = ([2, 2, 2], [2, 2, 2], [0, 0, 0])
SPATIAL = [
    call(aten.max_pool2d_with_indices.default, _IMAGE, [2, 2]),
    call(aten.max_pool2d_with_indices.default, x(4, 8, 8), [2, 2]),
    call(aten.max_pool2d_with_indices_backward.default, x(4, 4, 4, 4), _IMAGE, *_POOL2, [1, 1], False, _PLACES),
    call(aten.avg_pool2d.default, _IMAGE, [2, 2]),
    call(aten.avg_pool2d_backward.default, x(4, 4, 4, 4), _IMAGE, *_POOL2, False, True, None),
    call(aten._adaptive_avg_pool2d.default, _IMAGE, [3, 3]),
    call(aten._adaptive_avg_pool2d_backward.default, x(4, 4, 3, 3), _IMAGE),
    call(aten.max_pool3d_with_indices.default, _VOLUME, [2, 2, 2]),
    call(aten.max_pool3d_with_indices.default, x(4, 8, 4, 4), [4, 2, 2]),
    call(aten.max_pool3d_with_indices_backward.default, x(4, 4, 2, 2, 2), _VOLUME, *_POOL3, [1] * 3, False, _PLACES3),
    call(aten.avg_pool3d.default, _VOLUME, [2, 2, 2]),
    call(aten.avg_pool3d.default, x(4, 8, 4, 4), [3, 2, 2], [1, 1, 1], [1, 0, 0]),
    call(aten.avg_pool3d_backward.default, x(4, 4, 2, 2, 2), _VOLUME, *_POOL3, False, True, None),
    call(aten.upsample_nearest2d.default, _IMAGE, [16, 16]),
    call(aten.upsample_bilinear2d.default, _IMAGE, [12, 12], False),
    call(aten.reflection_pad2d.default, _IMAGE, [1, 1, 2, 2]),
    call(aten.reflection_pad1d.default, x(4, 4, 8), [2, 2]),
    call(aten.reflection_pad1d.default, x(4, 8), [2, 2]),
]

_Q, _K, _V = x(4, 4, 8, 8), x(4, 4, 8, 8), x(4, 4, 8, 8)
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_MASKS = [x(8, 8), x(4, 1, 8, 8), x(1, 4, 8, 8), x(4, 4, 8, 8)]
_OUT, _LSE = _FLASH(_Q, _K, _V, 0.0, True)
ATTENTION = [
    call(_FLASH, _Q, _K, _V, 0.0, True),
    *(call(_FLASH, _Q, _K, _V, attn_mask=mask) for mask in _MASKS),
    call(_FLASH_BACKWARD, x(4, 4, 8, 8), _Q, _K, _V, _OUT, _LSE, 0.0, True),
    *(
        call(_FLASH_BACKWARD, x(4, 4, 8, 8), _Q, _K, _V, *_FLASH(_Q, _K, _V, attn_mask=m), 0.0, False, attn_mask=m)
        for m in _MASKS
    ),
]

INDEXED = [
    call(aten.embedding.default, x(8, 4), integers(8, 4, 8)),
    call(aten.embedding_dense_backward.default, x(4, 8, 4), integers(8, 4, 8), 8, -1, False),
    call(aten.embedding_dense_backward.default, x(4, 8, 4), integers(8, 4, 8), 8, 3, False),
    call(aten._log_softmax.default, x(4, 8), -1, False),
    call(aten._log_softmax.default, x(4, 8, 4), 1, False),
    call(aten._log_softmax_backward_data.default, x(4, 8), x(4, 8).log_softmax(1), 1, torch.float32),
    call(aten.gather.default, x(4, 8), 1, integers(8, 4, 1)),
    call(aten.scatter.value, x(4, 8), 1, integers(8, 4, 1), 2.5),
    call(aten.einsum.default, "abk,nk->abn", [x(4, 8, 12), x(16, 12)]),
    call(aten.einsum.default, "abn,nk->abk", [x(4, 8, 12), x(12, 16)]),
    call(aten.einsum.default, "abn,abk->nk", [x(4, 8, 12), x(4, 8, 16)]),
    call(aten.einsum.default, "abk,abn->nk", [x(4, 8, 12), x(4, 8, 16)]),
    call(aten.embedding_dense_backward.default, x(4, 8, 4), integers(6, 4, 8), 6, -1, False),
    call(aten.embedding_dense_backward.default, x(4, 8, 4), integers(6, 4, 8), 6, 2, False),
    call(aten.embedding_dense_backward.default, x(4, 8, 4), integers(3, 4, 8), 6, -1, True),
    call(aten.gather.default, x(4, 8, 4), 1, integers(8, 4, 4, 4)),
    call(aten.gather.default, x(8, 4), -2, integers(8, 4, 4)),
    call(aten.scatter.value, x(4, 8), 1, integers(8, 4, 4), 2.0),
    call(aten.scatter.src, x(4, 8), 0, torch.arange(4)[:, None].expand(4, 8).contiguous(), x(4, 8)),
    call(aten.scatter_add.default, x(4, 8), 1, integers(8, 4, 4), x(4, 4)),
    call(aten.scatter_add.default, x(4, 8), 0, integers(4, 8, 8), x(8, 8)),
]

VIEWS = [
    call(aten.permute.default, x(4, 8, 12), [2, 0, -2]),
    call(aten.transpose.int, x(4, 8, 12), 0, -1),
    call(aten.t.default, x(4, 8)),
    call(aten.t.default, x(8)),
    call(aten.unsqueeze.default, x(4, 8), 1),
    call(aten.unsqueeze.default, x(4, 8), -1),
    call(aten.squeeze.default, x(4, 1, 8)),
    call(aten.squeeze.dim, x(4, 1, 8), 1),
    call(aten.squeeze.dim, x(4, 8), 0),
    call(aten.squeeze.dims, x(1, 4, 1, 8), [0, -2]),
    call(aten.squeeze.dims, x(4, 1, 8), [0, 1]),
    call(aten.expand.default, x(4, 1, 8), [4, 4, 8]),
    call(aten.expand.default, x(8), [4, 8]),
    call(aten.expand.default, x(4, 1), [8, -1, 4]),
    call(aten.select.int, x(4, 8, 4), 1, -1),
    call(aten.unbind.int, x(4, 2, 8), 1),
    call(aten.unbind.int, x(2, 8)),
    call(aten.slice.Tensor, x(4, 8), 1, 2, 6),
    call(aten.slice.Tensor, x(4, 8), 1, 0, 8),
    call(aten.slice.Tensor, x(4, 8), 0, -4, 9223372036854775807),
    call(aten.split.Tensor, x(4, 8), 3, 1),
    call(aten.split.Tensor, x(4, 8), 2),
    call(aten.split_with_sizes.default, x(4, 8), [2, 6], -1),
    call(aten.flip.default, x(4, 8, 4), [0, -1]),
    call(aten.roll.default, x(4, 8), [1], [1]),
    call(aten.roll.default, x(4, 8), [3]),
    call(aten.slice_backward.default, x(4, 4), [4, 8], 1, 2, 6, 1),
    call(aten.select_backward.default, x(4, 8), [4, 3, 8], 1, 2),
    call(aten.constant_pad_nd.default, x(4, 8), [1, 2]),
    call(aten.constant_pad_nd.default, x(4, 8, 4), [0, 0, 1, 0], 5.0),
    call(aten.tril.default, x(4, 8, 8), -1),
    call(aten.triu.default, x(4, 4, 8, 8)),
    call(aten.cat.default, [x(4, 8), x(4, 4)], 1),
    call(aten.cat.default, [x(4, 8), x(8, 8)]),
    call(aten.stack.default, [x(4, 8), x(4, 8)], 1),
    call(aten.stack.default, [x(4, 8), x(4, 8)], -1),
    call(aten.view.default, x(4, 8), [32]),
    call(aten.view.default, x(32), [4, 8]),
    call(aten.view.default, x(4, 8, 4), [32, 4]),
    call(aten.view.default, x(32, 4), [4, 8, 4]),
    call(aten.view.default, x(4, 8, 4), [4, 32]),
    call(aten.view.default, x(4, 8, 4), [8, 4, 4]),
    call(aten.view.default, x(4, 6, 4), [24, 2, 2]),
    call(aten.view.default, x(4, 1, 8), [1, 32, 1]),
    call(aten.view.default, x(16, 16), [2, 8, 4, 4]),
    call(aten.view.default, x(12, 4), [3, 16]),
]

_PICKED = torch.tensor([True, False, True, True, False, False, True, False])
WRITTEN = [
    call(aten.select_scatter.default, x(4, 8), x(4), 1, 0),
    call(aten.select_scatter.default, x(4, 8, 4), x(4, 4), -2, 3),
    call(aten.select_scatter.default, x(4, 8), x(8), 0, -1),
    call(aten.index_put.default, x(4, 8), [x(4, 8) > 0], x()),
    call(aten.index_put.default, x(4, 8), [x(4, 8) > 0], x(1), True),
    call(aten.index_put.default, x(4, 8, 4), [x(4, 8) > 0], x()),
    call(aten.index_put.default, x(4, 8, 4), [x(4, 8) > 0], x(4)),
    call(aten.index_put.default, x(4, 8, 4), [x(4, 8, 4) > 0], x()),
    call(aten.index_put.default, x(4, 8, 4), [None, x(8, 4) > 0], x(4, 1)),
    call(aten.index_put.default, x(8, 4), [_PICKED], x(4)),
    call(aten.index_put.default, x(8, 4), [_PICKED], x(4, 4)),
    call(aten.index_put.default, x(8, 4), [_PICKED], x(4, 1), True),
    call(aten.index_put.default, x(4, 8, 4), [None, _PICKED], x(4, 4, 4)),
    call(aten.index_put.default, x(4, 8, 4), [None, _PICKED], x(4, 1)),
    call(aten.index_put.default, x(4, 8, 4), [x(4, 8) > 0, torch.tensor([1])], x()),
    call(aten.index_put.default, x(4, 4, 8), [torch.tensor([1]), x(4, 8) > 0], x(1), True),
]

SAMPLES = [*REDUCTIONS, *FACTORIES, *CONVOLUTIONS, *EVALUATED_NORMS, *SPATIAL, *ATTENTION, *INDEXED, *WRITTEN, *VIEWS]
