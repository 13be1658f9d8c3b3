"""Every row of every rule of ours, run rank by rank on parts of real tensors and compared with the full ones."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate

from lightning_autoparallel.cost.placement import GENERIC
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan.candidates import CandidateTable
from lightning_autoparallel.plan.rules import RULES, P, R, S, rule
from tests.support.simulate import axis_of, node_of, recombined, run_on_ranks
from tests.unit.plan.samples import SAMPLES, Sample

aten = torch.ops.aten
UNREPEATABLE = {aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.empty.memory_format}

OF_GPUS = {  # beside the CPU's attention in test_attention_rules.py
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}


def refuse(message: str) -> None:
    raise AssertionError(message)


def rows_of(sample: Sample, size: int, factors: tuple[int, ...] = (1, 2)):
    node = node_of(sample.op, sample.args, sample.kwargs)
    return node, CandidateTable(axis_of(size), None, GENERIC, refuse).of(node, factors)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_row_computes_what_one_device_does(sample: Sample, size: int):
    torch.manual_seed(size)
    node, rows = rows_of(sample, size)
    for row in rows:
        if sample.op in UNREPEATABLE and all(p is None or p.is_replicate() for p in row.outputs):
            continue  # lowering makes such draws agree
        for together, alone in recombined(run_on_ranks(node, row, size), node, row):
            if sample.op in UNREPEATABLE:
                assert (together.shape, together.dtype) == (alone.shape, alone.dtype), row
            else:
                torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5, msg=lambda m, row=row: f"{row}\n{m}")


def test_every_registered_operator_has_a_sample():
    assert set(RULES) == {sample.op for sample in SAMPLES} | OF_GPUS


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_the_replicated_row_comes_first(sample: Sample):
    _, rows = rows_of(sample, 2)
    assert all(isinstance(p, Replicate) for p in (*rows[0].outputs, *rows[0].inputs) if p is not None)


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        (aten.sum.dim_IntList, ([0],), [((P,), (P,)), ((P,), (S(0),)), ((S(0),), (S(1),))]),
        (aten.cumsum.default, (1,), [((S(0),), (S(0),))]),
        (aten.view.default, ([8, 4],), [((P,), (P,)), ((S(0),), (S(0),))]),
        (aten.topk.default, (2, 0), [((S(1), S(1)), (S(1),))]),
        (aten.select_scatter.default, (torch.zeros(4), 1, 0), [((S(0),), (S(0), S(0)))]),
        (
            aten.index_put.default,
            ([torch.zeros(4, 8, dtype=torch.bool)], torch.zeros(())),
            [((S(0),), (S(0), S(0), R)), ((S(1),), (S(1), S(1), R))],
        ),
        (aten.embedding_dense_backward.default, None, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_rows_that_plans_rely_on_are_there(op, args, expected):
    """A rule without rows would pass every check above: these keep the important ones."""
    if args is None:
        args, expected = (torch.zeros(4, 8, dtype=torch.int64), 6, -1, False), [((P,), (S(0), S(0))), ((P,), (P, R))]
        sample = Sample(op=op, args=(torch.zeros(4, 8, 4), *args))
    else:
        sample = Sample(op=op, args=(torch.zeros(4, 8), *args))
    _, rows = rows_of(sample, 2, (1,))
    found = [(row.outputs, row.inputs) for row in rows]
    assert [row for row in expected if row not in found] == []


def test_an_operator_takes_one_rule_only():
    with pytest.raises(AssertionError, match="has a rule already"):
        rule(aten.view.default)(lambda call: [])


def test_a_wrong_row_is_seen():
    """The check itself: a shard of the summed dim that claims to be the whole sum must not pass."""
    node, (replicated, *_) = rows_of(Sample(op=aten.sum.dim_IntList, args=(torch.randn(4, 8), [1])), 2)
    wrong = type(replicated)(outputs=(R,), inputs=(S(1),), time_us=0.0)
    with pytest.raises(AssertionError, match="replicas differ"):
        recombined(run_on_ranks(node, wrong, 2), node, wrong)
    wrong = type(replicated)(outputs=(P,), inputs=(R,), time_us=0.0)
    together, alone = recombined(run_on_ranks(node, wrong, 2), node, wrong)[0]
    assert not torch.allclose(together, alone)
    assert [value.shape for value in fxn.values(node)] == [alone.shape]
