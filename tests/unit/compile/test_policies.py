"""What the policies save and recompute of a small LLaMA: the same bits from fewer bytes, one block at a time."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_autoparallel import NodeInfo
from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.compile import partition_graph
from lightning_autoparallel.compile.blocks import MATMULS, find_blocks
from lightning_autoparallel.compile.policies import Forward, wishes_of
from lightning_autoparallel.config import EngineConfig, MeshSpec
from lightning_autoparallel.contracts import PartitionedGraph, ShardedGraph
from lightning_autoparallel.cost.memory import predict_step_memory
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.plan import make_plan
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.collectives import init_fake_world
from tests.support.hermetic import no_leaks
from tests.unit._graphs import captured
from tests.unit.compile.joint import Joint, recomputed_of

aten = torch.ops.aten
LAYERS = 4
BLOCKS = [f"layers.{i}" for i in range(LAYERS)]


def recompute_all(node: NodeInfo) -> str:
    """A user's policy."""
    return "recompute"


def name_of(policy: Any) -> str:
    return policy if isinstance(policy, str) else policy.__name__


@dataclass
class Step:
    """A joint graph of one rank, and what it is run on."""

    sharded: ShardedGraph
    values: list[Tensor]

    def split(self, policy: Any = "none") -> PartitionedGraph:
        return partition_graph(self.sharded, activation_checkpointing=policy)


def step_of(module: nn.Module, batch: Any, run: Callable[[Any], Any] | None = None) -> Step:
    with no_leaks():
        init_fake_world(1)
        graph = captured(module, batch, run)
        plan = make_plan(graph, "ddp", build_mesh(MeshSpec.from_mapping({"dp_shard": 1}), "cpu"), print)
        sharded = lower_graph(graph, plan)
        dist.destroy_process_group()
    known = {
        "parameter": module.state_dict(),
        "buffer": module.state_dict(),
        "batch": batch,
        "constant": graph.constants,
    }
    values = [
        torch.ones(node.meta["val"].shape) if item.kind == "tangent" else known[item.kind][item.name]
        for node, item in zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True)
    ]
    return Step(sharded, values)


@pytest.fixture(scope="module")
def llama() -> Step:
    torch.manual_seed(0)
    model = Llama3(llama3_config("debug", {"n_layers": LAYERS}))
    tokens = torch.randint(0, 200, (2, 65))
    batch = {"x": tokens[:, :-1], "y": tokens[:, 1:].clone()}
    return step_of(model, batch, lambda b: F.cross_entropy(model(b["x"]).flatten(0, 1), b["y"].flatten()))


def saved_of(partitioned: PartitionedGraph) -> list[fx.Node]:
    (output,) = partitioned.forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    return results[len(results) - partitioned.saved_values :]


def saved_bytes(partitioned: PartitionedGraph) -> int:
    return sum(fxn.size_bytes(node.meta["val"]) for node in saved_of(partitioned))


def run_halves(step: Step, partitioned: PartitionedGraph) -> list[Tensor]:
    """Results, then gradients: the backward reads what the forward saved."""
    kinds = [item.kind for item in step.sharded.inputs]
    given = [value for kind, value in zip(kinds, step.values, strict=True) if kind != "tangent"]
    tangents = [value for kind, value in zip(kinds, step.values, strict=True) if kind == "tangent"]
    torch.manual_seed(1)
    forward = list(fx.Interpreter(partitioned.forward).run(*given))
    count = len(forward) - partitioned.saved_values
    inputs = [step.values[i] for i in partitioned.saved_inputs]
    return [*forward[:count], *fx.Interpreter(partitioned.backward).run(*inputs, *forward[count:], *tangents)]


def run_joint(step: Step) -> list[Tensor]:
    torch.manual_seed(1)
    results = fx.Interpreter(step.sharded.graph_module).run(*step.values)
    order = sorted(range(len(results)), key=lambda i: step.sharded.outputs[i].kind == "gradient")
    return [results[i] for i in order]


def recomputed_blocks(partitioned: PartitionedGraph) -> list[str]:
    """The block of every recomputed call in the backward's order, repetitions and free views left out."""
    blocks = find_blocks(partitioned.backward.graph.nodes)
    order = [blocks[node] for node in recomputed_of(partitioned) if node in blocks and not fxn.is_view_of_all(node)]
    return [block for i, block in enumerate(order) if i == 0 or order[i - 1] != block]


