"""Small graphs in which products read what is gathered, or make what is scattered, and what each rank gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from lightning_autoparallel.compile import specialize
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.decompose import DecomposeOptions
from lightning_autoparallel.passes.decompose_gather_matmul import decompose_gather_matmul
from lightning_autoparallel.passes.decompose_matmul_scatter import decompose_matmul_scatter
from lightning_autoparallel.torch_compat import collectives
from tests.unit.cost._graphs import Builder, aten

BATCH = 2


@dataclass(frozen=True)
class Given:
    """An input: its shape, and whether all ranks have the same."""

    shape: tuple[int, ...]
    replicated: bool = False


class RingBuilder(Builder):
    """Builds one pattern for a group of ``ranks``; ``rows`` are those of one rank's shard, ``width`` any other size."""

    def __init__(self, ranks: int, rows: int, width: int, dtype: torch.dtype, group: str) -> None:
        super().__init__()
        self.ranks, self.rows, self.width, self.dtype, self.group = ranks, rows, width, dtype, group
        self.given: list[Given] = []

    def take(self, *shape: int, replicated: bool = False) -> fx.Node:
        self.given.append(Given(shape, replicated))
        first_call = next((node for node in self.graph.nodes if node.op != "placeholder"), self.graph._root)
        with self.graph.inserting_before(first_call):
            return self.input(*shape, dtype=self.dtype)

    def gathered(self, shard: fx.Node) -> fx.Node:
        return self.wait(self.gather(shard, self.ranks, self.group))

    def scattered(self, whole: fx.Node, reduce_op: str = "sum") -> fx.Node:
        value: Tensor = whole.meta["val"]
        part = value.new_empty(value.shape[0] // self.ranks, *value.shape[1:])
        return self.wait(self.valued(part, collectives.REDUCE_SCATTER, whole, reduce_op, self.ranks, self.group))

    def mm(self, left: fx.Node, right: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, left, right)

    def sequence(self) -> fx.Node:
        """(batch x ranks x rows, width), gathered along the dim in the middle as lowering writes it."""
        shard = self.take(BATCH, self.rows, self.width)
        whole = self.call(aten.view.default, self.gathered(shard), [self.ranks, BATCH, self.rows, self.width])
        turned = self.call(aten.permute.default, whole, [1, 0, 2, 3])
        laid_out = self.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        joined = self.call(aten.view.default, laid_out, [BATCH, self.ranks * self.rows, self.width])
        return self.call(aten.view.default, joined, [BATCH * self.ranks * self.rows, self.width])

    def along_sequence(self, whole: fx.Node) -> fx.Node:
        """What ``sequence`` undoes: the dim in the middle to the front, ready to be scattered."""
        width = int(whole.meta["val"].shape[1])
        parts = self.call(aten.view.default, whole, [BATCH, self.ranks, self.rows, width])
        turned = self.call(aten.permute.default, parts, [1, 0, 2, 3])
        laid_out = self.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, laid_out, [self.ranks * BATCH, self.rows, width])


def _rows(b: RingBuilder) -> list[fx.Node]:
    return [b.mm(b.gathered(b.take(b.rows, b.width)), b.take(b.width, 5))]


def _sequence(b: RingBuilder) -> list[fx.Node]:
    """Queries, keys and values of one gathered value, each of a width of its own."""
    whole = b.sequence()
    return [b.mm(whole, b.call(aten.t.default, b.take(width, b.width))) for width in (6, 3, 2)]


def _columns(b: RingBuilder) -> list[fx.Node]:
    """A weight that is gathered by its outputs."""
    weight = b.gathered(b.take(b.rows, b.width))
    return [b.mm(b.take(5, b.width), b.call(aten.t.default, weight))]


def _columns_and_bias(b: RingBuilder) -> list[fx.Node]:
    weight = b.gathered(b.take(b.rows, b.width))
    bias = b.take(b.rows * b.ranks, replicated=True)
    return [b.call(aten.addmm.default, bias, b.take(5, b.width), b.call(aten.t.default, weight))]


