"""Collectives of one block become one: the ranks' values, the limits, the order, and no cycle whatever is merged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.bucket_collectives import bucket_collectives
from lightning_autoparallel.passes.prefetch_gathers import prefetch_gathers
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.lockstep import run_lockstep

aten = torch.ops.aten
GROUPS = {"g": [[0, 1], [2, 3]], "h": [[0, 2], [1, 3]]}
RANKS = 4


class Draft:
    """A tagged graph of fake tensors, which can be built anew and run on four ranks in lockstep."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.sizes: list[tuple[list[int], torch.dtype]] = []
        self.results: list[fx.Node] = []
        self.module = "layers.0.linear"

    def input(self, shape: list[int], dtype: torch.dtype = torch.float32) -> fx.Node:
        first_call = next((node for node in self.graph.nodes if node.op == "call_function"), None)
        with nullcontext() if first_call is None else self.graph.inserting_before(first_call):
            node = self.graph.placeholder(f"x{len(self.sizes)}")
        self.sizes.append((shape, dtype))
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, role: str | None = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["custom"] = {"module": self.module}
        if role is not None:
            node.meta["collective_role"] = role
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]), **kwargs)
        return node

    def cast(self, value: fx.Node) -> fx.Node:
        return self.call(aten._to_copy.default, value, dtype=torch.float32)

    def _waited(self, role: str, target: Any, *args: Any) -> fx.Node:
        return self.call(collectives.WAIT, self.call(target, *args, role=role))

    def gather(self, value: fx.Node, group: str = "g") -> fx.Node:
        return self._waited(fxn.PARAMETER_GATHER, collectives.ALL_GATHER, value, 2, group)

    def scatter(self, value: fx.Node, group: str = "g") -> fx.Node:
        return self._waited(fxn.TERMINAL_REDUCTION, collectives.REDUCE_SCATTER, value, "sum", 2, group)

    def reduce(self, value: fx.Node, group: str = "g", op: str = "sum") -> fx.Node:
        return self._waited(fxn.TERMINAL_REDUCTION, collectives.ALL_REDUCE, value, op, group)

    def use(self, *values: fx.Node) -> None:
        """What a block does with its weights: a result that depends on all of them, in full precision."""
        total = self.call(aten.sum.default, self.call(aten.to.dtype, values[0], torch.float64))
        for value in values[1:]:
            total = self.call(aten.add.Tensor, total, self.call(aten.amax.default, value))
        self.results.append(total)

    def random_inputs(self) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [
            [torch.randn(shape, generator=generator).mul(8).to(dtype) for shape, dtype in self.sizes]
            for _ in range(RANKS)
        ]

    def check(self, max_bytes: int = 10**9) -> list[fx.Node]:
        """Bucket the graph, compare all ranks' results with those of before bit by bit, and return what is launched."""
        self.graph.output(self.results)
        inputs = self.random_inputs()
        before = run_lockstep([self.graph] * RANKS, inputs, GROUPS)
        bucket_collectives(self.graph, limit=lambda kind, group: max_bytes)
        self.graph.lint()
        after = run_lockstep([self.graph] * RANKS, inputs, GROUPS)
        for ours, expected in zip(after, before, strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        for node in self.graph.nodes:
            assert node.op != "call_function" or "val" in node.meta, node
        return list(fxn.collectives_of(self.graph))


def kinds(nodes: list[fx.Node]) -> list[str | None]:
    return [fxn.collective_kind(node) for node in nodes]


# -- what comes out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float32] * 3,
        [torch.bfloat16, torch.float32, torch.bfloat16],
        [torch.uint8, torch.float64, torch.bfloat16],
    ],
    ids=["alike", "two dtypes", "three dtypes"],
)
def test_gathers_become_one_and_every_member_gets_its_own(dtypes: list[torch.dtype]):
    draft = Draft()
    shards = [draft.input(shape, dtype) for shape, dtype in zip(([3, 5], [4], [2, 3, 2]), dtypes, strict=True)]
    for shard in shards:
        weight = draft.gather(draft.call(aten.mul.Tensor, shard, 2))
        draft.results.append(weight)
        draft.use(weight, draft.call(aten.view.default, weight, [weight.meta["val"].numel()]))
    (launched,) = draft.check()
    assert fxn.collective_kind(launched) == "all_gather"
    assert fxn.collective_role(launched) == fxn.PARAMETER_GATHER


def test_gathers_over_two_axes_merge_axis_by_axis():
    draft = Draft()
    for size in (3, 5):
        draft.use(draft.gather(draft.call(aten.neg.default, draft.gather(draft.input([size, 2]), "h")), "g"))
    assert [fxn.group_of(node) for node in draft.check()] == ["h", "g"]