BY_KIND = "layers.*=full, layers.[01]=selective, layers.3=none"


@pytest.mark.parametrize("policy", ["none", "full", "layer:2", "selective", BY_KIND, recompute_all], ids=name_of)
def test_every_policy_gives_the_same_bits(llama: Step, policy: Any):
    for ours, theirs in zip(run_halves(llama, llama.split(policy)), run_joint(llama), strict=True):
        assert torch.equal(ours, theirs)


def test_stricter_policies_save_less_and_peak_lower(llama: Step):
    parts = [llama.split(policy) for policy in ("none", "layer:2", "selective", "full")]
    assert [saved_bytes(part) for part in parts] == sorted({saved_bytes(part) for part in parts}, reverse=True)
    none, *others = [predict_step_memory(part) for part in parts]
    for before, after in itertools.pairwise([none, *others]):
        assert after.forward.peak_bytes < before.forward.peak_bytes
    # Full recomputes the first block beside all other gradients: of few tokens that is more than selective holds.
    assert max(memory.backward.peak_bytes for memory in others) < 0.8 * none.backward.peak_bytes


def test_full_saves_what_enters_blocks_and_recomputes_one_at_a_time(llama: Step):
    partitioned = llama.split("full")
    blocks = find_blocks(partitioned.forward.graph.nodes)
    inside = [node for node in saved_of(partitioned) if node in blocks]
    assert {blocks[node] for node in inside} == set(BLOCKS)
    for node in inside:
        assert any(blocks.get(user) != blocks[node] for user in node.users if user.op == "call_function")
    assert len(inside) == LAYERS, "one value leaves each block"
    assert recomputed_blocks(partitioned) == BLOCKS[::-1]


def test_recomputed_values_die_with_their_block(llama: Step):
    """Of what the backward recomputes of a block nothing is read after it has begun with the block before."""
    partitioned = llama.split("full")
    graph = partitioned.backward.graph
    blocks, position = find_blocks(graph.nodes), {node: i for i, node in enumerate(graph.nodes)}
    mine = [node for node in recomputed_of(partitioned) if node in blocks]
    for later, earlier in itertools.pairwise(BLOCKS):
        begun = min(position[node] for node in mine if blocks[node] == later)
        assert max(position[user] for node in mine if blocks[node] == earlier for user in node.users) < begun


def test_every_nth_block_is_recomputed(llama: Step):
    assert recomputed_blocks(llama.split("layer:2")) == ["layers.3", "layers.1"]
    assert recomputed_blocks(llama.split("layer:9")) == []


def test_blocks_have_the_policy_of_the_last_pattern_that_matches(llama: Step):
    """Each is split as it is where all blocks have its policy."""
    mixed = saved_in_blocks(llama.split(BY_KIND))
    for policy, mine in (("selective", ("layers.0", "layers.1")), ("full", ("layers.2",)), ("none", ("layers.3",))):
        alone = saved_in_blocks(llama.split(policy))
        assert [alone[block] for block in mine] == [mixed[block] for block in mine]


def saved_in_blocks(partitioned: PartitionedGraph) -> dict[str, set[str]]:
    blocks = find_blocks(partitioned.forward.graph.nodes)
    saved = saved_of(partitioned)
    return {block: {node.name for node in saved if blocks.get(node) == block} for block in BLOCKS}


def test_a_block_that_no_pattern_names_is_saved(llama: Step):
    assert recomputed_blocks(llama.split("layers.1=full")) == ["layers.1"]


def test_selective_saves_attention_every_second_matmul_and_the_first_residual(llama: Step):
    partitioned = llama.split("selective")
    blocks = find_blocks(partitioned.forward.graph.nodes)
    saved = [node for node in saved_of(partitioned) if blocks.get(node) == "layers.1"]
    matmuls = [n for n in partitioned.forward.graph.nodes if n.target in MATMULS and blocks.get(n) == "layers.1"]
    names = [fxn.custom(node, "module").rpartition(".")[2] for node in matmuls]
    assert names == ["wq", "wk", "wv", "wo", "w1", "w3", "w2"]
    assert {node for node in saved if node.target in MATMULS} == {matmuls[1], matmuls[5]}, "wo's is not read again"
    assert sum(node.target is operator.getitem and fxn.is_attention(node.args[0]) for node in saved) == 2
    first, second = [
        node for node in partitioned.forward.graph.nodes if _is_residual(node) and blocks[node] == "layers.1"
    ]
    assert {first, second} <= set(saved)
    assert len(saved) == 6
    assert not any(map(fxn.is_attention, recomputed_of(partitioned)))


