"""Heads of losses in chunks: what leaves them is as before, what is in them is not as wide; and what stays whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_autoparallel.capture.decompositions import planning_decompositions
from lightning_autoparallel.contracts import GraphInput, MemoryShare
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.liveness import MemoryTimeline
from lightning_autoparallel.cost.memory import StepMemory
from lightning_autoparallel.cost.storage import resolve_storages
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.chunk_loss_head import chunk_loss_head
from lightning_autoparallel.passes.loss_head import ChunkOptions
from lightning_autoparallel.torch_compat.rank_operators import ADD_PRODUCT
from tests.unit.cost._graphs import ROUND

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 8, 6, 24
# products take nearly all of the time, in however many parts they are computed
NO_LAUNCHES = CostModel(hardware=replace(ROUND, memory_gb_per_s=1e9, kernel_latency_us=0.0), groups={})

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def capped(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(3 * torch.tanh(logits / 3), targets)


def told(logits: Tensor, targets: Tensor) -> Tensor:
    return logits


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets).square()


def over_all(logits: Tensor, targets: Tensor) -> Tensor:
    """Probabilities of all rows together."""
    return -(logits.exp() / logits.exp().sum()).gather(-1, targets[..., None]).mean()


def clustered(logits: Tensor, targets: Tensor) -> Tensor:
    """Targets are the probabilities themselves, normalised by column (Xie et al. 2016, arXiv:1511.06335, eq. 3)."""
    found = logits.flatten(0, 1).softmax(-1)
    wanted = (found.square() / found.sum(0)).detach()
    return F.kl_div(found.log(), wanted / wanted.sum(1, keepdim=True), reduction="batchmean")


def beside_a_total(logits: Tensor, targets: Tensor) -> Tensor:
    return (torch.logsumexp(logits, -1) + logits.detach().sum()).square().mean()


def by_a_sum_over_rows(logits: Tensor, targets: Tensor) -> Tensor:
    rows = logits.flatten(0, 1)
    return F.cross_entropy(rows + 0.01 * rows.detach() @ (rows.detach().t() @ rows.detach()), targets.flatten())


def told_on_the_way_back(logits: Tensor, targets: Tensor) -> Tensor:
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient - gradient.sum((0, 1)))
    return cross_entropy(logits, targets)


def as_a_row(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.float(), targets)[None]


class Speaker(nn.Module):
    """A table, a layer, a head with a bias or tied to the table, and a loss."""

    def __init__(self, loss: Loss, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.body(self.table(tokens)))), tokens.roll(-1, 1))


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


class Joint:
    """The loss and the gradients of a module for a tangent, as one graph."""

    def __init__(self, module: nn.Module, batch: Tensor, tangent: float = 1.0, tangents: int = 1) -> None:
        self.names = [name for name, _ in module.named_parameters()]
        self.given = [*module.parameters(), batch, *(torch.tensor(tangent) for _ in range(tangents))]

        def step(*given: Tensor) -> list[Tensor]:
            parameters, rows, arriving = given[: len(self.names)], given[len(self.names)], given[len(self.names) + 1 :]
            result = torch.func.functional_call(module, dict(zip(self.names, parameters, strict=True)), (rows,))
            return [result, *torch.autograd.grad(result, parameters, reduce(torch.add, arriving).expand_as(result))]

        self.graph_module = make_fx(step, decomposition_table=planning_decompositions(), tracing_mode="fake")(
            *self.given
        )
        kinds = [*["parameter"] * len(self.names), "batch", *["tangent"] * tangents]
        self.inputs = [GraphInput(kind=kind, name=str(index)) for index, kind in enumerate(kinds)]

    @property
    def graph(self) -> fx.Graph:
        """The calls."""
        return self.graph_module.graph

    def run(self) -> list[Tensor]:
        """The loss, then gradients."""
        return self.graph_module(*self.given)

    def chunked(self, chunks: int) -> tuple[str, ...]:
        """The notes of the pass, which has rewritten the graph."""
        notes = chunk_loss_head(self.graph, inputs=self.inputs, options=ChunkOptions(chunks=chunks))
        self.graph_module.recompile()
        return notes

    def widest(self) -> int:
        """Elements of the largest value that has a column for each token of the vocabulary."""
        values = [value for node in self.graph.nodes for value in fxn.values(node) if value is not None]
        return max(value.numel() for value in values if value.dim() > 1 and value.shape[-1] == VOCABULARY)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", [cross_entropy, smoothed, with_z_loss, shifted, capped])
def test_results_and_gradients_are_as_before(loss: Loss, tied: bool) -> None:
    joint = Joint(Speaker(loss, tied), tokens(), tangent=2.5)
    before, whole = joint.run(), joint.widest()
    assert any(note.endswith("2 chunks of rows") for note in joint.chunked(2))
    assert joint.widest() == whole // 2
    for value, expected in zip(joint.run(), before, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_torch() -> None:
    module, batch = Speaker(cross_entropy), tokens()
    joint = Joint(module, batch)
    joint.chunked(4)
    _, *gradients = joint.run()
    module(batch).backward()
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_table_are_added_up_in_one_memory(dtype: torch.dtype) -> None:
    joint = Joint(Speaker(lambda logits, targets: cross_entropy(logits.float(), targets)).to(dtype), tokens())
    joint.chunked(4)
    added = [node for node in joint.graph.nodes if node.target is ADD_PRODUCT]
    assert len(added) == 3 and all(node.args[-1].meta["val"].shape == (VOCABULARY, WIDTH) for node in added)
    storages = resolve_storages(joint.graph)
    assert len({storages.of(sum_) for node in added for sum_ in (node, node.args[-1])}) == 1


def test_what_the_backward_reads_is_marked_for_the_forward() -> None:
    joint = Joint(Speaker(cross_entropy), tokens())
    joint.chunked(2)
    assert any(fxn.is_early(node) for node in joint.graph.nodes)


@pytest.mark.parametrize(
    ("loss", "chunks", "reason"),
    [
        # The gradient of a square needs the loss itself, which is known once all rows are.
        (squared, 2, "needs all rows"),
        (cross_entropy, 3, "rows are not 3 equal chunks"),
        (told, 2, "the graph's result"),
    ],
)
def test_why_a_head_stays_whole(loss: Loss, chunks: int, reason: str) -> None:
    joint = Joint(Speaker(loss), tokens())
    before = str(joint.graph)
    assert any(reason in note for note in joint.chunked(chunks))
    assert str(joint.graph) == before


def test_gradients_in_float16_are_computed_as_large_as_they_come() -> None:
    """Their loss's scale is what keeps them from vanishing: none are computed for a tangent of 1."""
    joint = Joint(Speaker(cross_entropy).half(), tokens())
    assert any("float16" in note for note in joint.chunked(2))


