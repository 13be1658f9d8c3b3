"""Where memory runs out, the error says what was predicted to need it, and stays what it is."""

from __future__ import annotations

import contextlib
import re
import traceback
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_autoparallel.compile import step_runner as compiled_step
from lightning_autoparallel.pipeline import ready_step
from tests.distributed.jobs import MESH, Net, make_strategy, make_trainer
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

CASES = [("forward", "auto"), ("backward", "auto"), ("optimizer", "auto"), ("forward", "forward")]
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (ready_step, "run_step"),
    "backward": (compiled_step, "_run_backward"),
    "optimizer": (torch.optim.SGD, "step"),
}
SHARDS = (4 * (2500 * 6 + 2 * 5000 + 2), 4 * (2500 * 6 + 1 * 5000 + 1))  # of the parameters, by rank
HELD = {"fsdp": SHARDS, "auto": (4 * (5000 * 6 + 3 * 5000 + 3),) * 2}  # so small a module is found to lie whole


class Wide(Net):
    """Its largest tensor is the first layer's weight, which is gathered, or its gradient: 5000 x 6 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5000, bias=False), nn.Tanh(), nn.Linear(5000, 3))


def run_out(*args: Any, closure: Any = None, **kwargs: Any) -> Any:
    """As CUDA's allocator does, and as that of the host really does; an optimizer has its gradients by then."""
    if closure is not None:
        closure()
    if dist.get_rank() == 0:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    return torch.empty(10**15)


def fit(where: str, capture: str, plan: str, ranks: tuple[int, ...]) -> tuple[str, str]:
    """The error that ended the training when memory ran out on `ranks`: its type, and what is shown of it."""
    torch.manual_seed(0)
    options = {"capture": capture, "plan": plan, "timeout": timedelta(seconds=30)}
    strategy, module = make_strategy(MESH, options), Wide()
    trainer = make_trainer(strategy, 2)
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    owner, name = PLACES[where]
    failing = mock.patch.object(owner, name, run_out) if dist.get_rank() in ranks else contextlib.nullcontext()
    try:
        with failing:
            trainer.fit(module)
    except Exception as error:
        return type(error).__name__, "".join(traceback.format_exception_only(error))
    return "none", ""


@pytest.mark.parametrize("plan", HELD)
@pytest.mark.parametrize(("where", "capture"), tiered(CASES, lambda case: case == ("backward", "auto")))
def test_the_error_adds_what_was_predicted(where: str, capture: str, plan: str, worlds: Worlds) -> None:
    found = plan == "auto" and capture == "auto"  # in forward mode none is
    held = HELD["auto" if found else "fsdp"]
    for rank, (kind, shown) in enumerate(worlds(2).run(fit, where, capture, plan, (0, 1))):
        assert kind == ["OutOfMemoryError", "RuntimeError"][rank]
        assert ["CUDA out of memory", "DefaultCPUAllocator"][rank] in shown
        assert f"this rank holds {held[rank] / 1024:.1f} KiB of parameters and 0 B of optimizer state" in shown
        assert ("with a smaller memory_budget_gib, by which plan 'auto' shares out" in shown) == found
        assert "activation_checkpointing='full', or smaller batches (accumulate_grad_batches), it needs less" in shown
        assert re.search(r"predicted for training_step.* \((forward|backward)\):\n  a peak of [\d.]+ KiB", shown)
        largest = re.findall(r"^  ([\d.]+) KiB: \S+ \(", shown, re.MULTILINE)
        assert f"{5000 * 6 * 4 / 1024:.1f}" in largest  # alone, and as a part of what is gathered together
        assert largest == sorted(largest, key=float, reverse=True)


def test_one_rank_alone(worlds: Worlds) -> None:
    endings = worlds(2).endings(fit_or_raise, "forward", "auto", "auto", (1,))
    assert "RuntimeError" in str(endings[1]) and "a peak of" in str(endings[1])
    assert "OtherRankError: rank 1 has failed: RuntimeError" in str(endings[0])
    assert "a peak of" not in str(endings[0])


def fit_or_raise(*args: Any) -> None:
    """The process then ends, as it would."""
    kind, shown = fit(*args)
    raise AssertionError(f"{kind}: {shown}")
