"""What a node may compute with on one axis."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import fx

from lightning_autoparallel.cost.placement import GENERIC
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan import candidates as module
from lightning_autoparallel.plan.candidates import CandidateTable
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.placements import P, R, S
from tests.support.simulate import axis_of, node_of

aten = torch.ops.aten


@pytest.fixture
def table(fake_mesh):
    """``table(size)`` and the warnings it was told."""
    warnings: list[str] = []

    def make(size: int = 2, name: str = "dp_shard") -> CandidateTable:
        mesh = fake_mesh(dp_shard=size)
        return CandidateTable(
            dataclasses.replace(axis_of(size), mesh_axes=(name,)), mesh.submesh(("dp_shard",)), GENERIC, warnings.append
        )

    make.warnings = warnings
    return make


def rows(candidates) -> list:
    return [(row.outputs, row.inputs) for row in candidates]


def call(op, *args, **kwargs) -> fx.Node:
    return node_of(op, args, kwargs)


def test_the_replicated_row_is_first_and_rows_differ(table):
    found = rows(table().of(call(aten.mm.default, torch.ones(4, 6), torch.ones(6, 8)), (1,)))
    assert found[0] == ((R,), (R, R))
    assert len(set(found)) == len(found)
    for row in [((S(0),), (S(0), R)), ((S(1),), (R, S(1))), ((P,), (S(1), S(0)))]:
        assert row in found


@pytest.mark.parametrize(("shape", "dims"), [((4, 6), {0, 1}), ((4, 5), {0}), ((3, 5), set()), ((1, 2), {1})])
def test_only_even_shards(table, shape, dims: set[int]):
    found = rows(table().of(call(aten.neg.default, torch.ones(shape)), (1,)))
    assert {out.dim for (out,), _ in found if out.is_shard()} == dims
    assert all(out == given for (out,), (given,) in found)


def test_an_empty_dim_is_no_shard(table):
    found = rows(table().of(call(aten.neg.default, torch.ones(0, 4)), (1,)))
    assert S(0) not in [out for (out,), _ in found]


@pytest.mark.parametrize(("rows_", "strided"), [(8, True), (6, False)])
def test_strided_shards_need_blocks_that_divide(table, rows_: int, strided: bool):
    found = rows(table().of(call(aten.neg.default, torch.ones(rows_, 3)), (1, 2)))
    assert (((S(0, 2),), (S(0, 2),)) in found) == strided


def test_a_nonlinear_operator_takes_no_partial_sum(table):
    found = rows(table().of(call(aten.relu.default, torch.ones(4)), (1,)))
    assert found == [((R,), (R,)), ((S(0),), (S(0),))]


def test_sharded_rows_cost_less(table):
    whole, *others = table().of(call(aten.mm.default, torch.ones(64, 64), torch.ones(64, 64)), (1,))
    assert all(0 < row.time_us < whole.time_us for row in others if P not in row.inputs)


def test_without_a_rule_it_computes_replicated_and_warns_once(table):
    made = table()
    for rows_ in (4, 8):
        node = call(aten.renorm.default, torch.randn(rows_, 4), 2, 0, 1.0)
        node.meta["custom"] = {"module": "encoder.norm", "source": "model.py:7"}
        assert rows(made.of(node, (1,))) == [((R,), (R,))]
    (warning,) = table.warnings
    assert "aten.renorm.default has no sharding rule" in warning
    assert "encoder.norm" in warning and "model.py:7" in warning


def test_a_rule_that_raises_warns_and_computes_replicated(table, monkeypatch):
    def fails(*args):
        raise ValueError("too hard")

    made = table()
    monkeypatch.setattr(module, "rule_rows", fails)
    assert rows(made.of(call(aten.neg.default, torch.ones(4)), (1,))) == [((R,), (R,))]
    (warning,) = table.warnings
    assert "aten.neg.default has a sharding rule that fails (ValueError: too hard)" in warning
    assert "the step itself" in warning


def test_equal_calls_share_an_entry_and_others_do_not(table):
    made = table()
    first = made.of(call(aten.sum.dim_IntList, torch.ones(4, 4), [0]), (1,))
    assert made.of(call(aten.sum.dim_IntList, torch.zeros(4, 4), [0]), (1,)) is first
    assert made.of(call(aten.sum.dim_IntList, torch.ones(4, 4), [1]), (1,)) is not first
    assert made.of(call(aten.sum.dim_IntList, torch.ones(4, 8), [0]), (1,)) is not first
    assert made.of(call(aten.sum.dim_IntList, torch.ones(4, 4), [0]), (1, 2)) is not first


def test_absent_results_have_no_placement(table):
    args = (torch.ones(4, 3, 8), torch.ones(4, 3, 8), torch.ones(3, 3, 1), [0], [1], [0], [1], False, [0], 1)
    found = rows(table().of(call(aten.convolution_backward.default, *args, [False, True, False]), (1,)))
    assert found == [((None, R, None), (R, R, R)), ((None, P, None), (S(0), S(0), R))]


def _fused_attention() -> dict[str, fx.Node]:
    """CUDA's fused attentions, forward; their shapes can be had without a GPU."""
    q = torch.ones(2, 4, 8, 16, dtype=torch.bfloat16)
    return {
        "flash": call(aten._scaled_dot_product_flash_attention.default, q, q, q, 0.1, True),
        "efficient": call(aten._scaled_dot_product_efficient_attention.default, q, q, q, None, True, 0.1, True),
        "cudnn": call(aten._scaled_dot_product_cudnn_attention.default, q, q, q, None, True, 0.1, True),
    }


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_fused_attention_is_sharded_by_batch_and_heads_though_its_random_state_is_not(table, kind: str):
    with FakeTensorMode(allow_non_fake_inputs=True):
        node = _fused_attention()[kind]
    found = rows(table().of(node, (1,)))
    assert table.warnings == []
    for dim in (0, 1):
        assert any(inputs[:3] == (S(dim),) * 3 and outputs[0] == S(dim) for outputs, inputs in found)
    assert fxn.is_random(node)


