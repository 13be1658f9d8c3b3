"""Over gloo a reduce-scatter becomes an all-to-all and a sum, where that is faster: the same values on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from lightning_autoparallel.cost import CostModel, GroupShape
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.exchange_reduce_scatters import exchange_reduce_scatters
from lightning_autoparallel.torch_compat import collectives
from tests.support.lockstep import one_group, run_lockstep
from tests.unit.cost._graphs import ROUND, Builder, aten

RANKS = 4
SHAPE, LARGE = (8, 3), (2**18, 3)


def _costs(shape: GroupShape | None = None) -> CostModel:
    return CostModel(hardware=ROUND, groups={"g": shape or GroupShape(ranks=RANKS)})


def _graph(
    reduce_op: str = "sum",
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    shape: tuple[int, int] = SHAPE,
    seen: bool = False,
) -> fx.Graph:
    """A value that is doubled, and scattered; where it is ``seen``, a view of the part is waited for."""
    build = Builder()
    x = build.input(*(shape[::-1] if transposed else shape), dtype=dtype)
    doubled = build.call(aten.add.Tensor, x, x)
    if transposed:
        doubled = build.call(aten.t.default, doubled)
    part = doubled.meta["val"].new_empty(shape[0] // RANKS, *shape[1:])
    scattered = build.valued(part, collectives.REDUCE_SCATTER, doubled, reduce_op, RANKS, "g")
    scattered.meta["collective_role"] = fxn.TERMINAL_REDUCTION
    result = build.call(aten.view.default, scattered, list(part.shape)) if seen else scattered
    waited = build.valued(part, collectives.WAIT, result)
    return build.output(build.call(aten.mul.Tensor, waited, 1))


def _kinds(graph: fx.Graph) -> list[str | None]:
    return [fxn.collective_kind(node) for node in fxn.collectives_of(graph)]


def _drawn(dtype: torch.dtype, transposed: bool) -> list[list[Tensor]]:
    shape = SHAPE[::-1] if transposed else SHAPE
    return [[torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)] for rank in range(RANKS)]


@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_every_rank_has_the_sum_of_its_part(reduce_op: str, dtype: torch.dtype, transposed: bool):
    graph = _graph(reduce_op, dtype, transposed)
    (before,) = fxn.collectives_of(graph)
    size_bytes = fxn.collective_size_bytes(before)
    notes = exchange_reduce_scatters(graph, backend="gloo", costs=_costs())
    graph.lint()
    (launched,) = fxn.collectives_of(graph)
    assert fxn.collective_kind(launched) == "all_to_all"
    assert fxn.collective_role(launched) == fxn.TERMINAL_REDUCTION
    assert fxn.collective_size_bytes(launched) == size_bytes
    assert notes == ("1 reduce_scatter exchanged, and added up on each rank",)
    inputs = _drawn(dtype, transposed)
    outputs = run_lockstep([graph] * RANKS, inputs, one_group("g", RANKS))
    # In float64, rounded once: that is what adding in float32 gives of few numbers.
    whole = torch.stack([2 * (x.t() if transposed else x).double() for (x,) in inputs])
    expected = (whole.sum(0) if reduce_op == "sum" else whole.mean(0)).to(dtype).chunk(RANKS)
    (result,) = graph.find_nodes(op="output")[0].args[0]
    for (output,), part in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, part, rtol=1e-6 if dtype is torch.float32 else 0, atol=0)
        assert (output.shape, output.dtype) == (result.meta["val"].shape, result.meta["val"].dtype)


@pytest.mark.parametrize("backend", ["nccl", "fake", None])
def test_other_backends_have_a_reduce_scatter(backend: str | None):
    graph = _graph()
    assert exchange_reduce_scatters(graph, backend=backend, costs=_costs()) == ()
    assert _kinds(graph) == ["reduce_scatter"]


@pytest.mark.parametrize(
    ("graph", "costs", "note"),
    [
        (_graph("max"), _costs(), "left to gloo: max of torch.float32"),
        (_graph(dtype=torch.int64), _costs(), "left to gloo: sum of torch.int64"),
        (_graph(seen=True), _costs(), "left to gloo: what is waited for is a view of it"),
        (_graph(), CostModel(hardware=ROUND, groups={}), "left to gloo: the cost of its group is not known"),
    ],
    ids=["max", "integers", "view", "unknown group"],
)
def test_what_cannot_be_judged_or_added_is_left(graph: fx.Graph, costs: CostModel, note: str):
    assert exchange_reduce_scatters(graph, backend="gloo", costs=costs) == (f"1 reduce_scatter {note}",)
    assert _kinds(graph) == ["reduce_scatter"]


@pytest.mark.parametrize(("shape", "kind"), [(SHAPE, "all_to_all"), (LARGE, "reduce_scatter")])
def test_between_full_nodes_only_what_is_small_is_exchanged(shape: tuple[int, int], kind: str):
    """Each of 16 ranks sends half of the tensor over its own link to the other node; a ring uses all of them for it."""
    graph = _graph(shape=shape)
    (note,) = exchange_reduce_scatters(graph, backend="gloo", costs=_costs(GroupShape(ranks=16, nodes=2)))
    assert _kinds(graph) == [kind]
    assert ("is no faster than" in note) == (kind == "reduce_scatter")