def test_reductions_become_one_and_what_follows_them_too():
    """Gradients that are scattered over one axis and then summed over another, as HSDP does."""
    draft = Draft()
    for size in (3, 5, 1):
        gradient = draft.call(aten.mul.Tensor, draft.input([2 * size, 3]), 3)
        draft.results.append(draft.call(aten.neg.default, draft.reduce(draft.scatter(gradient), "h")))
    assert kinds(draft.check()) == ["reduce_scatter", "all_reduce"]


@pytest.mark.parametrize("has_wide", [True, False])
@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
def test_gradients_are_cast_as_they_are_laid_side_by_side(kind: str, has_wide: bool):
    """No copy of them waits for the others; the values that are reduced are the same."""
    draft = Draft()
    reduce = draft.scatter if kind == "reduce_scatter" else draft.reduce
    narrow = [draft.input([2 * size, 3], torch.bfloat16) for size in (3, 1, 5)]
    gradients = [draft.cast(draft.call(aten.neg.default, x)) for x in narrow]
    gradients[2] = draft.call(aten.view.default, gradients[2], [2, 15])
    gradients += [draft.input([4])] * has_wide
    draft.results += [reduce(gradient) for gradient in gradients]
    (launched,) = draft.check()
    assert fxn.collective_kind(launched) == kind
    assert launched.args[0].meta["val"].dtype == torch.float32
    casts = [node for node in draft.graph.nodes if node.target is aten._to_copy.default]
    assert [cast.meta["val"].numel() for cast in casts] == ([] if has_wide else [6])


def test_a_cast_that_others_read_stays_for_them():
    draft = Draft()
    cast = draft.cast(draft.input([4], torch.bfloat16))
    draft.results += [draft.reduce(cast), draft.reduce(draft.input([2])), draft.call(aten.neg.default, cast)]
    draft.check()
    assert cast in draft.graph.nodes
    assert len(cast.users) == 1


def test_what_loses_digits_is_cast_before_it_is_reduced():
    draft = Draft()
    for dtype in (torch.float64, torch.int32):
        draft.results.append(draft.reduce(draft.cast(draft.input([3], dtype))))
    draft.check()
    assert sum(node.target is aten._to_copy.default for node in draft.graph.nodes) == 2


def test_all_reduces_of_scalars_and_matrices_become_one():
    draft = Draft()
    draft.results += [draft.reduce(draft.input(shape)) for shape in ([], [2, 3], [7])]
    assert kinds(draft.check()) == ["all_reduce"]


def test_what_is_reduced_otherwise_is_not_merged():
    draft = Draft()
    x, y = draft.input([4]), draft.input([4], torch.float64)
    draft.results += [draft.reduce(x), draft.reduce(x, op="max"), draft.reduce(y), draft.reduce(x, "h")]
    assert len(draft.check()) == 4


def test_what_is_not_tagged_is_left_alone():
    draft = Draft()
    for _ in range(2):
        gathered = draft.call(collectives.ALL_GATHER, draft.input([4]), 2, "g")
        draft.results.append(draft.call(collectives.WAIT, gathered))
    assert len(draft.check()) == 2


def gather_seen_before_its_wait(draft: Draft) -> fx.Node:
    started = draft.call(collectives.ALL_GATHER, draft.input([4]), 2, "g", role=fxn.PARAMETER_GATHER)
    return draft.call(collectives.WAIT, draft.call(aten.view.default, started, [8]))


def gather_of_what_was_reduced(draft: Draft) -> fx.Node:
    return draft.gather(draft.call(aten.neg.default, draft.scatter(draft.input([8]))))


