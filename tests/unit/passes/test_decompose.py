"""Decomposed graphs: the right transfers between the right products, nothing gathered left, and what stays whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from lightning_autoparallel.cost import CostModel, GroupShape, Timeline
from lightning_autoparallel.cost.liveness import Surroundings
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes import split_passes
from lightning_autoparallel.passes.bucket_collectives import bucket_collectives
from lightning_autoparallel.passes.decompose import DecomposeOptions
from lightning_autoparallel.passes.decompose_gather_matmul import decompose_gather_matmul
from lightning_autoparallel.passes.decompose_matmul_scatter import decompose_matmul_scatter
from lightning_autoparallel.passes.scheduling.calls import is_heavy
from lightning_autoparallel.passes.sink_waits import sink_waits
from tests.support.lockstep import one_group, run_lockstep
from tests.support.rings import (
    BATCH,
    GATHERS,
    SCATTERS,
    RingBuilder,
    decompose,
    launches,
    rank_graph,
    rank_inputs,
    ring_graph,
)
from tests.unit.cost._graphs import ROUND, aten

ORDERS = [("swizzle", 1), ("cyclic", 1), ("broadcast", 1)]
PATTERNS = [("gather", name) for name in GATHERS] + [("scatter", name) for name in SCATTERS]
CASES = [(*pattern, *order) for pattern in PATTERNS for order in ORDERS]
CASES += [(kind, "sequence", order, 2) for kind in ("gather", "scatter") for order in ("swizzle", "broadcast")]


@pytest.mark.parametrize(("kind", "pattern", "order", "depth"), CASES)
def test_every_rank_computes_what_it_did(kind: str, pattern: str, order: str, depth: int):
    for ranks in (2, 3, 4):
        graph, given = ring_graph(kind, pattern, ranks)
        # Averages of three are not exact.
        dtype = torch.float64 if pattern == "average" else torch.float32
        inputs = rank_inputs(given, ranks, dtype, integers=True)
        expected = run_lockstep([graph] * ranks, inputs, one_group("ring", ranks))
        decompose(graph, kind, order, depth)
        graphs = [rank_graph(graph, rank, ranks) for rank in range(ranks)]
        found = run_lockstep(graphs, inputs, one_group("ring", ranks))
        tolerance = 1e-15 if pattern == "average" else 0
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
        by_broadcast = kind == "gather" and order == "broadcast"
        assert launches(graph) == ({"broadcast": ranks} if by_broadcast else {"permute": ranks - 1})


@pytest.mark.parametrize(("kind", "pattern", "order", "depth"), CASES)
def test_between_a_transfer_and_its_wait_something_is_multiplied(kind: str, pattern: str, order: str, depth: int):
    graph, _ = ring_graph(kind, pattern, 4)
    decompose(graph, kind, order, depth)
    for _ in range(2):
        nodes = list(graph.nodes)
        started = list(fxn.collectives_of(graph))
        beside = [_products_between(nodes, transfer) for transfer in started]
        # Nothing is there to be multiplied before the first broadcast has come.
        assert all(beside[depth:] if order == "broadcast" and kind == "gather" else beside), beside
        assert max(_in_flight(nodes)) == (1 if order == "cyclic" else depth)
        sink_waits(graph)


def _products_between(nodes: list[fx.Node], transfer: fx.Node) -> int:
    (wait,) = transfer.users
    return sum(is_heavy(node) for node in nodes[nodes.index(transfer) : nodes.index(wait)])


def _in_flight(nodes: list[fx.Node]) -> list[int]:
    counts = [0]
    for node in nodes:
        counts.append(counts[-1] + bool(fxn.collective_kind(node)) - fxn.is_wait(node))
    return counts


@pytest.mark.parametrize("pattern", GATHERS)
def test_nothing_as_large_as_the_gathered_value_is_left(pattern: str):
    # The products are narrow: only what is gathered, or comes into the graph, is so large.
    graph, _ = ring_graph("gather", pattern, 4, rows=8, width=64)
    (gather,) = fxn.collectives_of(graph)
    size = math.prod(gather.meta["val"].shape)
    decompose(graph, "gather")
    values = ((node, value) for node in graph.nodes for value in fxn.values(node) if value is not None)
    large = {node.name for node, value in values if value.numel() >= size}
    views = {node.name for node in graph.nodes if node.op == "placeholder" or fxn.is_view_of_all(node)}
    assert large <= views


@pytest.mark.parametrize(("kind", "pattern"), PATTERNS)
def test_no_rank_is_told_apart(kind: str, pattern: str):
    """The text has no number that belongs to a rank: it is made from the group's size alone."""
    texts = []
    for _ in range(2):
        graph, _ = ring_graph(kind, pattern, 4)
        decompose(graph, kind)
        texts.append(str(graph))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("pattern", [name for name in GATHERS if name.startswith("contracting")])
