"""The second partition, under `torch.compile`: what the first one saved and recomputed, to the byte and the launch."""

from __future__ import annotations

import operator
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from lightning_autoparallel import autoparallel_backend, parallelize
from lightning_autoparallel.compile.replay import replay_partition
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.pipeline import ParallelModule
from lightning_autoparallel.torch_compat import collectives
from tests.numerics.rules import RULES
from tests.support.replay import Halves, first_partition, launches, saved_bytes, second_partitions
from tests.support.tiers import tiered

aten = torch.ops.aten


class Joint:
    """A joint graph by hand, as AOTAutograd names it: a parameter, a batch, a tangent."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.w, self.x, self.t = (self._input(name) for name in ("primals_1", "primals_2", "tangents_1"))

    def _input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.randn(4, 4)
        return node

    def __call__(
        self, target: Any, *args: Any, half: str | None = None, tag: str | None = None, **meta: Any
    ) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda argument: argument.meta["val"])
        node.meta["val"] = values[0] if "c10d" in str(target) else target(*values)
        node.meta |= {"custom": {"half": half} if half else {}, "partitioner_tag": tag, **meta}
        return node

    def gathered(self, half: str) -> fx.Node:
        gather = self(collectives.ALL_GATHER, self.w, 1, "g", half=half)
        return self(aten.t.default, self(collectives.WAIT, gather, half=half), half=half)

    def split(self, result: fx.Node, *gradients: fx.Node | None) -> tuple[list[str], fx.Graph, fx.Graph]:
        """Names of what is saved, inputs apart, and both halves; together they compute what the joint graph does."""
        self.graph.output((result, *gradients))
        module = fx.GraphModule(nn.Module(), self.graph)
        forward, backward = replay_partition(module, None, num_fwd_outputs=1)
        given = {node.name: node.meta["val"] for node in (self.w, self.x, self.t)}
        expected = _run(self.graph, given)
        produced = _run(forward.graph, given)
        (output,) = forward.graph.find_nodes(op="output")
        names = [node.name for node in output.args[0][1:]]
        assert torch.equal(produced[0], expected[0])
        actual = _run(backward.graph, given | dict(zip(names, produced[1:], strict=True)))
        torch.testing.assert_close(actual, expected[1:], rtol=0, atol=0)
        return [name for name in names if not name.startswith("primals")], forward.graph, backward.graph


def _run(graph: fx.Graph, given: dict[str, Tensor]) -> list[Tensor]:
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        arguments = fx.map_arg(node.args, env.__getitem__)
        if node.op == "placeholder":
            env[node] = given[node.name]
        elif node.op == "output":
            return list(arguments[0])
        else:
            env[node] = arguments[0] if "c10d" in str(node.target) else node.target(*arguments)
    raise AssertionError


def calls_of(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_the_forward_is_found_in_one_walk():
    joint, length = Joint(), 300
    y = joint.x
    for _ in range(length):
        y = joint(aten.tanh.default, y, half="forward")
    with mock.patch.object(fxn, "with_ancestors", wraps=fxn.with_ancestors) as walks:
        joint.split(y, None, joint(aten.mul.Tensor, joint.t, y, half="backward"))
    assert 0 < walks.call_count <= 3


def test_a_gather_of_each_half_stays_in_it():
    joint = Joint()
    y = joint(aten.mm.default, joint.x, joint.gathered("forward"), half="forward")
    grad = joint(aten.mm.default, joint.t, joint.gathered("backward"), half="backward")
    saved, forward, backward = joint.split(y, None, grad)
    assert saved == []
    assert launches(forward) == launches(backward) == {"all_gather": 1}


def test_chains_that_are_repeated_in_the_backward_are_made_once():
    joint = Joint()
    y = joint(aten.mm.default, joint.x, joint.gathered("forward"), half="forward")
    first = joint(aten.mm.default, joint.t, joint.gathered("backward"), half="backward")
    second = joint(aten.mm.default, first, joint.gathered("backward"), half="backward")
    _, _, backward = joint.split(y, None, second)
    assert launches(backward) == {"all_gather": 1}
    assert Counter(calls_of(backward))[aten.t.default] == 1


def test_draws_from_inputs_are_not_merged():
    joint = Joint()
    y = joint(aten.exp.default, joint.x, half="forward")
    draws = [joint(aten.bernoulli.default, joint(aten.sigmoid.default, joint.x, half="backward")) for _ in range(2)]
    joint.graph.output((y, joint(aten.add.Tensor, *draws)))
    module = fx.GraphModule(nn.Module(), joint.graph)
    _, backward = replay_partition(module, None, num_fwd_outputs=1)
    assert Counter(calls_of(backward.graph))[aten.bernoulli.default] == 2
    assert Counter(calls_of(backward.graph))[aten.sigmoid.default] == 1


def test_backward_calls_between_forward_ones_stay_in_the_backward():
    joint = Joint()
    hidden = joint(aten.exp.default, joint.x, half="forward")
    early = joint(aten.mul.Tensor, joint.t, hidden, half="backward")
    y = joint(aten.sin.default, hidden, half="forward")
    late = joint(aten.mul.Tensor, early, joint(aten.cos.default, hidden, half="backward"), half="backward")
    saved, forward, backward = joint.split(y, None, late)
    assert saved == [hidden.name]
    assert calls_of(forward) == [aten.exp.default, aten.sin.default]
    assert calls_of(backward) == [aten.mul.Tensor, aten.cos.default, aten.mul.Tensor]


@pytest.mark.parametrize("half", ["forward", None])
def test_one_result_of_several_is_saved_and_never_all_together(half: str | None):
    joint = Joint()
    both = joint(aten.max.dim, joint.x, 1, half=half)
    highest, places = (joint(operator.getitem, both, i, half=half) for i in range(2))
    wide = joint(aten.unsqueeze.default, places, 1, half="backward")
    saved, _, backward = joint.split(highest, None, joint(aten.mul.Tensor, joint.t, wide, half="backward"))
    assert saved == [places.name]
    assert aten.max.dim not in calls_of(backward)


def test_what_the_first_partition_saved_is_saved_though_it_is_cheap():
    joint = Joint()
    turned = joint(aten.t.default, joint(aten.exp.default, joint.x, half="forward"), half="forward")
    y = joint(aten.sin.default, turned, half="forward")
    saved, _, backward = joint.split(y, None, joint(aten.mul.Tensor, joint.t, turned, half="backward"))
    assert saved == [turned.name]
    assert calls_of(backward) == [aten.mul.Tensor]


def test_views_and_aliases_of_other_code_are_made_again():
    joint = Joint()
    hidden = joint(aten.exp.default, joint.x)
    turned = joint(aten.detach.default, joint(aten.t.default, hidden))
    saved, _, _ = joint.split(joint(aten.sin.default, turned), None, joint(aten.mul.Tensor, joint.t, turned))
    assert saved == [hidden.name]


@pytest.mark.parametrize("policy", [CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE])
def test_regions_of_other_code_are_recomputed(policy: CheckpointPolicy):
    joint = Joint()
    region = {"recompute": policy, "ac_graph_id": 1}
    inside = joint(aten.cos.default, joint(aten.exp.default, joint.x, **region), **region)
    y = joint(aten.sin.default, inside)
    saved, _, backward = joint.split(y, None, joint(aten.mul.Tensor, joint.t, inside))
    assert saved == []
    assert calls_of(backward) == [aten.exp.default, aten.cos.default, aten.mul.Tensor]


def test_what_leaves_a_region_for_another_is_saved():
    joint = Joint()
    policy = CheckpointPolicy.PREFER_RECOMPUTE
    first = joint(aten.exp.default, joint.x, recompute=policy, ac_graph_id=1)
    second = joint(aten.cos.default, first, recompute=policy, ac_graph_id=2)
    saved, _, _ = joint.split(joint(aten.sin.default, second), None, joint(aten.mul.Tensor, joint.t, second))
    assert saved == [first.name]


def test_a_result_that_only_the_backward_reads_is_of_the_half_it_was_traced_in():
    joint = Joint()
    kept = joint(aten.exp.default, joint.x, tag="is_forward")
    saved, forward, _ = joint.split(joint(aten.sin.default, joint.x), None, joint(aten.mul.Tensor, joint.t, kept))
    assert saved == [kept.name] and aten.exp.default in calls_of(forward)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Dynamo counts recompilations by code, whatever test they were for."""
    yield
    torch._dynamo.reset()