def _rows_and_bias(b: RingBuilder) -> list[fx.Node]:
    x = b.gathered(b.take(b.rows, b.width))
    return [b.call(aten.addmm.default, b.take(5), x, b.take(b.width, 5))]


def _batches(b: RingBuilder) -> list[fx.Node]:
    x = b.gathered(b.take(b.rows, 3, b.width))
    return [b.call(aten.bmm.default, x, b.take(b.rows * b.ranks, b.width, 4))]


def _batch_columns(b: RingBuilder) -> list[fx.Node]:
    x = b.gathered(b.take(b.rows, 3, b.width))
    turned = b.call(aten.permute.default, x, [1, 2, 0])
    return [b.call(aten.bmm.default, b.take(3, 4, b.width), turned)]


def _contracting(b: RingBuilder) -> list[fx.Node]:
    """A weight's gradient: the same on all ranks, as both operands are."""
    x = b.gathered(b.take(b.rows, b.width))
    other = b.take(b.rows * b.ranks, 5, replicated=True)
    return [b.mm(b.call(aten.t.default, x), other)]


def _contracting_sequence(b: RingBuilder) -> list[fx.Node]:
    whole = b.sequence()
    other = b.take(5, BATCH * b.ranks * b.rows, replicated=True)
    turned = b.call(aten.t.default, b.take(BATCH * b.ranks * b.rows, 4, replicated=True))
    return [b.mm(other, whole), b.mm(turned, whole)]


def _contracting_and_bias(b: RingBuilder) -> list[fx.Node]:
    x = b.call(aten.t.default, b.gathered(b.take(b.rows, b.width)))
    other, bias = b.take(b.rows * b.ranks, 5, replicated=True), b.take(5, replicated=True)
    return [b.call(aten.addmm.default, bias, x, other)]


def _contracting_batches(b: RingBuilder) -> list[fx.Node]:
    x = b.call(aten.permute.default, b.gathered(b.take(b.rows, 3, b.width)), [1, 2, 0])
    return [b.call(aten.bmm.default, x, b.take(3, b.rows * b.ranks, 4, replicated=True))]


def _rows_and_contracting(b: RingBuilder) -> list[fx.Node]:
    """A gradient that is gathered: for the gradient of the input, and for that of the weight."""
    whole = b.sequence()
    of_weight = b.mm(b.call(aten.t.default, whole), b.take(BATCH * b.ranks * b.rows, 3, replicated=True))
    return [of_weight, b.mm(whole, b.take(b.width, 5))]


def _through_a_cast(b: RingBuilder) -> list[fx.Node]:
    whole = b.call(aten._to_copy.default, b.gathered(b.take(b.rows, b.width)), dtype=torch.float64)
    other = b.call(aten._to_copy.default, b.take(b.width, 5), dtype=torch.float64)
    return [b.mm(whole, other)]


GATHERS: dict[str, Callable[[RingBuilder], list[fx.Node]]] = {
    "rows": _rows,
    "sequence": _sequence,
    "columns": _columns,
    "columns and bias": _columns_and_bias,
    "rows and bias": _rows_and_bias,
    "batches": _batches,
    "columns of batches": _batch_columns,
    "contracting": _contracting,
    "contracting sequence": _contracting_sequence,
    "contracting and bias": _contracting_and_bias,
    "contracting batches": _contracting_batches,
    "rows and contracting": _rows_and_contracting,
    "through a cast": _through_a_cast,
}


def _scatter_rows(b: RingBuilder) -> list[fx.Node]:
    return [b.scattered(b.mm(b.take(b.rows * b.ranks, b.width), b.take(b.width, 5)))]


def _scatter_average(b: RingBuilder) -> list[fx.Node]:
    return [b.scattered(b.mm(b.take(b.rows * b.ranks, b.width), b.take(b.width, 5)), "avg")]


