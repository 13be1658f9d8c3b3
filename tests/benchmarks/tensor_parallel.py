"""Tensor and data parallelism on 2 x 2 CPU processes: rules of this strategy beside Lightning's ModelParallelStrategy.

    python -m tests.benchmarks.tensor_parallel [--steps 30] [--rounds 1] [--threads 1] [--interpreted]

The other side is written by hand, as its tutorial does: `parallelize_module` with sequence parallelism, then
`fully_shard`. Both cut the same weights of the debug recipe's module in the same way. It prints step times and their
ratio, and fails if the losses of any step differ by more than 1e-5, relative.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.models import Llama3Module
from tests.benchmarks.step_time import Contender, Measurement, be_rank, checked, make_parser, measure
from tests.numerics.rules import RULES

RANKS = 4
TOLERANCE = 1e-5
OURS, THEIRS = "autoparallel rules", "ModelParallelStrategy"
INTERPRETED = "autoparallel rules interpreted"


class HandWritten(Llama3Module):
    """The network cut by hand: tensor and sequence parallel, then sharded layer by layer."""

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        cut(self.model, self.device_mesh["tensor_parallel"])
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Columns, then rows, of every layer; between layers values lie in shards of the sequence."""
    whole_sequence = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    in_layer = {
        "attention_norm": SequenceParallel(),
        "attention": whole_sequence,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    around = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, around)
    for layer in model.layers:
        parallelize_module(layer, mesh, in_layer)


def _ours(compile: bool) -> Strategy:
    plan = {"base": "fsdp", "rules": RULES["llama3"]}
    mesh = {"dp_shard": 2, "tp": 2}
    return AutoParallelStrategy(mesh=mesh, plan=plan, compile=compile, process_group_backend="gloo")


def _theirs() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, process_group_backend="gloo")


CONTENDERS = {
    OURS: Contender(strategy=lambda: _ours(compile=True)),
    INTERPRETED: Contender(strategy=lambda: _ours(compile=False)),
    THEIRS: Contender(strategy=_theirs, module=HandWritten),
}


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Of two losses of one step, relative."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def compare(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, list[Measurement]]:
    """Measure all contenders once per round, one after the other.

    Raises:
        AssertionError: a contender's losses are not those of the hand-written side.
    """
    measured: dict[str, list[Measurement]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            measured[name].append(measure(name, arguments, program="tests.benchmarks.tensor_parallel", ranks=RANKS))
    for name, runs in measured.items():
        difference = max(largest_difference(run.losses, measured[THEIRS][0].losses) for run in runs)
        assert difference <= TOLERANCE, f"{name}: losses differ by {difference:.1e} from those of {THEIRS}"
    return measured


def lines(measured: dict[str, list[Measurement]]) -> list[str]:
    """What is printed: medians over rounds, and each contender's step time over the hand-written side's."""
    steps = {name: statistics.median(run.step_ms for run in runs) for name, runs in measured.items()}
    theirs = measured[THEIRS][0].losses
    return [
        f"{name}: {steps[name]:.1f} ms a step, {steps[name] / steps[THEIRS]:.2f} times {THEIRS}, "
        f"losses within {max(largest_difference(run.losses, theirs) for run in runs):.1e}"
        for name, runs in measured.items()
    ]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    return checked(make_parser(__doc__, CONTENDERS, steps=30, warm_up=5, rounds=1), argv)


def main() -> None:
    """Measure and print, or be one rank of a measurement."""
    arguments = parse()
    if arguments.as_rank_of:
        be_rank(CONTENDERS[arguments.as_rank_of], arguments, RANKS)
        return
    names = [name for name in CONTENDERS if name != INTERPRETED or arguments.interpreted]
    measured = compare(names, arguments)
    print(
        f"2 x 2 ranks over gloo, {arguments.threads} thread(s) each, {arguments.rounds} round(s) of {arguments.steps}"
    )
    print(*lines(measured), sep="\n")


if __name__ == "__main__":
    main()