class Results(nn.Module):
    """Operators with several results, whose backward reads some: attention, normalisation, top values; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.seen += x.mean()
        heads = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        best = self.norm(x + attended).topk(3).values
        return {"score": self.out(best).mean(), "best": best, "rows": [3, "text"]}


def llama() -> Llama3:
    torch.manual_seed(0)
    return Llama3(llama3_config("debug", {}))


@dataclass
class Case:
    make: Callable[[], nn.Module]
    sample: Callable[[], Tensor]
    loss: Callable[[Any], Tensor]
    plan: Any = "fsdp"


CASES = {
    "llama fsdp": (Case(llama, lambda: torch.zeros(8, 16, dtype=torch.long), torch.mean), {"dp_shard": 8}),
    "llama tp": (
        Case(
            llama,
            lambda: torch.zeros(4, 16, dtype=torch.long),
            torch.mean,
            {"base": "fsdp", "rules": RULES["llama3"]},
        ),
        {"dp_shard": 2, "tp": 2},
    ),
    "results": (Case(Results, lambda: torch.zeros(4, 6, 8), lambda result: result["score"]), {"dp_shard": 2}),
}


@pytest.mark.parametrize("name", tiered(CASES, lambda name: name != "llama tp"))
def test_both_partitions_launch_and_save_the_same(
    name: str, fake_mesh: Callable[..., ParallelMesh], fresh_dynamo: None
):
    case, axes = CASES[name]
    sample = case.sample()
    parallel = parallelize(case.make(), (sample,), fake_mesh(**axes), case.plan, compile=False)
    first = first_partition(parallel)
    local = sample[: sample.shape[0] // axes["dp_shard"]]
    with second_partitions() as seen:
        compiled = torch.compile(parallel, backend=autoparallel_backend(compile=False), fullgraph=True)
        case.loss(compiled(local)).backward()
    (second,) = seen
    assert launches(second.forward) == launches(first.forward.graph)
    assert launches(second.backward) == launches(first.backward.graph)
    assert saved_bytes(second) == saved_bytes(Halves.of(first)) > 0
    for parameter in parallel.parameters():
        assert parameter.grad.placements == parameter.placements


@pytest.fixture
def results(fake_mesh: Callable[..., ParallelMesh], fresh_dynamo: None) -> ParallelModule:
    return parallelize(Results(), (torch.zeros(4, 6, 8),), fake_mesh(dp_shard=2), "fsdp", compile=False)


def partitions_of(function: Callable[[Tensor], Tensor]) -> Halves:
    """The second partition of a caller of a parallel module."""
    with second_partitions() as seen:
        compiled = torch.compile(function, backend=autoparallel_backend(compile=False), fullgraph=True)
        compiled(torch.randn(2, 6, 8)).backward()
    (second,) = seen
    return second


def test_the_callers_own_regions_are_recomputed_and_the_module_in_them_keeps_its_decisions(results: ParallelModule):
    def around(x: Tensor) -> Tensor:
        result = results(x)
        return (result["best"] + result["score"]).sinh().cosh().tanh()

    plain = partitions_of(lambda x: around(x).sum())
    second = partitions_of(lambda x: checkpoint(around, x, use_reentrant=False).sum())
    first = first_partition(results)
    for halves in (plain, second):
        assert launches(halves.forward) == launches(first.forward.graph)
        assert launches(halves.backward) == launches(first.backward.graph)
    ours = saved_bytes(Halves.of(first))
    assert saved_bytes(plain) == ours + 3 * 2 * 6 * 3 * 4, "the sum, and what sinh and tanh make of it"
    assert saved_bytes(second) == ours + 4, "only the score, as the best are saved by the module"
    assert aten.tanh.default in calls_of(second.backward) and aten.tanh.default not in calls_of(plain.backward)


def test_a_module_called_twice_is_gathered_once_in_the_backward(results: ParallelModule):
    once = partitions_of(lambda x: results(x)["score"])
    twice = partitions_of(lambda x: results(x)["score"] + results(x.exp())["score"])
    assert launches(twice.forward)["all_gather"] == 2 * launches(once.forward)["all_gather"]
    assert launches(twice.backward)["all_gather"] == launches(once.backward)["all_gather"]


def named_backend() -> Callable[..., Any]:
    """What `backend="autoparallel"` finds in an installed package."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    value = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]["autoparallel"]
    return EntryPoint(name="autoparallel", value=value, group="torch_dynamo_backends").load()


