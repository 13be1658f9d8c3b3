"""A value that is only read narrow is gathered narrow; any other reader keeps the gather as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.cast_before_gather import cast_before_gather
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.lockstep import one_group, run_lockstep

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Draft:
    """A graph over fake values; its input is one rank's (3, 4) shard."""

    def __init__(self, dtype: torch.dtype = FP32) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.shard = self.graph.placeholder("shard")
        with self.mode:
            self.shard.meta["val"] = torch.empty(3, 4, dtype=dtype)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]), **kwargs)
        return node

    def gather(self, value: fx.Node) -> fx.Node:
        return self.call(collectives.WAIT, self.call(collectives.ALL_GATHER, value, 2, "g"))

    def cast(self, value: fx.Node, dtype: torch.dtype = BF16, **options: Any) -> fx.Node:
        return self.call(aten._to_copy.default, value, dtype=dtype, **options)


def gathered_dtypes(graph: fx.Graph) -> list[torch.dtype]:
    return [node.args[0].meta["val"].dtype for node in fxn.collectives_of(graph)]


def casts(graph: fx.Graph) -> int:
    return sum(node.target is aten._to_copy.default for node in graph.nodes)


def rewritten(draft: Draft, *outputs: fx.Node) -> tuple[str, ...]:
    """Run the pass: values stay what they were to the bit, and every node's fake value is what it computes."""
    draft.graph.output(list(outputs))
    inputs = [[torch.randn(3, 4).to(draft.shard.meta["val"].dtype)] for _ in range(2)]
    before = run_lockstep([draft.graph] * 2, inputs, one_group("g", 2))
    notes = cast_before_gather(draft.graph)
    draft.graph.lint()
    after = run_lockstep([draft.graph] * 2, inputs, one_group("g", 2))
    for ours, expected in zip(after, before, strict=True):
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            assert mine.stride() == theirs.stride()
    check_fake_values(draft)
    return notes


def check_fake_values(draft: Draft) -> None:
    for node in draft.graph.nodes:
        if node.op != "call_function":
            continue
        with draft.mode:
            value: Tensor = node.target(*fx.map_arg(node.args, lambda argument: argument.meta["val"]), **node.kwargs)
        known = node.meta["val"]
        assert (known.dtype, known.shape, known.stride()) == (value.dtype, value.shape, value.stride()), node.name


def test_a_cast_right_behind_the_gather():
    draft = Draft()
    assert rewritten(draft, draft.cast(draft.gather(draft.shard))) == (
        "1 casts moved before gathers, 48 bytes less gathered",  # (6, 4) elements, 2 bytes each
    )
    assert gathered_dtypes(draft.graph) == [BF16]
    assert casts(draft.graph) == 1


@pytest.mark.parametrize(
    "moves",
    [
        [(aten.t.default,)],
        [(aten.permute.default, [1, 0]), (aten.clone.default,)],
        [(aten.view.default, [2, 3, 4]), (aten.select.int, 0, 1)],
        [(aten.slice.Tensor, 0, 0, 5)],  # what cuts padding off
        [(aten.unsqueeze.default, 0), (aten.expand.default, [2, 6, 4])],
    ],
    ids=lambda moves: ">".join(str(move[0]).split(".")[1] for move in moves),
)
def test_a_cast_behind_moves_of_elements(moves: list):
    draft = Draft()
    value = draft.gather(draft.shard)
    for target, *arguments in moves:
        value = draft.call(target, value, *arguments)
    assert rewritten(draft, draft.cast(value)) != ()
    assert gathered_dtypes(draft.graph) == [BF16]


def test_a_column_slice_is_laid_out_as_the_cast_laid_it_out():
    draft = Draft()
    cast = draft.cast(draft.call(aten.slice.Tensor, draft.gather(draft.shard), 1, 0, 3))
    assert rewritten(draft, draft.call(aten.view.default, cast, [18])) != ()
    assert gathered_dtypes(draft.graph) == [BF16]


def test_several_casts_to_one_dtype_become_one():
    draft = Draft()
    whole = draft.gather(draft.shard)
    turned = draft.call(aten.t.default, whole)
    ends = [draft.cast(whole), draft.cast(turned), draft.cast(turned)]
    assert rewritten(draft, *ends, draft.call(aten.neg.default, ends[2])) != ()
    assert gathered_dtypes(draft.graph) == [BF16]
    assert casts(draft.graph) == 1


def test_a_shard_with_other_readers():
    draft = Draft()
    norm = draft.call(aten.mul.Tensor, draft.shard, draft.shard)
    assert rewritten(draft, norm, draft.cast(draft.gather(draft.shard))) != ()
    assert gathered_dtypes(draft.graph) == [BF16]


def test_a_cast_behind_two_gathers_moves_before_both():
    draft = Draft()
    assert rewritten(
        draft, draft.cast(draft.gather(draft.call(aten.t.default, draft.gather(draft.shard)).args[0]))
    ) == ("2 casts moved before gathers, 144 bytes less gathered",)
    assert gathered_dtypes(draft.graph) == [BF16, BF16]
    assert casts(draft.graph) == 1


@pytest.mark.parametrize("reader", ["another operator", "another dtype", "the output", "a move without a cast"])
def test_another_reader_keeps_the_gather(reader: str):
    draft = Draft()
    whole = draft.gather(draft.shard)
    cast = draft.cast(whole)
    other = {
        "another operator": lambda: draft.call(aten.neg.default, whole),
        "another dtype": lambda: draft.cast(whole, FP16),
        "the output": lambda: whole,
        "a move without a cast": lambda: draft.call(aten.neg.default, draft.call(aten.t.default, whole)),
    }[reader]()
    before = [node.name for node in draft.graph.nodes]
    assert rewritten(draft, cast, other) == ()
    assert [node.name for node in draft.graph.nodes][:-1] == before
    assert gathered_dtypes(draft.graph) == [FP32]


@pytest.mark.parametrize(
    ("dtype", "target", "options"),
    [
        (BF16, FP32, {}),
        (FP32, torch.float64, {}),
        (BF16, FP16, {}),
        (FP32, torch.int16, {}),
        (FP32, BF16, {"memory_format": torch.contiguous_format}),
    ],
    ids=str,
)
def test_only_plain_casts_that_narrow_move(dtype: torch.dtype, target: torch.dtype, options: dict):
    draft = Draft(dtype)
    assert rewritten(draft, draft.cast(draft.gather(draft.shard), target, **options)) == ()
    assert gathered_dtypes(draft.graph) == [dtype]


def test_reductions_are_left_alone():
    draft = Draft()
    reduced = draft.call(collectives.WAIT, draft.call(collectives.ALL_REDUCE, draft.shard, "sum", "g"))
    assert rewritten(draft, draft.cast(reduced)) == ()
    assert gathered_dtypes(draft.graph) == [FP32]