def _is_residual(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and str(fxn.custom(node, "module")) in BLOCKS


def test_decisions_are_handed_over(llama: Step):
    partitioned = llama.split("selective")
    calls = [node for node in partitioned.forward.graph.nodes if node.op == "call_function"]
    assert {node.name for node in calls} <= partitioned.decisions.keys()
    assert {partitioned.decisions[node.name] for node in saved_of(partitioned)} == {"save"}
    for node in recomputed_of(partitioned):
        if isinstance(node.meta["val"], Tensor):
            assert partitioned.decisions[node.name] == "recompute"


def test_a_function_decides_operator_by_operator(llama: Step):
    asked: list[NodeInfo] = []

    def policy(node: NodeInfo) -> str:
        asked.append(node)
        return "save" if node.op == "aten.mm.default" else "prefer_recompute"

    partitioned = llama.split(policy)
    saved = saved_of(partitioned)
    blocks = find_blocks(partitioned.forward.graph.nodes)
    assert {node.name for node in saved if node in blocks} <= {
        node.name for node in asked if node.op == "aten.mm.default" or node.leaves_block
    }
    (up,) = [node for node in asked if node.op == "aten.mm.default" and node.module == "layers.2.feed_forward.w1"]
    assert (up.block, up.dtype, up.leaves_block) == ("layers.2", "float32", False)
    assert up.size_bytes == 4 * up.shape[0] * up.shape[1] and up.source.startswith("llama3.py:")
    assert saved_bytes(llama.split(recompute_all)) == 0


@pytest.mark.parametrize(
    ("answer", "hint"), [("prefer_recomput", "did you mean 'prefer_recompute'"), (None, "must give")]
)
def test_a_function_that_gives_something_else_is_refused(llama: Step, answer: Any, hint: str):
    with pytest.raises(ConfigError, match=rf"gave {answer!r} for \w+ \(\w+\.py:\d+\) \(aten\.\w+\.\w+\).*{hint}"):
        llama.split(lambda node: answer)


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        ("selektive", "'selective'"),
        ("layers:2", "'layer:2'"),
        ("layer:0", "'layer:2'"),
        (3, "write 'none'"),
        ("layers.*=ful", "'full'"),
        ("layers.*=auto", "for each kind of block"),
        ("layers.*=full, head", "for each kind of block"),
    ],
)
def test_a_name_that_is_none_is_refused(policy: Any, hint: str):
    with pytest.raises(ConfigError, match=f"unknown activation_checkpointing .*{hint}"):
        EngineConfig(activation_checkpointing=policy)


class Residual(nn.Module):
    """A block with dropout, checkpointed by the user where it says so."""

    def __init__(self, regions: bool) -> None:
        super().__init__()
        self.up, self.down, self.regions = nn.Linear(8, 16), nn.Linear(16, 8), regions

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.regions else self.inner(x))


class Residuals(nn.Module):
    def __init__(self, regions: tuple[bool, ...]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Residual(region) for region in regions))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.blocks(batch["x"]).square().mean()


@pytest.mark.parametrize("policy", ["full", "selective", recompute_all], ids=name_of)
def test_no_policy_repeats_a_random_draw(policy: Any):
    step = step_of(Residuals((False, True, False)), {"x": torch.randn(4, 8)})
    partitioned = step.split(policy)
    assert any(fxn.is_random(node) for node in partitioned.forward.graph.nodes)
    assert not any(fxn.is_random(node) for node in partitioned.backward.graph.nodes)
    for ours, theirs in zip(run_halves(step, partitioned), run_joint(step), strict=True):
        assert torch.equal(ours, theirs)


def test_the_users_regions_are_theirs_alone():
    step = step_of(Residuals((True, True)), {"x": torch.randn(4, 8)})
    plain, asked = step.split(), []

    def saving(node: NodeInfo) -> str:
        asked.append(node.name)
        return "save"

    kept = step.split(saving)
    assert not {
        n.name for n in step.sharded.graph_module.graph.nodes if fxn.custom(n, "checkpoint_region") is not None
    } & set(asked)
    assert [node.name for node in saved_of(plain)] == [node.name for node in saved_of(kept)]
    names = [node.name for node in step.split("full").backward.graph.nodes]
    assert len(names) == len(set(names)), "nothing is made twice"


