"""Step time of the debug recipe on two CPU processes: this strategy beside Lightning's DDP and FSDP2.

    python -m tests.benchmarks.step_time [--steps 60] [--rounds 3] [--threads 1] [--compiled-baselines] [--interpreted]

`lightning-autoparallel bench` compares the strategies on any recipe; this adds two plans of ours and CPU time.

Every measurement is a fresh pair of processes over gloo with an empty compiler cache. Contenders take turns, round by
round, so that a machine that is busy for a while is busy for all of them. A step is what lies between Lightning's
`on_train_batch_start` and `on_train_batch_end`: forward, backward, collectives, optimizer and logging, not the loader.
It prints times and ratios and asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.fsdp import fully_shard

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.cli.bench.processes import failure, run_ranks
from lightning_autoparallel.models import Llama3Module, TextDataModule

RANKS = 2
SEED = 42
OURS = "autoparallel fsdp"  # what ratios are relative to
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run as its rank 0 saw it: medians over steps, and seconds from `fit` to the end of the first step.

    Losses are means over the ranks: the last, and those of all steps.
    """

    step_ms: float
    cpu_ms: float
    startup_s: float
    loss: float
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A strategy, and the module that it needs."""

    strategy: Callable[[], Strategy]
    module: type[Llama3Module] = Llama3Module


class CompiledModule(Llama3Module):
    """The network through `torch.compile`."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.compile()


class FSDP2Module(Llama3Module):
    """Every layer sharded by itself, then what is left, as FSDP2's tutorial does."""

    compiled = False

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            if self.compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class CompiledFSDP2Module(FSDP2Module):
    """FSDP2 with each layer through `torch.compile`."""

    compiled = True


def _ours(plan: str, compile: bool = True) -> Strategy:
    return AutoParallelStrategy(plan=plan, mesh={_AXES[plan]: RANKS}, compile=compile, process_group_backend="gloo")


def _ddp() -> Strategy:
    return DDPStrategy(process_group_backend="gloo")


def _fsdp2() -> Strategy:
    return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend="gloo")


_AXES = {"fsdp": "dp_shard", "ddp": "dp_replicate"}
CONTENDERS = {
    OURS: Contender(strategy=lambda: _ours("fsdp")),
    "autoparallel ddp": Contender(strategy=lambda: _ours("ddp")),
    "Lightning DDP": Contender(strategy=_ddp),
    "Lightning FSDP2": Contender(strategy=_fsdp2, module=FSDP2Module),
}
INTERPRETED = {
    "autoparallel fsdp interpreted": Contender(strategy=lambda: _ours("fsdp", compile=False)),
}
COMPILED_BASELINES = {
    "Lightning DDP compiled": Contender(strategy=_ddp, module=CompiledModule),
    "Lightning FSDP2 compiled": Contender(strategy=_fsdp2, module=CompiledFSDP2Module),
}
ALL = CONTENDERS | INTERPRETED | COMPILED_BASELINES


@dataclass
class StepClock(lightning.Callback):
    """Wall and CPU time of every step of this process, and the losses, averaged over ranks."""

    began_s: float = field(default_factory=time.perf_counter)
    startup_s: float = 0.0
    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    _local_losses: list[torch.Tensor] = field(default_factory=list)
    _start: tuple[float, float] = (0.0, 0.0)

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        if not self.wall_ms:
            self.startup_s = wall_s - self.began_s
        self.wall_ms.append((wall_s - self._start[0]) * 1e3)
        self.cpu_ms.append((cpu_s - self._start[1]) * 1e3)
        self._local_losses.append(outputs["loss"].detach().clone())
        if trainer.global_step == trainer.max_steps:
            losses = torch.stack(self._local_losses)
            dist.all_reduce(losses)
            self.losses = (losses / dist.get_world_size()).tolist()

    def result(self, warm_up: int) -> Measurement:
        """Medians over the steps after the first `warm_up`."""
        return Measurement(
            step_ms=statistics.median(self.wall_ms[warm_up:]),
            cpu_ms=statistics.median(self.cpu_ms[warm_up:]),
            startup_s=self.startup_s,
            loss=self.losses[-1],
            losses=self.losses,
        )