def test_what_is_replicated_stays_so_to_the_bit(pattern: str, ranks: int):
    for dtype in (torch.float32, torch.bfloat16):
        graph, given = ring_graph("gather", pattern, ranks, dtype=dtype)
        inputs = rank_inputs(given, ranks, dtype, integers=False)
        decompose(graph, "gather")
        graphs = [rank_graph(graph, rank, ranks) for rank in range(ranks)]
        results = run_lockstep(graphs, inputs, one_group("ring", ranks))
        for other in results[1:]:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


Run = Callable[[fx.Graph, list[list[torch.Tensor]]], list[torch.Tensor]]


def contracting_errors(run: Run, ranks: int, group: str = "ring") -> list[float]:
    """Root mean square errors of a bfloat16 contraction over ranks: of one product, and decomposed."""
    graph, given = ring_graph("gather", "contracting", ranks, rows=64, width=48, dtype=torch.bfloat16, group=group)
    inputs = rank_inputs(given, ranks, torch.bfloat16, integers=False)
    exact = torch.cat([mine[0] for mine in inputs]).double().t() @ inputs[0][1].double()
    whole = run(graph, inputs)[0]
    decompose(graph, "gather")
    parts = run(graph, inputs)[0]
    return [float((result.double() - exact).square().mean().sqrt()) for result in (whole, parts)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_narrow_contractions_are_added_in_float32(ranks: int):
    def run(graph: fx.Graph, inputs: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        graphs = [rank_graph(graph, rank, ranks) for rank in range(ranks)]
        return run_lockstep(graphs, inputs, one_group("ring", ranks))[0]

    whole, parts = contracting_errors(run, ranks)
    assert 0 < parts <= 1.3 * whole


# -- what stays whole --------------------------------------------------------------------------------------------------


def _returned(b: RingBuilder) -> list[fx.Node]:
    whole = b.gathered(b.take(b.rows, b.width))
    return [b.mm(whole, b.take(b.width, 5)), whole]


def _read_by_another(b: RingBuilder) -> list[fx.Node]:
    whole = b.gathered(b.take(b.rows, b.width))
    return [b.mm(whole, b.take(b.width, 5)), b.call(aten.relu.default, whole)]


def _uneven(b: RingBuilder) -> list[fx.Node]:
    """Shards padded to one size: the padding is cut off behind the gather."""
    whole = b.call(aten.slice.Tensor, b.gathered(b.take(b.rows, b.width)), 0, 0, b.rows * b.ranks - 1)
    return [b.mm(whole, b.take(b.width, 5))]


def _by_itself(b: RingBuilder) -> list[fx.Node]:
    whole = b.gathered(b.take(b.width // b.ranks, b.width))
    return [b.mm(whole, whole)]


def _by_what_it_gives(b: RingBuilder) -> list[fx.Node]:
    whole = b.gathered(b.take(b.rows, b.width))
    hidden = b.call(aten.relu.default, b.mm(whole, b.take(b.width, 5)))
    return [b.mm(b.call(aten.t.default, whole), hidden)]


def _mixed(b: RingBuilder) -> list[fx.Node]:
    """Rows of neighbouring ranks in one row."""
    whole = b.gathered(b.take(1, b.width))
    return [b.mm(b.call(aten.view.default, whole, [2, b.width * b.ranks // 2]), b.take(b.width * b.ranks // 2, 3))]


def _at_random(b: RingBuilder) -> list[fx.Node]:
    whole = b.gathered(b.take(b.rows, b.width))
    first = b.mm(whole, b.take(b.width, 5))
    noise = b.call(aten.bernoulli.p, b.take(b.width, 5), 0.5)
    return [first, b.mm(whole, noise)]


REFUSED_GATHERS = {
    "a value that is kept, or a result": _returned,
    "aten.relu.default needs it whole": _read_by_another,
    "aten.slice.Tensor needs it whole": _uneven,
    "reads it more than once": _by_itself,
    "which it is multiplied with, depends on it": _by_what_it_gives,
    "mixes the parts of ranks": _mixed,
    "drawn at random behind it": _at_random,
}


@pytest.mark.parametrize("reason", REFUSED_GATHERS)
def test_a_gather_that_somebody_needs_stays_whole(reason: str):
    build = RingBuilder(4, 2, 4, torch.float32, "ring")
    graph = build.output(*REFUSED_GATHERS[reason](build))
    before = str(graph)
    (note,) = decompose(graph, "gather")
    assert reason in note and note.startswith("1 all_gather of the step itself: whole: ")
    assert str(graph) == before


def _product_read_twice(b: RingBuilder) -> list[fx.Node]:
    product = b.mm(b.take(b.rows * b.ranks, b.width), b.take(b.width, 5))
    return [b.scattered(product), b.call(aten.relu.default, product)]


def _maximum(b: RingBuilder) -> list[fx.Node]:
    return [b.scattered(b.mm(b.take(b.rows * b.ranks, b.width), b.take(b.width, 5)), "max")]


def _sum_with_another(b: RingBuilder) -> list[fx.Node]:
    product = b.mm(b.take(b.rows * b.ranks, b.width), b.take(b.width, 5))
    return [b.scattered(b.call(aten.add.Tensor, product, b.take(b.rows * b.ranks, 5)))]


REFUSED_SCATTERS = {
    "is read by others too": _product_read_twice,
    "parts cannot be added to its max": _maximum,
    "is no product, nor a sum of products": _sum_with_another,
}


@pytest.mark.parametrize("reason", REFUSED_SCATTERS)
def test_a_scatter_of_something_else_stays_whole(reason: str):
    build = RingBuilder(4, 2, 4, torch.float32, "ring")
    graph = build.output(*REFUSED_SCATTERS[reason](build))
    (note,) = decompose(graph, "scatter")
    assert reason in note
    assert launches(graph) == {"reduce_scatter": 1}


_DEEPER_THAN_PYTHON = 1200  # calls in one another


def test_what_is_scattered_may_be_a_sum_as_deep_as_a_large_model():
    """A residual stream, which something else reads, or that no product leads to."""
    for is_of_products in (False, True):
        build = RingBuilder(2, 2, 4, torch.float32, "ring")
        rows, columns = build.rows * build.ranks, 5
        weight = build.take(build.width, columns)
        product = build.mm(build.take(rows, build.width), weight)
        addend = build.take(rows, columns)
        total = product if is_of_products else addend
        for _ in range(_DEEPER_THAN_PYTHON):
            more = build.call(aten.mul.Tensor, product if is_of_products else addend, 2.0)
            total = build.call(aten.add.Tensor, total, more)
        graph = build.output(build.scattered(total))
        notes = decompose(graph, "scatter")
        assert launches(graph) == {"reduce_scatter": 1}
        assert len(notes) == is_of_products


def test_a_deep_sum_of_products_is_decomposed():
    build = RingBuilder(2, 2, 4, torch.float32, "ring")
    left = build.take(build.rows * build.ranks, build.width)
    total = build.mm(left, build.take(build.width, 5))
    for _ in range(_DEEPER_THAN_PYTHON // 2):  # each was two calls in one another
        total = build.call(aten.add.Tensor, total, build.mm(left, build.take(build.width, 5)))
    graph = build.output(build.scattered(total))
    decompose(graph, "scatter")
    assert launches(graph) == {"permute": 1}


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_one_rank_needs_no_transfers(kind: str):
    graph, _ = ring_graph(kind, "rows", 1)
    before = str(graph)
    (note,) = decompose(graph, kind)
    assert "one rank" in note and str(graph) == before


@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_what_is_of_a_parameter_stays_whole_when_forced(kind: str):
    graph, _ = ring_graph(kind, "columns", 4)
    (collective,) = fxn.collectives_of(graph)
    role = {"gather": fxn.PARAMETER_GATHER, "scatter": fxn.TERMINAL_REDUCTION}[kind]
    collective.meta["collective_role"] = role
    before = str(graph)
    (note,) = decompose(graph, kind)
    assert "whole: a parameter's gather may start early" in note and str(graph) == before


def test_a_product_takes_part_in_one_ring_only():
    """Rows and columns are gathered: the products of the first one's parts need the second one whole."""
    build = RingBuilder(2, 2, 4, torch.float32, "ring")
    x, weight = build.gathered(build.take(2, 4)), build.gathered(build.take(2, 4))
    graph = build.output(build.mm(x, build.call(aten.t.default, weight)))
    notes = decompose(graph, "gather")
    assert sorted(launches(graph).items()) == [("all_gather", 1), ("permute", 1)]
    assert any("a part of a product that is decomposed already" in note for note in notes)


def test_an_unknown_backend_is_refused_by_name():
    graph, _ = ring_graph("gather", "rows", 2)
    options = DecomposeOptions(when="always", backend="carrier_pigeon")
    with pytest.raises(
        ConfigError, match=r"backend 'carrier_pigeon' is not known to do the order 'swizzle': nccl, gloo"
    ):
        decompose_gather_matmul(graph, options=options)


# -- the gate ----------------------------------------------------------------------------------------------------------

RANKS = 4
# Memory that is no bottleneck: FLOPs alone bound products.
COSTS = CostModel(hardware=replace(ROUND, memory_gb_per_s=1e6), groups={"ring": GroupShape(ranks=RANKS)})
NCCL = DecomposeOptions(backend="nccl")
PASSES = {"gather": decompose_gather_matmul, "scatter": decompose_matmul_scatter}


def as_is(graph: fx.Graph, asked: fx.Graph) -> Timeline:
    """No pass changes anything behind."""
    return COSTS.timeline(asked)


def linear(kind: str, rows: int, width: int, columns: int) -> fx.Graph:
    """A product that reads what is gathered, or makes what is scattered."""
    b = RingBuilder(RANKS, rows, width, torch.float32, "ring")
    if kind == "gather":
        return b.output(b.mm(b.gathered(b.take(rows, width)), b.take(width, columns)))
    return b.output(b.scattered(b.mm(b.take(rows * RANKS, width), b.take(width, columns))))


def predicted_us(kind: str, rows: int, width: int, columns: int) -> tuple[float, float]:
    """Both sides of the gate, by hand, where FLOPs bound products: ROUND does 1e6 of them in a microsecond."""
    products_us = 2 * RANKS * rows * width * columns / 1e6
    shard_bytes = 4 * rows * (width if kind == "gather" else columns)
    transfer_us = 10 + 2 + shard_bytes / 1e3
    exposed_us = 10 + (RANKS - 1) * (2 + shard_bytes / 1e3)
    decomposed_us = max(products_us, (RANKS - 1) * transfer_us) + 2 * transfer_us
    return decomposed_us, products_us + exposed_us


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("size", [(512, 512, 512), (512, 2048, 2048)])
def test_the_gate_weighs_what_is_exposed_against_two_transfers(kind: str, size: tuple[int, int, int]):
    decomposed_us, whole_us = predicted_us(kind, *size)
    graph = linear(kind, *size)
    before = COSTS.timeline(graph)
    assert before.time_us == pytest.approx(whole_us)
    notes = PASSES[kind](graph, options=NCCL, costs=COSTS, preview=as_is)
    if decomposed_us < whole_us:
        assert launches(graph) == {"permute": RANKS - 1}
        after = COSTS.timeline(graph)
        assert after.time_us < before.time_us
        assert notes[0] == (
            f"predicted with 1 decomposed: time {before.time_us / 1e3:.2f} -> {after.time_us / 1e3:.2f} ms, "
            f"exposed {before.exposed_us / 1e3:.2f} -> {after.exposed_us / 1e3:.2f} ms"
        )
    else:
        assert "permute" not in launches(graph)
        assert f"whole: were all of it exposed: decomposed {decomposed_us:.0f} us" in notes[0]


def test_both_sides_of_the_gate_are_seen():
    sides = {
        one < other for one, other in (predicted_us("gather", *size) for size in [(512, 512, 512), (512, 2048, 2048)])
    }
    assert sides == {False, True}


def test_what_is_hidden_anyway_stays_whole():
    graph = linear("gather", 512, 2048, 2048)
    hidden = Timeline(
        time_us=1.0, compute_us=1.0, communication_us=1.0, exposed_us=0.0, spans=COSTS.timeline(graph).spans
    )
    (note,) = decompose_gather_matmul(graph, options=NCCL, costs=COSTS, preview=lambda *_: hidden)
    assert "whole: decomposed" in note and "(exposed 0," in note and launches(graph) == {"all_gather": 1}


def test_what_makes_the_whole_graph_slower_is_undone():
    graph = linear("gather", 512, 2048, 2048)
    before, text = COSTS.timeline(graph), str(graph)
    times = iter([before, replace(before, time_us=before.time_us * 1.01)])
    first, second = decompose_gather_matmul(graph, options=NCCL, costs=COSTS, preview=lambda *_: next(times))
    assert first.startswith("kept whole; predicted with 1 decomposed: time ") and "make the graph slower" in second
    assert str(graph) == text


@pytest.mark.parametrize("gain", [0.1, -0.1])
def test_what_is_hidden_by_others_is_tried_with_them_where_they_alone_do_not_pay(gain: float):
    ranks = 8  # two transfers are less than half of all
    costs = CostModel(hardware=COSTS.hardware, groups={"ring": GroupShape(ranks=ranks)})
    b = RingBuilder(ranks, 512, 2048, torch.float32, "ring")
    exposed, hidden = (b.gathered(b.take(512, 2048)) for _ in range(2))
    graph = b.output(*(b.mm(gathered, b.take(2048, 2048)) for gathered in (exposed, hidden)))
    timed, text = costs.timeline(graph), str(graph)
    before = replace(timed, stalls_us={exposed.args[0].name: 1e6, hidden.args[0].name: 0.0})
    times = iter([before, *(replace(timed, time_us=timed.time_us * factor) for factor in (1.01, 1 - gain))])
    notes = decompose_gather_matmul(graph, options=NCCL, costs=costs, preview=lambda *_: next(times))
    assert next(times, None) is None  # both were looked at
    if gain > 0:
        assert notes[0].startswith("predicted with 2 decomposed: ") and launches(graph) == {"permute": 2 * (ranks - 1)}
        assert len(notes) == 2 and "2 all_gather of the step itself: decomposed" in notes[1]
    else:
        assert [note[:39] for note in notes[:2]] == [f"kept whole; predicted with {n} decomposed" for n in (1, 2)]
        assert str(graph) == text and launches(graph) == {"all_gather": 2}


@pytest.mark.parametrize(("ranks", "slower"), [(4, 1.01), (8, 1.0)])
def test_what_is_hidden_is_not_tried_where_it_cannot_pay_or_others_lay_nothing_bare(ranks: int, slower: float):
    costs = CostModel(hardware=COSTS.hardware, groups={"ring": GroupShape(ranks=ranks)})
    b = RingBuilder(ranks, 512, 2048, torch.float32, "ring")  # two of three transfers are more than half of all
    exposed, hidden = (b.gathered(b.take(512, 2048)) for _ in range(2))
    graph = b.output(*(b.mm(gathered, b.take(2048, 2048)) for gathered in (exposed, hidden)))
    timed = costs.timeline(graph)
    before = replace(timed, stalls_us={exposed.args[0].name: 1e6, hidden.args[0].name: 0.0})
    times = iter([before, replace(timed, time_us=timed.time_us * slower)])
    notes = decompose_gather_matmul(graph, options=NCCL, costs=costs, preview=lambda *_: next(times))
    assert sum(note.startswith("kept whole") for note in notes) == 1 and launches(graph) == {"all_gather": 2}


def test_small_shards_stay_whole():
    # Half the bandwidth is reached where bytes take as long as the latency of 12 us: at 12 kB.
    (note,) = decompose_gather_matmul(linear("gather", 50, 32, 2048), options=NCCL, costs=COSTS, preview=as_is)
    assert "whole: shards of 6400 bytes are below 12000: a transfer is mostly latency" in note


def added(rows: int, width: int, columns: int) -> fx.Graph:
    """A product that adds up over what is gathered, of every rank's part an addend as large as itself."""
    b = RingBuilder(RANKS, rows, width, torch.bfloat16, "ring")
    whole = b.gathered(b.take(rows, width))
    return b.output(b.mm(b.call(aten.t.default, whole), b.take(rows * RANKS, columns)))


@pytest.mark.parametrize("room_mib", [None, 0, 415, 416])
def test_where_there_is_no_room_for_addends_the_gather_stays_whole(room_mib: int | None):
    rows, width, columns = 2048, 4096, 4096
    graph = added(rows, width, columns)
    fast = CostModel(hardware=replace(ROUND, memory_gb_per_s=2e3), groups=COSTS.groups)
    around = None if room_mib is None else lambda _: Surroundings(room_bytes=room_mib * 2**20)
    preview = lambda _, asked: fast.timeline(asked)  # noqa: E731
    notes = decompose_gather_matmul(graph, options=NCCL, costs=fast, preview=preview, surroundings=around)
    # in float32, of each rank one and their sum; the gathered value is not there instead
    more_mib = ((RANKS + 1) * width * columns * 4 - RANKS * rows * width * 2) // 2**20
    live_mib = (RANKS * rows * (width + columns) * 2 + width * columns * 2) // 2**20  # both operands, and the product
    assert (live_mib, more_mib) == (160, 256)
    fits = room_mib is None or live_mib + more_mib <= max(room_mib, live_mib + 128)
    assert (launches(graph) == {"permute": RANKS - 1}) is fits
    assert any(f"would take {more_mib} MiB more: there is no room" in note for note in notes) is not fits


def test_over_gloo_nothing_is_decomposed_that_is_not_forced():
    graph = linear("gather", 512, 2048, 2048)
    gloo = DecomposeOptions(backend="gloo")
    (note,) = decompose_gather_matmul(graph, options=gloo, costs=COSTS, preview=as_is)
    assert note == "1 all_gather with products stay whole: over gloo only what is forced is decomposed"
    assert decompose_gather_matmul(graph, options=DecomposeOptions(when="never"), costs=COSTS, preview=as_is) == ()
    assert launches(graph) == {"all_gather": 1}


# -- with other passes -------------------------------------------------------------------------------------------------


def test_decomposed_gathers_are_in_no_bucket_and_the_scheduler_times_their_transfers():
    graph, _ = ring_graph("gather", "sequence", RANKS, rows=64, width=64)
    decompose(graph, "gather")
    for node in fxn.collectives_of(graph):
        assert fxn.collective_role(node) is None
    assert bucket_collectives(graph) == ()
    passes = split_passes(costs=COSTS)
    for graph_pass in passes:
        graph_pass.run(graph)
        graph.lint()
    transfers = [event for event in COSTS.timeline(graph).events if event.stream == "ring"]
    shard_bytes = 4 * BATCH * 64 * 64
    assert [event.duration_us for event in transfers] == [pytest.approx(12 + shard_bytes / 1e3)] * (RANKS - 1)


def test_decomposition_comes_ahead_of_buckets_and_of_the_schedule():
    names = [graph_pass.name for graph_pass in split_passes()]
    order = ["decompose_gather_matmul", "decompose_matmul_scatter", "bucket_collectives", "schedule_overlap"]
    assert [name for name in names if name in order] == order


def test_a_whole_step_is_previewed_by_the_passes_behind():
    """Without a preview of its own, the list of passes makes one: it leaves the graph as it is where nothing is won."""
    options = DecomposeOptions(backend="nccl")
    graph = linear("gather", 512, 2048, 2048)
    whole_us = COSTS.timeline(graph).time_us
    for graph_pass in split_passes(costs=COSTS, decompose=options):
        graph_pass.run(graph)
    assert launches(graph) == {"permute": RANKS - 1} and COSTS.timeline(graph).time_us < whole_us
