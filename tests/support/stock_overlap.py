"""Torch's own overlap scheduler on graphs of this package, with this package's costs (torch 2.13)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor.fx_passes import overlap_scheduling
from torch._inductor.fx_passes.memory_estimator import MemoryTracker
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.collective import collective_time_us
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.tracing import fake_mode_of

aten = torch.ops.aten
_GATHER_OUT = collectives.c10d.all_gather_into_tensor_out.default
_COLLECTIVES = {_GATHER_OUT: "all_gather"}


def schedule_as_torch(
    module: fx.GraphModule, costs: CostModel, *, bucketing: bool, increase_gb: float | None, ratio: float | None
) -> fx.GraphModule:
    """The graph in the order of ``schedule_overlap_bucketing``, with its buckets where ``bucketing`` says so.

    It runs as it does on a GPU: its tracker of memory, which leaves CPU tensors out, counts them here; its estimates
    of compute, which need triton, and of collectives are ``costs``. ``increase_gb`` and ``ratio`` are its limits of
    memory above that of the order it finds. The gathers it writes into one buffer become functional ones, which this
    package can price.
    """
    refresh_values(module)
    compute_ms, collective_ms = _estimates(module.graph, costs)

    def estimate(node: fx.Node, override_size: int | None) -> float:
        return collective_ms(node, override_size) if _kind(node) else compute_ms(node)

    with (
        mock.patch.object(overlap_scheduling, "MemoryTracker", partial(MemoryTracker, device_filter=lambda _: True)),
        mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", compute_ms),
    ):
        scheduled = overlap_scheduling.schedule_overlap_bucketing(
            module,
            collective_bucketing=bucketing,
            pre_bucketing_fsdp_collectives=bucketing,
            max_compute_pre_fetch=50,
            custom_runtime_estimation=estimate,
            compute_estimator="analytical",
            max_memory_increase_gb=increase_gb,
            max_memory_increase_ratio=ratio,
        )
    functionalise_gathers(scheduled.graph)
    scheduled.graph.lint()
    return scheduled


def refresh_values(module: fx.GraphModule) -> None:
    """Give every node a fake value of its own: torch tells aliases by the storages of fake tensors."""
    placeholders = module.graph.find_nodes(op="placeholder")
    mode = fake_mode_of(placeholders[0].meta["val"])
    with mode:
        inputs = [_fresh(node.meta["val"]) for node in placeholders]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)


def _fresh(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _estimates(
    graph: fx.Graph, costs: CostModel
) -> tuple[Callable[[fx.Node], float], Callable[[fx.Node, int | None], float]]:
    times_us = costs.graph_times_us(graph)

    def compute_ms(node: fx.Node) -> float:
        return times_us.get(node, 0.0) / 1e3

    def collective_ms(node: fx.Node, override_size: int | None) -> float:
        size_bytes = fxn.collective_size_bytes(node) if override_size is None else override_size
        group = costs.groups[fxn.group_of(node)]
        return collective_time_us(_kind(node) or "", size_bytes, group, costs.hardware) / 1e3

    return compute_ms, collective_ms


def _kind(node: fx.Node) -> str | None:
    return fxn.collective_kind(node) or _COLLECTIVES.get(node.target)  # type: ignore[call-overload]


def functionalise_gathers(graph: fx.Graph) -> None:
    """Replace gathers into a buffer, which already holds this rank's part, by gathers of what was copied there."""
    for gather in graph.find_nodes(op="call_function", target=_GATHER_OUT):
        part, ranks, group = gather.args
        filled = _written_into(part)
        with graph.inserting_before(gather):
            replaced = graph.call_function(collectives.ALL_GATHER, (filled or part, ranks, group))
        replaced.meta = dict(gather.meta)
        gather.replace_all_uses_with(replaced)
        graph.erase_node(gather)
        _erase_unread(part)


def _written_into(part: fx.Node) -> fx.Node | None:
    """What is copied into this part of a buffer, if that is how it is filled."""
    if part.target is aten.copy_.default:
        return part.args[1]  # type: ignore[return-value]
    return next((user.args[1] for user in part.users if user.target is aten.copy_.default), None)  # type: ignore[misc]


def _erase_unread(node: fx.Node) -> None:
    for user in list(node.users):
        if user.target is aten.copy_.default and not user.users:
            node.graph.erase_node(user)
    is_part = node.target in (aten.copy_.default, aten.slice.Tensor, aten.empty.memory_format, operator.getitem)
    if node.users or not is_part:
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unread(source)