def train(contender: Contender, steps: int, warm_up: int, ranks: int = RANKS) -> Measurement:
    """Train the debug recipe's module in this process, one of `ranks`."""
    lightning.seed_everything(SEED, verbose=False)
    module = contender.module(size="debug", lr=1.5e-3, betas=(0.9, 0.95), max_steps=steps)
    data = TextDataModule(seq_len=128, batch_size=8, val_fraction=0.01, max_bytes=1_000_000, seed=SEED)
    data.setup()
    trainer = lightning.Trainer(
        strategy=contender.strategy(),
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    clock = StepClock()
    trainer.callbacks.append(clock)
    trainer.fit(module, datamodule=data)
    return clock.result(warm_up)


def measure(
    name: str, arguments: argparse.Namespace, program: str = "tests.benchmarks.step_time", ranks: int = RANKS
) -> Measurement:
    """Start `ranks` fresh processes of `program` for one contender and wait for rank 0's answer.

    Raises:
        RuntimeError: a rank failed or took too long; the message ends with the last line it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", program, "--as-rank-of", name, "--result", str(result)]
        command += [f"--steps={arguments.steps}", f"--warm-up={arguments.warm_up}", f"--threads={arguments.threads}"]
        codes = run_ranks(command, Path(folder), ranks, arguments.threads, TIMEOUT_S)
        if any(code != 0 for code in codes):
            raise RuntimeError(f"{name}: exit codes {codes}: {failure(Path(folder), codes)}")
        return Measurement(**json.loads(result.read_text()))


HEADER = ("contender", "step ms", "min..max", "x ours", "CPU ms", "x ours", "start-up s", "last loss")


def table(measured: Mapping[str, Sequence[Measurement]]) -> list[list[str]]:
    """Rows below `HEADER`, medians over rounds; ratios are contender / ours, so above 1 ours is faster."""
    ours = measured.get(OURS)
    rows = [list(HEADER)]
    for name, runs in measured.items():
        steps = [run.step_ms for run in runs]
        rows.append(
            [
                name,
                f"{statistics.median(steps):.1f}",
                f"{min(steps):.1f}..{max(steps):.1f}",
                _ratio(runs, ours, "step_ms"),
                f"{_median(runs, 'cpu_ms'):.1f}",
                _ratio(runs, ours, "cpu_ms"),
                f"{_median(runs, 'startup_s'):.1f}",
                f"{_median(runs, 'loss'):.4f}",
            ]
        )
    return rows


def _median(runs: Sequence[Measurement], what: str) -> float:
    return statistics.median(getattr(run, what) for run in runs)


def _ratio(runs: Sequence[Measurement], ours: Sequence[Measurement] | None, what: str) -> str:
    return f"{_median(runs, what) / _median(ours, what):.2f}" if ours else "-"


def show(rows: Sequence[Sequence[str]]) -> str:
    """The rows as aligned text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = (
        [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))] for row in rows
    )
    return "\n".join("  ".join(cells) for cells in aligned)


def compare(names: Sequence[str], arguments: argparse.Namespace) -> dict[str, list[Measurement]]:
    """Measure all contenders once per round, one after the other."""
    measured: dict[str, list[Measurement]] = {name: [] for name in names}
    for turn in range(arguments.rounds):
        for name in names:
            run = measure(name, arguments)
            measured[name].append(run)
            load = os.getloadavg()[0]
            print(f"round {turn + 1}: {name}: {run.step_ms:.1f} ms, load {load:.1f}", file=sys.stderr, flush=True)
    return measured


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, ALL, steps=60, warm_up=10, rounds=3)
    parser.add_argument("--compiled-baselines", action="store_true", help="DDP and FSDP2 with torch.compile as well")
    parser.add_argument("--only", nargs="+", choices=list(ALL), help="these contenders instead")
    return checked(parser, argv)


def make_parser(
    doc: str | None, contenders: Mapping[str, Contender], *, steps: int, warm_up: int, rounds: int
) -> argparse.ArgumentParser:
    """What all comparisons take, with their own defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--warm-up", type=int, default=warm_up, help="first steps that are left out of the times")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")
    parser.add_argument("--interpreted", action="store_true", help="this strategy with compile=False as well")
    parser.add_argument("--as-rank-of", choices=list(contenders), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def checked(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed arguments; ends the program if no step is left to measure."""
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.warm_up < arguments.steps:
        parser.error(f"--warm-up {arguments.warm_up} leaves none of --steps {arguments.steps} to measure")
    return arguments


def be_rank(contender: Contender, arguments: argparse.Namespace, ranks: int = RANKS) -> None:
    """Train as one process of a measurement; rank 0 writes what it measured."""
    torch.set_num_threads(arguments.threads)
    measurement = train(contender, arguments.steps, arguments.warm_up, ranks)
    if os.environ["RANK"] == "0":
        arguments.result.write_text(json.dumps(asdict(measurement)))


def main() -> None:
    """Measure and print, or be one rank of a measurement."""
    arguments = parse()
    if arguments.as_rank_of:
        be_rank(ALL[arguments.as_rank_of], arguments)
        return
    names = list(CONTENDERS)
    names += INTERPRETED if arguments.interpreted else ()
    names += COMPILED_BASELINES if arguments.compiled_baselines else ()
    measured = compare(arguments.only or names, arguments)
    print(f"torch {torch.__version__}, lightning {lightning.__version__}, {RANKS} ranks, {arguments.threads} thread(s)")
    print(f"each; {arguments.rounds} round(s) of {arguments.steps} steps, the first {arguments.warm_up} left out")
    print(show(table(measured)))


if __name__ == "__main__":
    main()
