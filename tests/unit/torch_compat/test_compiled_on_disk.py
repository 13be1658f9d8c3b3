"""A graph that was compiled once is loaded the next time, with the layouts of its results; another one is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_autoparallel.torch_compat import compiled_on_disk, inductor
from lightning_autoparallel.torch_compat.inductor import LoweredGraph, compile_graph
from lightning_autoparallel.torch_compat.tracing import active_fake_mode, fake_mode_of, fake_tracing


def graph_of(function: Callable[..., Tensor]) -> fx.GraphModule:
    with fake_tracing():
        example = torch.empty(4, 6)
        traced = make_fx(lambda x: (function(x), x.t().clone()))(example)
    return traced


def compiled(function: Callable[..., Tensor]) -> tuple[LoweredGraph, int, int]:
    """The lowered graph, how many graphs were found on disk, and how many were not."""
    counters.clear()
    graph = graph_of(function)
    lowered = compile_graph(graph, is_inference=True, is_backward=False)
    (placeholder,) = (node for node in graph.graph.nodes if node.op == "placeholder")
    assert fake_mode_of(placeholder.meta["val"]).shape_env is None
    seen = counters["inductor"]
    return lowered, seen["fxgraph_cache_hit"], seen["fxgraph_cache_miss"]


@pytest.fixture(autouse=True)
def empty_cache():
    with fresh_cache():
        yield
    assert active_fake_mode() is None


def test_the_second_time_it_is_loaded():
    first, *found = compiled(lambda x: torch.sin(x) * 2)
    assert found == [0, 1]
    second, *found = compiled(lambda x: torch.sin(x) * 2)
    assert found == [1, 0]
    assert first.output_strides == second.output_strides != ()
    x = torch.randn(4, 6)
    for ours, theirs in zip(first.call([x.clone()]), second.call([x.clone()]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_another_graph_is_not():
    compiled(lambda x: torch.sin(x) * 2)
    lowered, *found = compiled(lambda x: torch.sin(x) * 3)
    assert found == [0, 1]
    x = torch.randn(4, 6)
    torch.testing.assert_close(lowered.call([x.clone()])[0], torch.sin(x) * 3)


def test_another_number_of_threads_is_another_graph():
    threads = torch.get_num_threads()
    compiled(lambda x: torch.sin(x) * 2)
    try:
        torch.set_num_threads(threads + 1)
        _, *found = compiled(lambda x: torch.sin(x) * 2)
    finally:
        torch.set_num_threads(threads)
    assert found == [0, 1]


def test_code_for_other_vectors_is_another_graph(monkeypatch):
    """It would be built with headers for this CPU, and write beyond what it reads."""
    compiled(lambda x: torch.sin(x) * 2)
    monkeypatch.setattr(compiled_on_disk, "pick_vec_isa", lambda: "of another CPU")
    _, *found = compiled(lambda x: torch.sin(x) * 2)
    assert found == [0, 1]


def test_a_users_tag_is_kept():
    compiled(lambda x: torch.sin(x) * 2)
    with torch.compiler.config.patch(cache_key_tag="mine"):
        _, *found = compiled(lambda x: torch.sin(x) * 2)
        assert found == [0, 1]
    assert compiled(lambda x: torch.sin(x) * 2)[1:] == (1, 0)


def test_shapes_that_are_there_stay_and_the_key_knows_the_cpu():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    own = mode.shape_env
    with compiled_on_disk.kept_on_disk(mode, on_cpu=True):
        assert mode.shape_env is own
        assert str(pick_vec_isa()) in torch.compiler.config.cache_key_tag
    assert mode.shape_env is own and torch.compiler.config.cache_key_tag == ""


def test_a_tensor_that_a_graph_makes_on_the_cpu_counts():
    with fake_tracing():
        makes = make_fx(lambda: (torch.ones(3),))()
        takes = make_fx(lambda x: (x + 1,))(torch.empty(3, device="meta"))
    assert inductor._has_cpu_tensors(makes.graph)
    assert not inductor._has_cpu_tensors(takes.graph)


def test_a_user_can_switch_it_off():
    with inductor_config.patch(fx_graph_cache=False):
        for _ in range(2):
            _, *found = compiled(lambda x: torch.sin(x) * 2)
            assert found == [0, 0]


def test_a_folder_that_cannot_be_made_is_none(monkeypatch):
    def fails() -> str:
        raise PermissionError("read-only")

    assert compiled_on_disk.cache_folder() is not None
    with inductor_config.patch(fx_graph_cache=False):
        assert compiled_on_disk.cache_folder() is None
    monkeypatch.setattr(compiled_on_disk, "cache_dir", fails)
    assert compiled_on_disk.cache_folder() is None
