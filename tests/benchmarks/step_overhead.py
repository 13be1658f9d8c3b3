"""What Python does in a step beside its graphs, at as many parameters as LLaMA-3 8B has, and what FSDP2's hooks do.

    python -m tests.benchmarks.step_overhead [--layers 32] [--steps 20]

One process as rank 0 of a fake world of eight, so that no collective takes time, with a network so narrow that nothing
else does. It prints the median milliseconds of a micro-step's forward and backward outside of the graphs, and what of
them each item takes. Beside FSDP2, whose hooks and copies are in no graph, whole steps are compared, interpreted, each
less that of the plain module. Then clipping by norm and AdamW, on DTensors, on the local tensors in them, and as a
Trainer steps it.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_autoparallel import parallelize
from lightning_autoparallel.compile import Wiring, step_runner
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.pipeline import engine as engines
from lightning_autoparallel.pipeline.ready_step import ReadyStep
from lightning_autoparallel.pipeline.updates_at_once import updating
from lightning_autoparallel.precision import clip_by_norm
from lightning_autoparallel.torch_compat.collectives import init_fake_world

RANKS = 8
ITEMS: tuple[tuple[str, Any, str], ...] = (
    ("ranks agree (alone here: text of the batch only)", engines, "check_agreement"),
    ("modes of modules", engines.StepEngine, "_module_state"),
    ("parameters and buffers", ReadyStep, "_state"),
    ("local tensors, padded", Wiring, "parts"),
    ("gradients to DTensors", Wiring, "by_input"),
    ("gradients to parameters", step_runner, "give_to_leaves"),
)
Seconds = dict[str, float]


def network(layers: int) -> nn.Module:
    """As many parameters as a LLaMA of so many layers has, and next to nothing to compute."""
    sizes = {"n_layers": layers, "dim": 16, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 32, "multiple_of": 16}
    return Llama3(llama3_config("debug", sizes))


def timed(run: Callable[..., Any], name: str, seconds: Seconds) -> Callable[..., Any]:
    """``run``, whose time is added up under a name."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - start

    return wrapper


@contextlib.contextmanager
def items(seconds: Seconds) -> Iterator[None]:
    """Inside, every item's time is added up, and that of graphs under ``graphs``."""
    real = step_runner.run_step

    def run_step(step: Any, *args: Any, **kwargs: Any) -> Any:
        halves = {
            "forward": timed(step.forward, "graphs", seconds),
            "backward": timed(step.backward, "graphs", seconds),
        }
        return real(replace(step, **halves), *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("lightning_autoparallel.pipeline.ready_step.run_step", run_step))
        for name, holder, attribute in ITEMS:
            stack.enter_context(patch.object(holder, attribute, timed(getattr(holder, attribute), name, seconds)))
        yield


def milliseconds(step: Callable[[], object], steps: int) -> float:
    """The median time of a step, after a few."""
    taken = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:]) * 1e3


def ours(layers: int, tokens: Tensor, steps: int) -> tuple[nn.Module, dict[str, float]]:
    """The module after its steps, and medians in milliseconds by item; autograd's own part is in none of the items."""
    module = network(layers)
    parallel = parallelize(module, (tokens.repeat(RANKS, 1),), {"dp_shard": RANKS}, "fsdp", compile=False)
    rows: list[Seconds] = []
    for _ in range(steps + 3):
        seconds: Seconds = defaultdict(float)
        module.zero_grad()
        with items(seconds):
            start = time.perf_counter()
            parallel(tokens).sum().backward()
            seconds["all"] = time.perf_counter() - start
        rows.append(seconds)
    rows = rows[3:]
    return module, {name: statistics.median(row[name] for row in rows) * 1e3 for name in rows[0]}


def forward_backward(module: nn.Module, tokens: Tensor) -> None:
    """A micro-step."""
    module.zero_grad()
    module(tokens).sum().backward()


def hooks_of_fsdp2(layers: int, tokens: Tensor, steps: int) -> tuple[float, float]:
    """Milliseconds of a step of the plain module, and of FSDP2 around it."""
    plain = network(layers)
    alone = milliseconds(lambda: forward_backward(plain, tokens), steps)
    sharded, mesh = network(layers), init_device_mesh("cpu", (RANKS,))
    for block in sharded.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return alone, milliseconds(lambda: forward_backward(sharded, tokens), steps)


def adamw(parameters: Sequence[Tensor], steps: int, **how: bool) -> float:
    """Milliseconds of an AdamW on parameters whose gradients are there, fused unless ``how`` says otherwise."""
    optimizer = torch.optim.AdamW(parameters, **(how or {"fused": True}))
    return milliseconds(optimizer.step, steps)


def adamw_of_parts(parameters: Sequence[Tensor], steps: int, **how: bool) -> float:
    """The same as a Trainer steps it."""
    optimizer = torch.optim.AdamW(parameters, **how)

    def step() -> None:
        with updating(optimizer):
            optimizer.step()

    return milliseconds(step, steps)


def local_copies(parameters: Sequence[Tensor]) -> list[nn.Parameter]:
    """What a rank holds of them, as plain parameters with gradients."""
    copies = []
    for parameter in parameters:
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        copy = nn.Parameter(parameter.to_local().detach().clone())
        copy.grad = parameter.grad.to_local().clone()
        copies.append(copy)
    return copies


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    init_fake_world(RANKS, 0)
    tokens = torch.randint(0, 32, (1, 8))
    module, medians = ours(given.layers, tokens, given.steps)
    parameters = list(module.parameters())
    print(f"{len(parameters)} parameters, medians of {given.steps} steps in milliseconds")
    outside = medians["all"] - medians["graphs"]
    print(f"{'outside of graphs, a micro-step':<52} {outside:8.2f}")
    for name, _, _ in ITEMS:
        print(f"  {name:<50} {medians[name]:8.2f}")
    alone, fsdp2 = hooks_of_fsdp2(given.layers, tokens, given.steps)
    whole = medians["all"]
    print(f"{'a whole step, less the plain module':<52} {whole - alone:8.2f}   ({whole:.2f} - {alone:.2f})")
    print(f"{'the same of FSDP2':<52} {fsdp2 - alone:8.2f}   ({fsdp2:.2f} - {alone:.2f})")
    print(f"{'ratio':<52} {(whole - alone) / (fsdp2 - alone):8.3f}")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    ranks = init_device_mesh("cpu", (RANKS,))
    print(f"{'clipping by norm':<52} {milliseconds(lambda: clip_by_norm(gradients, 1.0, ranks), given.steps):8.2f}")
    local = adamw(local_copies(parameters), given.steps)
    print(f"{'AdamW one by one, on DTensors':<52} {adamw(parameters, given.steps, foreach=False):8.2f}")
    print(f"{'AdamW all at once, on DTensors':<52} {adamw(parameters, given.steps, foreach=True):8.2f}")
    print(f"{'AdamW fused, on DTensors':<52} {adamw(parameters, given.steps):8.2f}")
    print(f"{'AdamW fused, on the local tensors in them':<52} {local:8.2f}")
    print(f"{'AdamW all at once, as a Trainer steps it':<52} {adamw_of_parts(parameters, given.steps):8.2f}")
    print(f"{'AdamW fused, as a Trainer steps it':<52} {adamw_of_parts(parameters, given.steps, fused=True):8.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
