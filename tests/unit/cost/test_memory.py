"""Live bytes of graphs made by hand, each number worked out on paper. A row is 4 float32 values: 16 bytes."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.contracts import GraphInput, GraphOutput, PartitionedGraph, ShardedGraph
from lightning_autoparallel.cost.memory import predict_memory, predict_step_memory
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.torch_compat import collectives
from tests.unit.compile.joint import Joint

aten = torch.ops.aten
ROW = 16


def rows(count: int) -> Tensor:
    return torch.empty(count, 4)


class Hand:
    """A graph under construction; every call says how many rows it results in."""

    def __init__(self, **placeholders: int) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, Any] = {}
        for name, count in placeholders.items():
            self.nodes[name] = self.graph.placeholder(name)
            self.nodes[name].meta["val"] = rows(count)

    def __call__(self, name: str, target: Any, *args: Any, value: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, tuple(args), kwargs, name=name)
        node.meta["val"] = rows(value) if isinstance(value, int) else value
        self.nodes[name] = node
        return node

    def __getitem__(self, name: str) -> fx.Node:
        return self.nodes[name]

    def live(self, *outputs: str, **options: Any) -> dict[str, int]:
        """Rows alive at each node."""
        self.graph.output([self.nodes[name] for name in outputs])
        timeline = predict_memory(self.graph, **options)
        names = [node.name for node in self.graph.nodes]
        assert timeline.peak_bytes == max(timeline.live_bytes)
        assert timeline.peak_node == names[timeline.live_bytes.index(timeline.peak_bytes)]
        assert sum(one.size_bytes for one in timeline.contributors) == timeline.peak_bytes
        return {name: size / ROW for name, size in zip(names, timeline.live_bytes, strict=True)}


def test_values_live_from_their_call_through_their_last_use():
    hand = Hand(x=2, y=1)
    hand("a", aten.exp.default, hand["x"], value=2)
    hand("b", aten.exp.default, hand["a"], value=2)
    hand("c", aten.cat.default, [hand["b"], hand["y"]], value=3)
    assert hand.live("c") == {"x": 3, "y": 3, "a": 5, "b": 5, "c": 6, "output": 3}


def test_excluded_and_held_placeholders():
    hand = Hand(w=8, x=2)
    hand("half", aten.view.default, hand["w"], [4, 8], value=torch.empty(4, 8))
    hand("a", aten.mul.Tensor, hand["half"], hand["x"], value=2)
    hand("b", aten.exp.default, hand["a"], value=2)
    # A view of what is not counted is not counted; x is still the caller's when it has been read.
    assert hand.live("b", excluded={"w"}, held={"x"}) == {"w": 2, "x": 2, "half": 2, "a": 4, "b": 6, "output": 4}


def test_a_view_keeps_its_base_alive():
    hand = Hand(x=1)
    hand("base", aten.repeat.default, hand["x"], [6, 1], value=6)
    hand("part", aten.slice.Tensor, hand["base"], 0, 0, 1, value=1)
    hand("flat", aten._unsafe_view.default, hand["part"], [4], value=torch.empty(4))
    hand("other", aten.exp.default, hand["x"], value=1)
    hand("last", aten.add.Tensor, hand["flat"], hand["other"], value=1)
    expected = {"x": 1, "base": 7, "part": 7, "flat": 7, "other": 8, "last": 8, "output": 1}
    assert hand.live("last") == expected


def test_equal_fake_results_are_different_memory():
    """Lowering evaluates equal calls once: their nodes share one fake tensor, but not memory."""
    shared, hand = rows(2), Hand(x=2)
    hand("a", aten.exp.default, hand["x"], value=shared)
    hand("b", aten.exp.default, hand["x"], value=shared)
    hand("c", aten.add.Tensor, hand["a"], hand["b"], value=shared)
    assert hand.live("c") == {"x": 2, "a": 4, "b": 6, "c": 6, "output": 2}


def test_a_gather_holds_its_input_until_the_wait_and_the_wait_is_its_output():
    hand = Hand(w=2, x=1)
    hand("cast", aten.clone.default, hand["w"], value=2)
    hand("gathered", collectives.ALL_GATHER, hand["cast"], 2, "g", value=4)
    hand("work", aten.exp.default, hand["x"], value=1)
    hand("waited", collectives.WAIT, hand["gathered"], value=4)
    hand("done", aten.mul.Tensor, hand["waited"], hand["work"], value=4)
    expected = {"w": 1, "x": 1, "cast": 3, "gathered": 7, "work": 8, "waited": 7, "done": 9, "output": 4}
    assert hand.live("done", excluded={"w"}) == expected


def test_an_all_reduce_works_on_a_copy():
    hand = Hand(x=2)
    hand("a", aten.exp.default, hand["x"], value=2)
    hand("reduced", collectives.ALL_REDUCE, hand["a"], "sum", "g", value=2)
    hand("work", aten.zeros.default, [1, 4], value=1)
    hand("waited", collectives.WAIT, hand["reduced"], value=2)
    assert hand.live("waited", "work") == {"x": 2, "a": 4, "reduced": 4, "work": 3, "waited": 3, "output": 3}


def test_a_collective_nobody_waits_for_never_ends():
    hand = Hand(x=2)
    hand("a", aten.exp.default, hand["x"], value=2)
    hand("scattered", collectives.REDUCE_SCATTER, hand["a"], "sum", 2, "g", value=1)
    hand("b", aten.ones.default, [4], value=1)
    assert hand.live("scattered", "b") == {"x": 2, "a": 4, "scattered": 3, "b": 4, "output": 4}


def test_each_result_of_an_operator_is_memory_of_its_own():
    hand = Hand(x=2)
    hand("norm", aten.native_layer_norm.default, hand["x"], [4], None, None, 1e-5, value=[rows(2), rows(1), rows(1)])
    hand("out", operator.getitem, hand["norm"], 0, value=2)
    hand("mean", operator.getitem, hand["norm"], 1, value=1)
    hand("work", aten.exp.default, hand["out"], value=2)
    # The third result goes with the tuple, after the last getitem.
    expected = {"x": 2, "norm": 6, "out": 4, "mean": 4, "work": 5, "output": 3}
    assert hand.live("work", "mean") == expected


def test_split_parts_are_views_of_one_storage():
    hand = Hand(x=1)
    hand("base", aten.repeat.default, hand["x"], [4, 1], value=4)
    hand("parts", aten.split.Tensor, hand["base"], 2, value=[rows(2), rows(2)])
    hand("first", operator.getitem, hand["parts"], 0, value=2)
    hand("done", aten.exp.default, hand["first"], value=2)
    assert hand.live("done") == {"x": 1, "base": 5, "parts": 4, "first": 4, "done": 6, "output": 2}


def test_results_written_in_place_are_their_argument():
    hand = Hand(x=2)
    hand("buffer", aten.empty.memory_format, [4, 4], value=4)
    hand("written", aten.copy_.default, hand["buffer"], hand["x"], value=4)
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    hand("gathered", gather, hand["x"], 2, "g", out=hand["written"], value=4)
    hand("waited", collectives.WAIT, hand["gathered"], value=4)
    assert set(list(hand.live("waited", held={"x"}).values())[1:-1]) == {6}


@pytest.mark.parametrize(("strides", "bytes_at_peak"), [((4, 1), 64), ((1, 4), 128)], ids=["view", "copy"])
def test_a_reshape_is_a_view_only_where_the_layout_allows(strides: tuple[int, int], bytes_at_peak: int):
    hand = Hand(x=4)
    hand["x"].meta["val"] = torch.empty_strided((4, 4), strides)
    hand("flat", aten.reshape.default, hand["x"], [16], value=torch.empty(16))
    hand.graph.output([hand["flat"]])
    assert predict_memory(hand.graph).peak_bytes == bytes_at_peak


def test_sizes_are_those_of_whole_storages_rounded_up():
    hand = Hand(x=1)
    hand["x"].meta["val"] = rows(10)[:2]
    hand.graph.output([hand["x"]])
    assert predict_memory(hand.graph).peak_bytes == 160
    assert predict_memory(hand.graph, allocation_bytes=512).peak_bytes == 512


def test_contributors_largest_first_with_kinds_and_modules():
    hand = Hand(x=2)
    node = hand("a", aten.repeat.default, hand["x"], [2, 1], value=4)
    node.meta["custom"] = {"module": "layers.0"}
    hand("r", collectives.ALL_REDUCE, hand["a"], "sum", "g", value=4)
    hand("out", aten.cat.default, [hand["a"], hand["x"], hand["r"]], value=10)
    hand.graph.output([hand["out"]])
    timeline = predict_memory(hand.graph)
    found = [(one.name, one.size_bytes // ROW, one.kind, one.module) for one in timeline.contributors]
    assert found == [
        ("out", 10, "output", ""),
        ("a", 4, "value", "layers.0"),
        ("r", 4, "collective", ""),
        ("x", 2, "input", ""),
    ]


def test_a_node_of_unknown_size_is_refused():
    graph = fx.Graph()
    graph.output([graph.call_function(aten.exp.default, (graph.placeholder("x"),))])
    with pytest.raises(UnsupportedOpError, match=r"x \(x\) has no recorded value"):
        predict_memory(graph)


def test_a_saved_value_is_freed_after_its_last_use():
    """sin(exp(x @ w')) with w' gathered from w: the exponential is saved, read twice, and freed in the backward."""
    joint = Joint()
    weight = joint.gathered()
    hidden = joint(aten.mm.default, joint["x"], weight)
    hot = joint(aten.exp.default, hidden)
    result = joint(aten.sin.default, hot)
    slope = joint(aten.cos.default, hot)
    scaled = joint(aten.mul.Tensor, joint["t"], slope)
    inner = joint(aten.mul.Tensor, scaled, hot)
    turned = joint(aten.t.default, joint["x"])
    whole = joint(aten.mm.default, turned, inner)
    gradient = joint(aten.slice.Tensor, whole, 0, 0, 2)
    memory = predict_step_memory(joint.split(result, gradient))
    # x is 64 and the caller's; w' lives until mm has made the hidden value; two of hidden, exp and sin at a time. The
    # last step's gradient, with the storage that it is a slice of, is 64.
    forward = {"w": 128, "x": 128, "gather": 192, "wait": 192, "mm": 256, "exp": 256, "sin": 256, "output": 256}
    assert list(memory.forward.live_bytes) == list(forward.values())
    assert memory.backward is not None
    # Throughout: x, the result and the tangent, 192; hot until `inner`; cos until `scaled`; the slice keeps `whole`.
    names = ["x", "hot", "t", "cos", "scaled", "inner", "turned", "whole", "gradient", "output"]
    sizes = [256, 256, 256, 320, 384, 384, 256, 320, 256, 256]
    assert dict(zip(names, memory.backward.live_bytes, strict=True)) == dict(zip(names, sizes, strict=True))
    kinds = {one.name: one.kind for one in memory.backward.contributors}
    made = {"exp_default": "saved", "sin_default": "output", "cos_default": "value", "mul_tensor": "value"}
    assert kinds == {"x": "batch", "t": "tangent", **made}
    assert memory.peak_bytes == 384


def test_what_forward_and_backward_share_is_counted_once():
    """A saved slice holds all of the returned value; the saved parameter is not counted."""
    inputs = (
        GraphInput(kind="parameter", name="w"),
        GraphInput(kind="tangent", name="0"),
        GraphInput(kind="batch", name="x"),
    )
    outputs = (GraphOutput(kind="output", name="0"), GraphOutput(kind="gradient", name="w"))
    forward, backward = Hand(w=8, x=2), Hand(w=8, part=1, t=4)
    forward("out", aten.repeat.default, forward["x"], [2, 1], value=4)
    forward("part", aten.slice.Tensor, forward["out"], 0, 0, 1, value=1)
    forward.graph.output([forward["out"], forward["part"]])
    backward("grad", aten.mul.Tensor, backward["w"], backward["part"], value=8)
    backward.graph.output([backward["grad"]])
    forward_module, backward_module = (fx.GraphModule(torch.nn.Module(), h.graph) for h in (forward, backward))
    sharded = ShardedGraph(
        name="step",
        graph_module=forward_module,
        inputs=inputs,
        outputs=outputs,
        output_placements=(None, None),
        axes=(),
        has_backward=True,
    )
    partitioned = PartitionedGraph(
        sharded=sharded, forward=forward_module, backward=backward_module, saved_inputs=(0,), saved_values=1
    )
    memory = predict_step_memory(partitioned, allocation_bytes=32)
    # the last step's gradient 8, x 2, out 4
    assert [size // ROW for size in memory.forward.live_bytes] == [10, 10, 14, 14, 14]
    assert memory.backward is not None
    assert [size // ROW for size in memory.backward.live_bytes] == [10, 10, 10, 18, 18]  # x 2, out 4, t 4, grad 8
    freed = predict_step_memory(replace(partitioned, earlier_gradients="freed"), allocation_bytes=32)
    assert [size // ROW for size in freed.forward.live_bytes] == [2, 2, 6, 6, 6]
    assert freed.backward == memory.backward
    assert [(one.name, one.kind) for one in memory.backward.contributors] == [
        ("grad", "gradient"),
        ("part", "saved"),
        ("t", "tangent"),
        ("x", "batch"),
    ]