def test_several_losses_are_not_one() -> None:
    joint = Joint(Speaker(cross_entropy), tokens(), tangents=2)
    assert any("does not come from one loss" in note for note in joint.chunked(2))


@pytest.mark.parametrize("loss", [over_all, clustered, beside_a_total, by_a_sum_over_rows, told_on_the_way_back])
def test_no_chunk_takes_its_own_part_of_a_sum_for_all_of_it(loss: Loss) -> None:
    joint = Joint(Speaker(loss), tokens(), tangent=2.5)
    before = joint.run()
    joint.chunked(2)
    for value, expected in zip(joint.run(), before, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_a_product_that_nothing_reads_is_left_alone() -> None:
    joint = Joint(Speaker(lambda logits, targets: logits[:0].sum()), tokens())
    (product, *_) = (node for node in joint.graph.nodes if _is_wide(node))
    with joint.graph.inserting_after(product):
        dead = joint.graph.node_copy(product)
    before = joint.run()
    assert any("nothing reads" in note for note in joint.chunked(2))
    assert dead in joint.graph.nodes
    torch.testing.assert_close(joint.run(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("head_bytes", "asked"), [(40, 1), (400, 2)])
def test_a_head_that_takes_little_at_the_peak_is_not_tried(head_bytes: int, asked: int) -> None:
    joint = Joint(Speaker(cross_entropy), tokens())
    before = [node.format_node() for node in joint.graph.nodes]
    (softmax,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten._log_softmax.default)
    shares = [("primals_1", 1000 - head_bytes), (softmax.name, head_bytes)]
    alive = tuple(MemoryShare(name=name, size_bytes=size, kind="value", module="") for name, size in shares)
    peak = MemoryTimeline(live_bytes=(1000,), peak_bytes=1000, peak_node=softmax.name, contributors=alive)
    partitions: list[fx.Graph] = []

    def memory_of(graph: fx.Graph) -> StepMemory:
        partitions.append(graph)
        return StepMemory(forward=peak)

    assert chunk_loss_head(joint.graph, inputs=joint.inputs, costs=NO_LAUNCHES, memory_of=memory_of) == ()
    assert len(partitions) == asked
    assert (len(before) == len(joint.graph.nodes)) and joint.graph.lint() is None


def test_where_the_peak_behind_it_is_unknown_a_head_is_whole_again() -> None:
    joint = Joint(Speaker(cross_entropy), tokens())
    before = [(node.op, node.target) for node in joint.graph.nodes]
    (softmax,) = joint.graph.find_nodes(op="call_function", target=torch.ops.aten._log_softmax.default)
    alive = (MemoryShare(name=softmax.name, size_bytes=1000, kind="value", module=""),)
    known = [StepMemory(forward=MemoryTimeline(live_bytes=(1000,), peak_bytes=1000, peak_node="", contributors=alive))]

    def memory_of(graph: fx.Graph) -> StepMemory:
        if not known:
            assert len(graph.nodes) > len(before), "in chunks"
            raise UnsupportedOpError("nothing is known of it")
        return known.pop()

    notes = chunk_loss_head(joint.graph, inputs=joint.inputs, costs=NO_LAUNCHES, memory_of=memory_of)
    assert notes == ("every head stays whole: nothing is known of it",)
    assert [(node.op, node.target) for node in joint.graph.nodes] == before


def test_one_matrix_as_two_operands_is_read_as_it_is() -> None:
    """Some of its rows and all of it, where it is as wide as the logits and has as many rows."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        rows, classes = logits.flatten(0, 1), targets.flatten()
        square = torch.sin(classes[:, None] * classes + 1.0 * torch.arange(VOCABULARY))
        return F.cross_entropy(rows + square @ square, classes)

    joint = Joint(Speaker(loss), torch.cat([tokens(), tokens()[:1]]))
    assert VOCABULARY == (ROWS + 1) * LENGTH
    before = joint.run()
    joint.chunked(2)
    for value, expected in zip(joint.run(), before, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


class Scaled(Speaker):
    """A learned temperature, of no dims."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.table(tokens)))
        return self.loss(self.head(hidden) * self.scale, tokens.roll(-1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [as_a_row, lambda logits, targets: cross_entropy(logits.float(), targets)])
def test_gradients_keep_their_shapes_and_dtypes(loss: Loss, dtype: torch.dtype) -> None:
    """Whatever the dtype and the dims of the loss that they are scaled by."""
    joint = Joint(Scaled(loss).to(dtype), tokens(), tangent=2.0)
    before = joint.run()
    assert any(note.endswith("2 chunks of rows") for note in joint.chunked(2))
    for value, expected in zip(joint.run(), before, strict=True):
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        torch.testing.assert_close(value, expected, rtol=1e-5 if dtype is torch.float32 else 5e-2, atol=1e-2)


def test_what_comes_before_the_head_in_float16_stays_whole() -> None:
    loss = Speaker(lambda logits, targets: cross_entropy(logits, targets).half() / 1e6)
    assert any("float16" in note for note in Joint(loss, tokens(), tangent=4096.0).chunked(2))


def _is_wide(node: fx.Node) -> bool:
    value = node.meta.get("val")
    rows = ROWS * LENGTH
    return node.op == "call_function" and isinstance(value, Tensor) and value.numel() == rows * VOCABULARY