def test_by_its_name_static_results_come_back_and_buffers_change(results: ParallelModule):
    compiled = torch.compile(results, backend=named_backend(), options={"compile": False}, fullgraph=True)
    before = results.module.seen.clone()
    result = compiled(torch.ones(2, 6, 8))
    assert result["rows"] == [3, "text"] and result["best"].shape == (2, 6, 3)
    assert not torch.equal(results.module.seen, before)


def test_batches_are_refused_that_were_not_prepared(results: ParallelModule):
    compiled = torch.compile(results, backend=autoparallel_backend(compile=False), fullgraph=True)
    with pytest.raises(
        ConfigError, match=r"not prepared for \(0.0: float32\[4, 6, 8\]; with gradients\): call prepare"
    ):
        compiled(torch.ones(4, 6, 8))
    with torch.no_grad(), pytest.raises(ConfigError, match=r"float32\[2, 6, 8\]; without gradients"):
        compiled(torch.ones(2, 6, 8))
    with pytest.warns(UserWarning, match="captured again"):
        results.prepare(torch.ones(4, 6, 8))
    for rows in (2, 4, 2):
        assert compiled(torch.ones(rows, 6, 8))["best"].shape[0] == rows
    results.eval()
    with pytest.raises(ConfigError, match="not prepared"):
        compiled(torch.ones(2, 6, 8))


def test_other_backends_are_refused_that_would_partition_anew(results: ParallelModule):
    for _ in range(2):
        with pytest.raises(BackendCompilerFailed, match='give it backend="autoparallel"'):
            torch.compile(results, backend="aot_eager", fullgraph=True)(torch.ones(2, 6, 8))
        torch._dynamo.reset()
        # What this backend is let do, the next one is not.
        torch.compile(results, backend=autoparallel_backend(compile=False), fullgraph=True)(torch.ones(2, 6, 8))
        torch._dynamo.reset()
    results.module.seen.zero_()
    torch.compile(results, backend="eager", fullgraph=True)(torch.ones(2, 6, 8))["score"].backward()
    assert results.module.seen != 0
