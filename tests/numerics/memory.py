"""Live tensor bytes of a real step, measured with torch's MemTracker, beside the predicted ones.

MemTracker sees every operator below autograd, functional collectives among them, and counts each storage that one
returns from then until it is freed; the batch, parameters and buffers are shown to it beforehand. Parameter shards are
taken off, as the prediction leaves them out. What operators take for themselves while they run neither side counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_autoparallel import parallelize
from lightning_autoparallel.cost.memory import MemoryTimeline, predict_step_memory
from lightning_autoparallel.models.llama3 import Llama3, llama3_config

ROWS, LENGTH = 4, 128
OVERRIDES = {"n_layers": 4, "vocab_size": 512}


@dataclass(frozen=True, kw_only=True)
class HalfStep:
    """Bytes of one half of a step: at the peak, and when it has returned."""

    peak_bytes: int
    final_bytes: int


class Llama3Loss(nn.Module):
    """Returns the loss, computed in bfloat16 where ``autocast`` says so."""

    def __init__(self, autocast: bool, overrides: Mapping[str, int] = MappingProxyType(OVERRIDES)) -> None:
        super().__init__()
        self.model = Llama3(llama3_config("debug", dict(overrides)))
        self.autocast = autocast

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def measure_step(
    mesh: Mapping[str, int], plan: Any, autocast: bool = False, **options: Any
) -> dict[str, tuple[HalfStep, HalfStep]]:
    """(measured, predicted) of this rank's forward and backward; the loss is held by the caller in between."""
    torch.manual_seed(0)
    module = Llama3Loss(autocast)
    batch = tuple(torch.randint(0, OVERRIDES["vocab_size"], (ROWS, LENGTH)) for _ in range(2))
    parallel = parallelize(module, batch, mesh, plan, compile=False, **options)
    engine = parallel._engine
    (variant,) = (variant for variants in engine._variants.values() for variant in variants)
    predicted = predict_step_memory(variant.step.partitioned)
    data = engine.context.mesh
    rows = tuple(t.chunk(data.data_parallel_size)[data.data_parallel_rank].clone() for t in batch)
    parallel(*rows).backward()
    tracker = MemTracker()
    tracker.track_external(parallel, *rows)
    gradients = [parameter.grad for parameter in parallel.parameters()]
    left = sum(gradient.to_local().nbytes for gradient in gradients)
    shards = _total(tracker, "current") - sum(t.nbytes for t in (*rows, *parallel.buffers())) - left
    with tracker:
        loss = parallel(*rows)
    forward = _measured(tracker, shards)
    gradients.clear()
    parallel.zero_grad()
    with tracker:  # entering again starts a new peak
        loss.backward()
    assert predicted.backward is not None
    return {
        "forward": (forward, _predicted(predicted.forward)),
        "backward": (_measured(tracker, shards), _predicted(predicted.backward)),
    }


def _total(tracker: MemTracker, kind: str) -> int:
    return int(tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"])


def _measured(tracker: MemTracker, shards: int) -> HalfStep:
    return HalfStep(peak_bytes=_total(tracker, "peak") - shards, final_bytes=_total(tracker, "current") - shards)


def _predicted(timeline: MemoryTimeline) -> HalfStep:
    return HalfStep(peak_bytes=timeline.peak_bytes, final_bytes=timeline.live_bytes[-1])