def reduction_that_is_added_to_something(draft: Draft) -> fx.Node:
    return draft.call(aten.add.Tensor, draft.scatter(draft.input([8])), draft.input([4]))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (gather_seen_before_its_wait, ["all_gather"] * 3),
        (gather_of_what_was_reduced, ["all_gather"] * 3 + ["reduce_scatter"] * 2),
        (reduction_that_is_added_to_something, ["reduce_scatter"] * 3),
    ],
)
def test_a_tag_that_the_graph_does_not_bear_out_merges_nothing(make: Callable[[Draft], fx.Node], expected: list[str]):
    draft = Draft()
    draft.results += [make(draft), make(draft)]
    draft.results.append(
        draft.gather(draft.input([4])) if "all_gather" in expected else draft.scatter(draft.input([8]))
    )
    assert Counter(kinds(draft.check())) == Counter(expected)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_no_bucket_is_larger_than_the_limit():
    draft = Draft()
    sizes = [100, 100, 100, 500, 100, 100]  # floats that are gathered, so four times as many bytes
    for size in sizes:
        draft.use(draft.gather(draft.input([size // 2])))
    launched = draft.check(max_bytes=4 * 250)
    assert [fxn.collective_size_bytes(node) for node in launched] == [800, 800, 2000, 400]


def test_blocks_are_not_merged_but_a_small_neighbour_is_taken_along():
    draft = Draft()
    sizes = {"embedding": 900, "layers.0.a": 100, "layers.0.b": 100, "layers.1.a": 5, "layers.1.b": 195, "norm": 5}
    for module, size in sizes.items():
        draft.module = f"model.{module}"
        draft.use(draft.gather(draft.input([size])))
    launched = draft.check(max_bytes=8 * 500)
    assert [fxn.collective_size_bytes(node) // 8 for node in launched] == [900, 200, 205]
    assert [fxn.module_path(node) for node in launched] == ["model.embedding", "model.layers.0", "model"]


def test_blocks_that_are_small_together_share_a_launch():
    draft = Draft()
    for layer in range(6):
        draft.module = f"layers.{layer}"
        draft.use(draft.gather(draft.input([10])))
    launched = draft.check(max_bytes=8 * 16 * 20)
    assert [fxn.collective_size_bytes(node) // 8 for node in launched] == [30, 30]


def test_a_block_that_comes_again_is_far_from_itself():
    draft = Draft()
    for layer in (0, 1, 0):
        draft.module = f"layers.{layer}"
        draft.use(draft.gather(draft.input([100])), draft.gather(draft.input([100])))
    assert len(draft.check(max_bytes=8 * 500)) == 3


def test_a_block_is_launched_before_the_next_one_is_waited_for():
    """Nothing of a later block moves ahead of what an earlier one computes, but its gather once it is prefetched."""
    draft = Draft()
    for layer in range(3):
        draft.module = f"layers.{layer}.linear"
        weights = [draft.gather(draft.input([4, 4])) for _ in range(2)]
        draft.use(*weights)
    launched = draft.check(max_bytes=400)
    order = list(draft.graph.nodes)
    ends = [order.index(result) for result in draft.results]
    starts = [order.index(node) for node in launched]
    assert starts[0] < ends[0] < starts[1] < ends[1] < starts[2] < ends[2]
    assert prefetch_gathers(draft.graph) == ("2 gathers started 1 ahead",)
    order = list(draft.graph.nodes)
    waits = [min(map(order.index, fxn.waits_of(node))) for node in launched]
    assert all(order.index(later) < wait for later, wait in zip(launched[1:], waits, strict=False))
    assert order.index(launched[2]) > order.index(draft.results[0])


def test_a_reduction_waits_for_its_last_member_and_drags_nothing_forward():
    draft = Draft()
    x = draft.input([4, 4])
    gradients = [draft.call(aten.mul.Tensor, x, i) for i in range(3)]
    draft.results += [draft.reduce(gradient) for gradient in gradients]
    before = [node.name for node in draft.graph.nodes if node.target is aten.mul.Tensor]
    (launched,) = draft.check()
    assert [node.name for node in draft.graph.nodes if node.target is aten.mul.Tensor] == before
    assert gradients[-1] < launched


# -- no cycles ---------------------------------------------------------------------------------------------------------


def test_a_collective_is_never_merged_with_what_depends_on_it():
    draft = Draft()
    first = draft.gather(draft.input([4]))
    draft.use(draft.gather(draft.call(aten.neg.default, first)))
    again = draft.reduce(draft.input([4]))
    draft.results += [draft.reduce(again)]
    assert len(draft.check()) == 4


def test_buckets_that_would_wait_for_each_other_are_not_both_made():
    """a1 -> b1 and b2 -> a2: {a1, a2} and {b1, b2} are each fine, and together a cycle."""
    draft = Draft()
    draft.use(draft.gather(draft.gather(draft.input([4]), "g"), "h"))
    draft.use(draft.gather(draft.gather(draft.input([4]), "h"), "g"))
    assert len(draft.check()) == 3


@pytest.mark.parametrize("seed", range(20))
def test_random_chains_stay_acyclic_and_keep_their_values(seed: int):
    rng = random.Random(seed)
    draft = Draft()
    launched = 0
    for _ in range(12):
        draft.module = rng.choice(["layers.0", "layers.1", "head"])
        value = draft.input([rng.choice([4, 8, 12]), 2], rng.choice([torch.float32, torch.bfloat16]))
        step = rng.choice([draft.gather, draft.reduce])
        for _ in range(rng.randint(1, 3)):
            value = step(draft.call(aten.neg.default, value), rng.choice("gh"))
            launched += 1
        draft.results.append(value)
    assert len(draft.check(max_bytes=rng.choice([200, 1000, 10**6]))) < launched
