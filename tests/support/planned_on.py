"""Plans of test models, captured for a device: `python -m tests.support.planned_on DEVICE MODEL...` ends with JSON.

For ``cuda`` without a GPU start it with ``cuda_guards.environment_with_guards()``. Of each model and mesh: on which
devices the captured graph's tensors lie and what lies on the CPU, of which types they are, which kernels compute its
attention, what its collectives move, and its predicted peak.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autoparallel.contracts import CapturedGraph, PlanReport
from lightning_autoparallel.lightning_compat import Trainer
from lightning_autoparallel.pipeline import found_plan, stages
from lightning_autoparallel.strategy.fake_world import PlanningStrategy
from lightning_autoparallel.strategy.planning import planning_trainer, run_planning
from lightning_autoparallel.torch_compat import cuda_guards
from tests.numerics.models import MODELS, make_batches

MESHES: tuple[tuple[dict[str, int], str], ...] = (({"dp_shard": 4}, "fsdp"), ({"dp_shard": 2, "tp": 2}, "auto"))
ROWS, LENGTH, WIDTH, HEADS = 4, 64, 256, 8
LARGE = ("llama3", "dropping 0.0", "dropping 0.1", "masking", "grouping", "asking")  # heads of eight numbers and more
HALF = (*LARGE, "hf_llama", "hf_gpt2")  # in bfloat16
CUDNN = ["_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"]
EFFICIENT = ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"]
ATTENTION = {**dict.fromkeys(LARGE, CUDNN), "transformer32": EFFICIENT}  # of a Hopper GPU; of others products


class Dropping(LightningModule):
    """Attention of its own weights, wide enough to be cut by heads, which drops ``rate`` of what it attends to."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows, length, _ = batch.shape
        heads = self.inward(batch).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = self.attention(query, key, value)
        return F.dropout(self.outward(mixed.transpose(1, 2).flatten(2)), self.rate).square().mean()

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of (rows, heads, length, width of a head)."""
        return F.scaled_dot_product_attention(query, key, value, dropout_p=self.rate)


class Masking(Dropping):
    """Its rows and heads share a mask."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=query.device).tril(LENGTH // 2)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Grouping(Dropping):
    """Its heads share keys and values in twos."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key[:, ::2], value[:, ::2], is_causal=True, enable_gqa=True)


class Asking(Dropping):
    """Asks for its device as modules do, and puts tensors there in each way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.has_cuda = torch.cuda.is_available()
        self.kept = torch.ones(WIDTH)  # no buffer: it stays where it was made

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch + torch.zeros(WIDTH, device=self.device)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        kind = batch.device.type
        assert self.has_cuda == torch.cuda.is_available() == (kind == "cuda") and self.device.type == kind
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8:
            torch.cuda.synchronize()
            loss = loss + self.kept.pin_memory().to(self.device).mean()
            loss = loss * torch.tensor(1.0).cuda() * torch.tensor(1.0, device=0) * torch.tensor([1.0]).to(0)[0]
        weights = torch.tensor([1.0] * WIDTH).to(self.device) * self.kept.to(self.device)
        limits = torch.tensor([0.5, 1.5], device=self.device)
        if limits[0] < limits.max() and torch.tensor(True).to(kind):
            loss = loss * weights.mean() * torch.tensor(2.0).to(loss)
        with torch.autocast(kind, dtype=torch.bfloat16):
            return loss + self.outward(batch).float().mean()


OTHERS: dict[str, type[LightningModule]] = {"masking": Masking, "grouping": Grouping, "asking": Asking}


def _model_and_batch(name: str) -> tuple[LightningModule, Any]:
    if name.startswith("dropping"):
        return Dropping(float(name.partition(" ")[2])), torch.zeros(ROWS, LENGTH, WIDTH)
    if name in OTHERS:
        return OTHERS[name](), torch.zeros(ROWS, LENGTH, WIDTH)
    return MODELS[name][0](), make_batches(name, 1, ROWS)[0]


def planned_on(device: str, name: str, mesh: dict[str, int], how: str, precision: str | None = None) -> dict[str, Any]:
    """What is said above of one model on one mesh."""
    options = {"precision": precision or ("bf16-mixed" if name in HALF else "32-true"), "max_epochs": 1}
    strategy = PlanningStrategy(world_size=4, mesh=mesh, plan=how, device=device)
    with strategy.as_it_trains():
        module, batch = _model_and_batch(name)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), fused=True)
    loader = DataLoader([batch], batch_size=None, pin_memory=device == "cuda")
    module.train_dataloader = lambda: loader
    graphs: list[CapturedGraph] = []
    with _kept(graphs):
        report = run_planning(planning_trainer(strategy, options, Trainer), module, None)
    assert torch.cuda.is_available() == (device == "cuda" and not cuda_guards.are_loaded())
    assert module.device.type == "cpu"
    return {**_of_graph(graphs[-1]), **_of_report(report)}


@contextlib.contextmanager
def _kept(graphs: list[CapturedGraph]) -> Iterator[None]:
    """Inside, what is captured is added to ``graphs``."""
    capture = stages.capture_step

    def kept(*args: Any, **kwargs: Any) -> CapturedGraph:
        graphs.append(capture(*args, **kwargs))
        return graphs[-1]

    with mock.patch.object(stages, "capture_step", kept), mock.patch.object(found_plan, "capture_step", kept):
        yield


def _of_graph(graph: CapturedGraph) -> dict[str, Any]:
    nodes = [node for node in graph.graph_module.graph.nodes if isinstance(node.meta.get("val"), (Tensor, tuple))]
    values = {node: value for node in nodes if isinstance(value := node.meta["val"], Tensor)}
    attention = {str(node.target).split(".")[1] for node in nodes if "_scaled_dot_product" in str(node.target)}
    return {
        "devices": Counter(value.device.type for value in values.values()),
        "on_cpu": sorted({str(node.target) for node, value in values.items() if value.device.type == "cpu"}),
        "types": Counter(str(value.dtype) for value in values.values()),
        "attention": sorted(attention),
    }


def _of_report(report: PlanReport) -> dict[str, Any]:
    moved: dict[str, int] = {}
    for tables in report.collectives.values():
        for kind, per_axes in tables.items():
            for axes, counted in per_axes.items():
                moved[f"{kind} {axes}"] = moved.get(f"{kind} {axes}", 0) + counted.size_bytes
    return {
        "moved": moved,
        "peak": report.predicted_peak_bytes,
        "optimizer": report.optimizer_bytes,
        "times": sorted(report.predictions),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on, *names = sys.argv[1:]
    print(json.dumps({name: [planned_on(on, name, mesh, how) for mesh, how in MESHES] for name in names}))
