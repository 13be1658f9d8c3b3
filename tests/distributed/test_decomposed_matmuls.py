"""Decomposed gathers and scatters on real ranks: what is launched, and what comes out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from lightning_autoparallel.compile import specialize
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.torch_compat.collectives import group_place, launched_collectives
from lightning_autoparallel.torch_compat.inductor import compile_graph
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.rings import GATHERS, SCATTERS, decompose, launches, rank_inputs, ring_graph
from tests.support.worlds import Worlds
from tests.unit.passes.test_decompose import contracting_errors

PATTERNS = [("gather", name) for name in GATHERS] + [("scatter", name) for name in SCATTERS]
ORDERS = ("swizzle", "cyclic", "broadcast")
SIZES = ((2, 4), (3, 5), (16, 24))
Case = tuple[str, str, str, int, int, torch.dtype]  # kind, pattern, order, rows, width, dtype
MESHES = {2: {"tp": 2}, 3: {"tp": 3}, 4: {"tp": 4}, "2x2": {"dp_shard": 2, "tp": 2}}


def _short() -> list[Case]:
    """Every pattern in every order, each size with each order, once."""
    pairs = [(*pattern, order) for pattern, order in itertools.product(PATTERNS, ORDERS)]
    return [(*pair, *SIZES[i % len(SIZES)], torch.float32) for i, pair in enumerate(pairs)]


def _all() -> list[Case]:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    pairs = itertools.product(PATTERNS, ORDERS, SIZES, dtypes)
    return [(*pattern, order, *size, dtype) for pattern, order, size, dtype in pairs]


def run_cases(axes: dict[str, int], cases: list[Case]) -> list[dict[str, Any]]:
    """What each case launched, how far integers and normal numbers are from the whole collective's results."""
    mesh = build_mesh(MeshSpec.from_mapping(axes), "cpu")
    axis = mesh.plan_axis(("tp",))
    assert axis is not None
    found = [_run_case(case, axis.group_name) for case in cases]
    dist.barrier()
    return found


def _run_case(case: Case, group: str) -> dict[str, Any]:
    kind, pattern, order, rows, width, dtype = case
    rank, ranks = group_place(group)
    graph, given = ring_graph(kind, pattern, ranks, rows=rows, width=width, dtype=dtype, group=group)
    # Ranks of another group of the mesh hold other numbers.
    seed = dist.get_rank() // ranks
    inputs = [rank_inputs(given, ranks, dtype, integers=exact, seed=seed)[rank] for exact in (True, False)]
    whole = [_run(graph, values) for values in inputs]
    decompose(graph, kind, order)
    text, planned = str(graph), launches(graph)
    specialize(graph, group_place)
    before = launched_collectives(group)
    parts = [_run(graph, values) for values in inputs]
    launched = (launched_collectives(group) - before) // 2
    (exact, exact_parts), (normal, normal_parts) = zip(whole, parts, strict=True)
    return {
        "text": text,
        "launched": launched,
        "planned": planned,
        "exact": all(torch.equal(one, other) for one, other in zip(exact, exact_parts, strict=True)),
        "error": max(map(_difference, normal, normal_parts)),
        "results": normal_parts,
    }


def _run(graph: fx.Graph, inputs: list[Tensor]) -> list[Tensor]:
    return list(fx.GraphModule(nn.Module(), graph)(*inputs))


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((one.double() - other.double()).abs().max() / one.double().abs().max())