PATHS = {
    "siblings alike": (["m.layers.0.a", "m.layers.1.a", "m.norm"], {"m.layers.0", "m.layers.1"}),
    "any name": (["h.0.attn.q", "h.1.attn.q", "h.2.attn.q", "h.2.extra"], {"h.0", "h.1", "h.2"}),
    "without submodules": (["net.0", "net.1", "net.2"], set()),
    "alone": (["net.0.a", "net.1"], set()),
    "unlike": (["m.0.table", "m.1.layers.0.a", "m.1.layers.1.a", "m.2.out"], {"m.1.layers.0", "m.1.layers.1"}),
    "stages of blocks": (
        [f"s.{i}.b.{j}.a" for i in range(2) for j in range(2)], {f"s.{i}.b.{j}" for i in range(2) for j in range(2)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_blocks_are_found_by_their_paths(name: str):
    paths, expected = PATHS[name]
    graph = fx.Graph()
    for path in paths:
        graph.call_function(aten.mm.default, ()).meta["custom"] = {"module": path}
    assert set(find_blocks(graph.nodes).values()) == expected


def test_experts_inside_a_block_are_no_blocks():
    graph = fx.Graph()
    for layer in range(2):
        for path in ("attention", *(f"experts.{i}.up" for i in range(8))):
            target = aten._scaled_dot_product_flash_attention.default if path == "attention" else aten.mm.default
            graph.call_function(target, ()).meta["custom"] = {"module": f"layers.{layer}.{path}"}
    assert set(find_blocks(graph.nodes).values()) == {"layers.0", "layers.1"}


def test_gathered_parameters_joined_to_one_are_gathered_again():
    joint = Joint()
    both = joint(aten.t.default, joint(aten.cat.default, [joint.gathered(), joint.gathered()]))
    weight = joint(aten.slice.Tensor, both, 1, 0, 4)
    y = joint(aten.mm.default, joint["x"], weight)
    partitioned = joint.split(y, joint(aten.mm.default, joint["t"], joint(aten.t.default, weight)))
    assert partitioned.saved_values == 0


class Block:
    """A forward by hand, of calls on small squares that are all of one block."""

    def __init__(self) -> None:
        self._graph, self._calls = fx.Graph(), []
        self.x = self._graph.placeholder("x")

    def call(self, target: Any, *args: Any) -> fx.Node:
        self._calls.append(self._graph.call_function(target, args))
        self._calls[-1].meta["val"] = torch.zeros(4, 4)
        return self._calls[-1]

    def saved(self) -> list[fx.Node]:
        """What ``selective`` saves of it."""
        forward = Forward(calls=self._calls, blocks=dict.fromkeys(self._calls, "layers.0"), leaving=frozenset())
        wishes = wishes_of("selective", forward, self._calls)
        return [node for node in self._calls if wishes[node] == "save"]


def test_what_ranks_add_up_is_saved_behind_the_sum():
    """Every second matmul is saved; one whose parts ranks add is of no use before, so that the sum stands for it."""
    block = Block()
    x, call = block.x, block.call
    first, second = call(aten.mm.default, x, x), call(aten.mm.default, x, x)
    wait = call(collectives.WAIT, call(collectives.REDUCE_SCATTER, call(aten.t.default, second), "sum", 2, "g"))
    gathered = call(collectives.WAIT, call(collectives.ALL_GATHER, wait, 2, "g"))
    call(aten.mm.default, gathered, first)
    fourth = call(aten.mm.default, gathered, x)
    assert block.saved() == [wait, fourth]


def test_what_is_saved_already_is_exchanged_again():
    """An exchange moves elements between ranks: that of attention's result would be saved beside the result itself."""
    block = Block()
    x, call = block.x, block.call

    def exchanged(node: fx.Node) -> fx.Node:
        moved = call(aten.clone.default, call(aten.t.default, node))
        return call(collectives.WAIT, call(collectives.ALL_TO_ALL, moved, [2, 2], [2, 2], "g"))

    query = exchanged(call(aten.mm.default, x, x))
    attention = call(aten._scaled_dot_product_flash_attention_for_cpu.default, query, query, query)
    exchanged(call(operator.getitem, attention, 0))
    assert block.saved() == [query, attention]