@pytest.mark.parametrize("axis", ["dp_shard", "tp"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_that_drops_is_cut_on_axes_of_the_batch_only_and_its_backward_too(table, dropout: float, axis: str):
    """The ranks of another axis draw alike, by the place that an element has in what they hold."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, lse = torch.ones(2, 4, 8, 16, dtype=torch.bfloat16), torch.ones(2, 4, 8, 1)
        seed = torch.ones((), dtype=torch.int64)
        forward = call(aten._scaled_dot_product_cudnn_attention.default, q, q, q, None, True, dropout, True)
        given = (q, q, q, q, q, lse, seed, seed, None, None, None, 8, 8, dropout, True)
        backward = call(aten._scaled_dot_product_cudnn_attention_backward.default, *given)
    made = table(name=axis)
    for node in (forward, backward):
        is_cut = any(outputs[0] == S(1) for outputs, _ in rows(made.of(node, (1,))))
        assert is_cut == (dropout == 0 or axis == "dp_shard")
        assert fxn.draws_mask(node) == (dropout > 0)


def test_a_rule_that_speaks_of_other_tensors_warns(table, monkeypatch):
    monkeypatch.setattr(module, "rule_rows", lambda *_: [((S(0), S(0)), (S(0),))])
    assert rows(table().of(call(aten.bmm.default, torch.ones(2, 4, 4), torch.ones(2, 4, 4)), (1,))) == [((R,), (R, R))]
    assert len(table.warnings) == 1 and "does not fit the call" in table.warnings[0]


def test_a_cut_vocabulary_takes_two_launches_more_than_cut_rows(table):
    """Of a maximum and a sum of each of 400 rows, in float32: half of 1600 bytes there and back."""
    node = call(aten._log_softmax.default, torch.ones(400, 800), 1, False)
    cut = {row.outputs[0]: row.time_us for row in table().of(node, (1,))}
    each_us = GENERIC.link_latency_us + 2 * 0.5 * 1600 / (GENERIC.link_gb_per_s * 1e3)
    assert cut[S(1)] - cut[S(0)] == pytest.approx(2 * each_us)
