"""Rows of DTensor's rules, checked against full tensors like ours: the operators that steps are made of."""

from __future__ import annotations

import pytest
import torch

from lightning_autoparallel.cost.placement import GENERIC
from lightning_autoparallel.plan.candidates import CandidateTable
from lightning_autoparallel.plan.rules import RULES
from tests.support.simulate import axis_of, node_of, recombined, run_on_ranks
from tests.unit.plan.samples import Sample, call, integers, x

aten = torch.ops.aten
_NORMAL = aten.native_layer_norm.default(x(4, 8, 8), [8], x(8), x(8), 1e-5)
_PROBABILITIES = x(4, 8).softmax(1)

MATMULS = [
    call(aten.mm.default, x(4, 8), x(8, 12)),
    call(aten.addmm.default, x(12), x(4, 8), x(8, 12)),
    call(aten.addmm.default, x(4, 12), x(4, 8), x(8, 12), beta=0.5, alpha=2.0),
    call(aten.bmm.default, x(4, 4, 8), x(4, 8, 4)),
    call(aten.baddbmm.default, x(4, 4, 4), x(4, 4, 8), x(4, 8, 4)),
    call(aten.dot.default, x(8), x(8)),
]
_UNARY = ["relu", "gelu", "silu", "sigmoid", "tanh", "exp", "neg", "erf", "abs", "reciprocal", "sin", "logical_not"]
POINTWISE = [
    *(call(getattr(aten, name).default, x(4, 8)) for name in _UNARY),
    *(call(getattr(aten, name).Tensor, x(4, 8), x(8)) for name in ("add", "sub", "mul", "div", "eq", "gt", "le")),
    *(call(getattr(aten, name).Tensor, x(4, 8), 2.5) for name in ("add", "sub", "mul", "div")),
    *(call(getattr(aten, name).Scalar, x(4, 8), 2) for name in ("add", "mul", "eq", "ge")),
    call(aten.add.Tensor, x(4, 8), x(4, 8), alpha=2),
    call(aten.add.Tensor, x(4, 8), x()),
    call(aten.mul.Tensor, x(4, 1, 8), x(4, 8, 1)),
    call(aten.pow.Tensor_Scalar, x(4, 8), 2),
    call(aten.pow.Tensor_Scalar, x(4, 8), 1),
    call(aten.rsub.Scalar, x(4, 8), 1.0),
    call(aten.maximum.default, x(4, 8), x(4, 8)),
    call(aten.clamp.default, x(4, 8), -0.5, 0.5),
    call(aten.where.self, x(4, 8) > 0, x(4, 8), x(8)),
    call(aten.where.self, x(4, 1) > 0, x(4, 8), x()),
    call(aten.masked_fill.Scalar, x(4, 8), x(4, 8) > 0, 3.0),
    call(aten.masked_fill.Scalar, x(4, 8), x(8) > 0, 0.0),
    call(aten.threshold_backward.default, x(4, 8), x(4, 8), 0),
    call(aten.gelu_backward.default, x(4, 8), x(4, 8)),
    call(aten.tanh_backward.default, x(4, 8), x(4, 8)),
    call(aten._to_copy.default, x(4, 8), dtype=torch.float64),
    call(aten.clone.default, x(4, 8)),
    call(aten.addcmul.default, x(4, 8), x(4, 8), x(4, 8), value=2),
    call(aten.lerp.Scalar, x(4, 8), x(4, 8), 0.3),
    call(aten.bitwise_not.default, x(4, 8) > 0),
]
REDUCTIONS = [
    call(aten.amax.default, x(4, 8), [1]),
    call(aten.amin.default, x(4, 8), [0], True),
    call(aten.amax.default, x(4, 8)),
    call(aten.max.default, x(4, 8)),
    call(aten.prod.dim_int, x(4, 8), 1),
    call(aten.any.dim, x(4, 8) > 1, 1),
    call(aten.all.default, x(4, 8) > -9),
    call(aten.linalg_vector_norm.default, x(4, 8), 2.0, [1]),
    call(aten._softmax.default, x(4, 8, 4), 1, False),
    call(aten._log_softmax.default, x(4, 8), -1, False),
    call(aten._softmax_backward_data.default, x(4, 8), _PROBABILITIES, 1, torch.float32),
    call(aten._log_softmax_backward_data.default, x(4, 8), _PROBABILITIES.log(), 1, torch.float32),
    call(aten.logsumexp.default, x(4, 8), [1]),
]
OTHERS = [
    call(aten.native_layer_norm.default, x(4, 8, 8), [8], x(8), x(8), 1e-5),
    call(aten.native_layer_norm.default, x(4, 8, 8), [8], None, None, 1e-5),
    call(
        aten.native_layer_norm_backward.default,
        *(x(4, 8, 8), x(4, 8, 8), [8], _NORMAL[1], _NORMAL[2], x(8), x(8), [True] * 3),
    ),
    call(aten.embedding.default, x(8, 4), integers(8, 4, 8)),
    call(aten.index_select.default, x(8, 4), 0, integers(8, 4)),
    call(aten.index.Tensor, x(8, 4), [integers(8, 4)]),
    call(aten.index.Tensor, x(4, 8, 4), [None, integers(8, 4)]),
    call(aten.index_put.default, x(8, 4), [torch.arange(4)], x(4, 4)),
    call(aten.index_put.default, x(8, 4), [integers(8, 4)], x(4, 4), True),
    call(aten.repeat.default, x(4, 8), [2, 1]),
    call(aten.linalg_qr.default, x(4, 4)),
    call(aten.histc.default, x(8), 4, -3.0, 3.0),
    call(aten.upsample_nearest2d_backward.default, x(4, 4, 8, 8), [8, 8], [4, 4, 4, 4]),
    call(aten.upsample_bilinear2d_backward.default, x(4, 4, 8, 8), [8, 8], [4, 4, 4, 4], False),
]
SAMPLES = [
    sample
    for sample in [*MATMULS, *POINTWISE, *REDUCTIONS, *OTHERS]
    if sample.op not in RULES or sample.op is aten.index_put.default
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_row_computes_what_one_device_does(fake_mesh, sample: Sample, size: int):
    torch.manual_seed(size)
    node = node_of(sample.op, sample.args, sample.kwargs)
    mesh = fake_mesh(dp_shard=size).submesh(("dp_shard",))
    wrong = []
    for row in CandidateTable(axis_of(size), mesh, GENERIC, lambda message: None).of(node, (1, 2)):
        try:
            for together, alone in recombined(run_on_ranks(node, row, size), node, row):
                torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{row.outputs} <- {row.inputs}: {str(error)[:200]}")
    assert wrong == []
