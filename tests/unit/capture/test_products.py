"""Products of flattened values become einsums that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_autoparallel.capture import normalize
from lightning_autoparallel.capture.products import unflatten_products
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from tests.unit._graphs import captured, run_captured

aten = torch.ops.aten
mm, addmm = aten.mm.default, aten.addmm.default
X, X4, W, V = (2, 3, 4), (2, 3, 2, 4), (5, 4), (4, 5)
G2, X2, B, BB = (6, 5), (6, 4), (5,), (6, 5)
Function = Callable[..., Tensor]


def view(x: Tensor, *shape: int) -> Tensor:
    return aten.view.default(x, list(shape))


def flat(x: Tensor) -> Tensor:
    return view(x, -1, x.shape[-1])


def t(x: Tensor) -> Tensor:
    return aten.t.default(x)


def wide(x: Tensor) -> Tensor:
    return aten._to_copy.default(x, dtype=torch.float64)


def bias_gradient(grad: Tensor) -> Tensor:
    return view(aten.sum.dim_IntList(flat(grad), [0], True), 4)


# A function of values of these shapes, the equations of its products, and what else is left of it.
CASES: dict[str, tuple[Function, list[tuple[int, ...]], list[str], list[str]]] = {
    "linear": (lambda x, w: view(mm(flat(x), t(w)), 2, 3, 5), [X, W], ["abc,dc->abd"], []),
    "linear of four dims": (lambda x, w: view(mm(flat(x), t(w)), 2, 3, 2, 5), [X4, W], ["abcd,ed->abce"], []),
    "weight as stored": (lambda x, v: view(mm(flat(x), v), 2, 3, 5), [X, V], ["abc,cd->abd"], []),
    "weight turned twice": (lambda x, w: mm(flat(x), t(t(t(w)))), [X, W], ["abc,dc->abd"], ["view"]),
    "weight by permute": (lambda x, w: mm(flat(x), w.permute(1, 0)), [X, W], ["abc,dc->abd"], ["view"]),
    "weight by transpose": (lambda x, w: mm(flat(x), w.transpose(-1, 0)), [X, W], ["abc,dc->abd"], ["view"]),
    "weight gradient": (lambda g, x: t(t(mm(t(flat(g)), flat(x)))), [(2, 3, 5), X], ["abc,abd->cd"], []),
    "weight gradient, turned": (lambda g, x: t(mm(t(flat(g)), flat(x))), [(2, 3, 5), X], ["abc,abd->cd"], []),
    "one side was always flat": (lambda g, x: mm(t(g), flat(x)), [G2, X], ["abc,abd->cd"], ["view"]),
    "it was transposed before": (
        lambda g, x: mm(t(g.transpose(0, 1)), flat(x)),
        [(5, 6), X],
        ["abc,bcd->ad"],
        ["view"],
    ),
    "a matrix of strides": (
        lambda g, x: mm(t(g[:, ::2]), flat(x)),
        [(6, 10), X],
        ["abc,abd->cd"],
        ["slice", "view"],
    ),
    "the other side was": (lambda g, x: mm(t(flat(x)), g), [G2, X], ["abc,abd->cd"], ["view"]),
    "flat columns": (lambda w, x: mm(w, t(flat(x))), [W, X], ["ab,cdb->acd"], ["view"]),
    "flat columns, turned": (lambda w, x: view(t(mm(w, t(flat(x)))), 2, 3, 5), [W, X], ["abc,dc->abd"], []),
    "rows flattened differently": (lambda g, x: mm(t(flat(g)), flat(x)), [(3, 2, 5), X], ["abc,abd->cd"], ["view"]),
    "outer product": (lambda x, y: mm(flat(x), t(flat(y))), [X, (3, 2, 4)], ["abc,dec->abde"], ["view"]),
    "inner dim flattened once": (lambda x, y: mm(flat(x), flat(y)), [X, (2, 2, 5)], ["abc,cd->abd"], ["view", "view"]),
    "bias": (lambda b, x, w: view(addmm(b, flat(x), t(w)), 2, 3, 5), [B, X, W], ["abc,dc->abd"], ["add"]),
    "bias of a matrix": (lambda b, x, w: addmm(b, flat(x), t(w)), [BB, X, W], ["abc,dc->abd"], ["view", "add"]),
    "scaled bias stays": (lambda b, x, w: addmm(b, flat(x), t(w), beta=2), [B, X, W], [], ["view", "t", "addmm"]),
    "matrices stay": (lambda g, w: mm(g, t(w)), [X2, W], [], ["t", "mm"]),
    "matrix with bias": (lambda b, g, w: addmm(b, g, t(w)), [B, X2, W], [], ["t", "mm", "add"]),
    "nearest base": (
        lambda x, w: mm(flat(view(x, 2, 3, 4)), t(w)),
        [(2, 3, 2, 2), W],
        ["abc,dc->abd"],
        ["view", "view"],
    ),
    "base behind another view": (
        lambda x, w: mm(view(view(x, 2, 3, 2, 2), 6, 4), t(w)),
        [X, W],
        ["abc,dc->abd"],
        ["view"],
    ),
    "dims merged otherwise": (lambda x, w: mm(view(x, 4, 6), t(w)), [(4, 2, 3), (5, 6)], [], ["view", "t", "mm"]),
    "trailing dims merged too": (lambda x, w: mm(view(x, 6, 8), t(w)), [X4, (5, 8)], ["abc,dc->abd"], ["view", "view"]),
    "cast after flattening": (
        lambda x, w: view(wide(mm(wide(flat(x)), wide(t(w)))), 2, 3, 5),
        [X, W],
        ["abc,cd->abd"],
        ["_to_copy", "t", "_to_copy", "_to_copy"],
    ),
    "bias gradient": (bias_gradient, [X], [], ["sum"]),
    "views of views": (lambda x: view(view(view(x, 6, 4), 3, 8), 2, 3, 4) + 1, [X], [], ["add"]),
    "views across strides": (
        lambda x: view(view(x.transpose(0, 1), 3, 2, 2, 2), 3, 2, 4, 1),
        [X],
        [],
        ["transpose", "view"],
    ),
}


def traced(function: Function, values: list[Tensor]) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake")(*values)
    for node in module.graph.nodes:
        node.meta["custom"] = {"module": node.name}
    return module


def equations(graph: fx.Graph) -> list[str]:
    return [str(node.args[0]) for node in graph.find_nodes(op="call_function", target=aten.einsum.default)]


def others(graph: fx.Graph) -> list[str]:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [node.target.overloadpacket.__name__ for node in calls if node.target is not aten.einsum.default]


class Checked(fx.Interpreter):
    """Runs a graph and compares every value with the fake one that its node carries."""

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if node.op == "call_function":
            fake = node.meta["val"]
            facts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in (fake, value)]
            assert facts[0] == facts[1], node.format_node()
            assert node.meta["custom"]["module"]
        return value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_same_program_without_flattening(name: str, dtype: torch.dtype):
    function, shapes, expected, left = CASES[name]
    generator = torch.Generator().manual_seed(7)
    values = [torch.randint(-4, 5, shape, generator=generator).to(dtype) for shape in shapes]
    module = traced(function, values)
    unflatten_products(module.graph)
    module.graph.lint()
    assert equations(module.graph) == expected
    assert others(module.graph) == left
    torch.testing.assert_close(Checked(module).run(*values), function(*values), rtol=0, atol=0)


def test_annotations_are_those_of_the_product():
    module = traced(CASES["linear"][0], [torch.zeros(X), torch.zeros(W)])
    unflatten_products(module.graph)
    (einsum,) = module.graph.find_nodes(op="call_function", target=aten.einsum.default)
    assert fxn.custom(einsum, "module") == "mm"


class Perceptron(nn.Module):
    """Linear layers with bias, one of them shared, on values of four dims."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(4, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(self.first(x).tanh()).relu()).square().mean()


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randint(256, (2, 16), generator=generator) for name in ("inputs", "targets")}


