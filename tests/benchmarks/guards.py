"""What the guards on a step's Python cost: microseconds per step for LLaMA-3 8B, captured on meta.

    python -m tests.benchmarks.guards [LAYERS]

Prints the modules, what is guarded, and the median time of one check; the engine's own part (the modes of submodules,
which tell variants apart) is printed beside it.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_autoparallel.capture import ModuleStates, StepState, capture_step
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from tests.unit._graphs import request_of


def microseconds(run: Callable[[], object], calls: int = 300) -> float:
    """The median time of a call."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def guard_costs(layers: int) -> tuple[int, float, float]:
    """Modules, then microseconds per step: guards, modes of modules."""
    with torch.device("meta"):
        model = Llama3(llama3_config("8B", {"n_layers": layers}))
    state = StepState(model)

    def run(batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

    batch = {name: torch.zeros(1, 256, dtype=torch.long) for name in ("inputs", "targets")}
    capture_step(dataclasses.replace(request_of(model, batch, run), state=state))
    modules, modes = sum(1 for _ in model.modules()), ModuleStates(model)
    assert state.holds(state.values({}))
    return modules, microseconds(lambda: state.holds(state.values({}))), microseconds(modes.key)


if __name__ == "__main__":
    count, guards, modes = guard_costs(*(int(argument) for argument in sys.argv[1:] or ("32",)))
    print(f"{count} modules: guards {guards:.0f} us per step, modes of modules {modes:.0f} us")