def _check(case: Case, by_rank: list[dict[str, Any]], ranks: int) -> None:
    kind, pattern, order, *_, dtype = case
    expected = ranks if (kind, order) == ("gather", "broadcast") else ranks - 1
    name = "broadcast" if (kind, order) == ("gather", "broadcast") else "permute"
    for mine in by_rank:
        assert mine["launched"] == expected and mine["planned"] == {name: expected}, (case, mine)
        # A third is not exact.
        assert mine["exact"] or pattern == "average", case
        assert mine["error"] <= {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 2e-2}[dtype], (case, mine)
    if pattern.startswith("contracting"):
        for group in range(len(by_rank) // ranks):
            members = by_rank[group * ranks : (group + 1) * ranks]
            for mine in members:
                pairs = zip(members[0]["results"], mine["results"], strict=True)
                assert all(torch.equal(one, other) for one, other in pairs), case
    assert len({mine["text"] for mine in by_rank[:ranks]}) == 1, case


@pytest.mark.parametrize("world", [2, 4, "2x2"])
def test_transfers_are_counted_and_results_are_those_of_the_whole(worlds: Worlds, world: int | str):
    _check_cases(worlds, world, _short())


@pytest.mark.matrix
@pytest.mark.parametrize("world", MESHES)
def test_every_pattern_order_size_and_dtype(worlds: Worlds, world: int | str):
    _check_cases(worlds, world, _all())


def _check_cases(worlds: Worlds, world: int | str, cases: list[Case]) -> None:
    size = 4 if world == "2x2" else int(world)
    by_rank = worlds(size).run(run_cases, MESHES[world], cases)
    for index, case in enumerate(cases):
        _check(case, [results[index] for results in by_rank], MESHES[world]["tp"])


def narrow_errors(axes: dict[str, int]) -> list[float]:
    """Errors of a bfloat16 contraction: of one product, and decomposed."""
    axis = build_mesh(MeshSpec.from_mapping(axes), "cpu").plan_axis(("tp",))
    assert axis is not None
    rank, ranks = group_place(axis.group_name)

    def run(graph: fx.Graph, inputs: list[list[Tensor]]) -> list[Tensor]:
        own = copy.deepcopy(fx.GraphModule(nn.Module(), graph)).graph
        specialize(own, group_place)
        return _run(own, inputs[rank])

    return contracting_errors(run, ranks, axis.group_name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_narrow_contraction_is_as_exact_as_one_product(worlds: Worlds, ranks: int):
    for whole, parts in worlds(ranks).run(narrow_errors, {"tp": ranks}):
        assert 0 < parts <= 1.3 * whole


COMPILED = (("gather", "sequence"), ("scatter", "sequence"), ("scatter", "rows"))
# How the calls of the compiled code are written, and what they are here.
_WRITTEN = {"all_to_all_single": "transfer", "wait_tensor": "wait", "extern_kernels.mm": "product"}


def run_compiled(inference: bool) -> tuple[bool, list[str], int]:
    """Rings of a gather and of a scatter under Inductor: whether results are alike, the order of calls, launches."""
    axis = build_mesh(MeshSpec.from_mapping({"tp": 2}), "cpu").plan_axis(("tp",))
    assert axis is not None
    group, calls, same = axis.group_name, [], True
    before = launched_collectives(group)
    for kind, pattern in COMPILED:
        graph, given = ring_graph(kind, pattern, 2, rows=16, width=32, group=group)
        inputs = rank_inputs(given, 2, torch.float32, integers=True)[axis.rank]
        expected = _run(graph, inputs)
        decompose(graph, kind)
        specialize(graph, group_place)
        compiled, code = _compiled(graph, inference)
        lines = [line.strip().split("#")[0] for line in code.splitlines()]
        called = [line for line in lines if not line.startswith("assert_")]
        calls += [name for line in called for call, name in _WRITTEN.items() if call in line]
        same &= all(torch.equal(one, other) for one, other in zip(expected, compiled(list(inputs)), strict=True))
    # without those of the whole collectives
    return same, calls, launched_collectives(group) - before - len(COMPILED)


def _compiled(graph: fx.Graph, inference: bool) -> tuple[Callable[[list[Tensor]], list[Tensor]], str]:
    with FakeTensorMode():
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            node.meta["val"] = torch.empty(value.shape, dtype=value.dtype)
    module = fx.GraphModule(nn.Module(), graph)
    with inductor_config.patch(fx_graph_cache=False):
        lowered, (code,) = run_and_get_code(lambda: compile_graph(module, is_inference=inference, is_backward=False))
    return lowered.call, code


def test_inductor_keeps_transfers_beside_products(worlds: Worlds):
    """Compiled for inference too, where Inductor would bring all transfers to the front."""
    gather = ["transfer", *["product"] * 3, "wait", *["product"] * 3]
    scatter = ["product", "transfer", "product", "wait"]
    for inference in (False, True):
        for same, calls, launched in worlds(2).run(run_compiled, inference):
            assert same and launched == len(COMPILED)
            assert calls == gather + scatter + scatter