def llama_step(model: Llama3) -> Callable[[dict[str, Tensor]], Tensor]:
    def step(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    return step


@pytest.mark.parametrize("build", [Perceptron, Llama3], ids=lambda build: build.__name__)
def test_a_captured_step_computes_what_it_did(build, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(1)
    module = build(llama3_config("debug", {"n_layers": 2})) if build is Llama3 else build()
    batch, step = (tokens(), llama_step(module)) if build is Llama3 else (torch.randn(2, 3, 2, 4), module)
    monkeypatch.setattr(normalize, "unflatten_products", lambda graph: None, raising=False)
    graph = captured(module, batch, step)
    theirs = run_captured(graph, module, batch)
    unflatten_products(graph.graph_module.graph)
    graph.graph_module.recompile()
    ours = run_captured(graph, module, batch)
    assert equations(graph.graph_module.graph) and ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


def test_no_flat_view_stays_in_a_llama():
    model = Llama3(llama3_config("debug", {"n_layers": 2}))
    graph = captured(model, tokens(), llama_step(model)).graph_module.graph
    unflatten_products(graph)
    vocabulary = model.config.vocab_size
    flat_views = [
        n.meta["val"].shape for n in graph.nodes if n.target is aten.view.default and n.meta["val"].dim() == 2
    ]
    assert set(flat_views) == {(32, vocabulary)}
    assert not [n for n in graph.nodes if n.target in (aten.mm.default, aten.t.default)]
    products = 7 * 2 + 1
    found = equations(graph)
    assert {equation: found.count(equation) for equation in found} == {
        "abc,dc->abd": products,
        "abc,abd->cd": products,
        "abc,cd->abd": products,
    }