def _scatter_sequence(b: RingBuilder) -> list[fx.Node]:
    rows = BATCH * b.ranks * b.rows
    return [b.scattered(b.along_sequence(b.mm(b.take(rows, b.width), b.take(b.width, 5))))]


def _scatter_sum(b: RingBuilder) -> list[fx.Node]:
    """The gradient of an input that two products read."""
    rows = BATCH * b.ranks * b.rows
    products = [
        b.call(aten.view.default, b.mm(b.take(rows, b.width), b.take(b.width, 6)), [BATCH, b.ranks * b.rows, 6])
        for _ in range(2)
    ]
    total = b.call(aten.view.default, b.call(aten.add.Tensor, *products), [rows, 6])
    return [b.scattered(b.along_sequence(total))]


def _scatter_columns(b: RingBuilder) -> list[fx.Node]:
    product = b.call(
        aten.addmm.default, b.take(b.rows * b.ranks), b.take(5, b.width), b.take(b.width, b.rows * b.ranks)
    )
    turned = b.call(aten.clone.default, b.call(aten.t.default, product), memory_format=torch.contiguous_format)
    return [b.scattered(turned)]


def _scatter_batches(b: RingBuilder) -> list[fx.Node]:
    batches = b.rows * b.ranks
    return [b.scattered(b.call(aten.bmm.default, b.take(batches, 3, b.width), b.take(batches, b.width, 4)))]


SCATTERS: dict[str, Callable[[RingBuilder], list[fx.Node]]] = {
    "rows": _scatter_rows,
    "average": _scatter_average,
    "sequence": _scatter_sequence,
    "sum": _scatter_sum,
    "columns": _scatter_columns,
    "batches": _scatter_batches,
}


def ring_graph(
    kind: str,
    pattern: str,
    ranks: int,
    *,
    rows: int = 2,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    group: str = "ring",
) -> tuple[fx.Graph, list[Given]]:
    """A graph of ``kind`` ``"gather"`` or ``"scatter"``, the same on all ranks, and its inputs."""
    build = RingBuilder(ranks, rows, width, dtype, group)
    results = (GATHERS if kind == "gather" else SCATTERS)[pattern](build)
    return build.output(*results), build.given


def decompose(graph: fx.Graph, kind: str, order: str = "swizzle", depth: int = 1) -> tuple[str, ...]:
    """Decompose what may be, whatever it costs."""
    run = decompose_gather_matmul if kind == "gather" else decompose_matmul_scatter
    options = DecomposeOptions(when="always", order=order, depth=depth, backend="gloo")  # type: ignore[arg-type]
    notes = run(graph, options=options)
    graph.lint()
    return notes


def rank_inputs(
    given: Sequence[Given], ranks: int, dtype: torch.dtype, *, integers: bool, seed: int = 0
) -> list[list[Tensor]]:
    """What every rank gives the graph: small integers, whose products are exact, or normal numbers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        if integers:
            return torch.randint(-3, 4, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator).to(dtype)

    inputs: list[list[Tensor]] = [[] for _ in range(ranks)]
    for one in given:
        same = draw(one.shape)
        for mine in inputs:
            mine.append(same if one.replicated else draw(one.shape))
    return inputs


def rank_graph(graph: fx.Graph, rank: int, ranks: int) -> fx.Graph:
    """The graph of one rank."""
    own = copy.deepcopy(fx.GraphModule(nn.Module(), graph)).graph
    specialize(own, lambda group: (rank, ranks))
    return own


def launches(graph: fx.Graph) -> dict[str, int]:
    """Collectives by kind."""
    counts: dict[str, int] = {}
    for node in fxn.collectives_of(graph):
        kind = fxn.collective_kind(node) or ""
        counts[kind] = counts.get(kind, 0) + 1
    return counts
