"""What a checkpoint costs: seconds that a step waits for it, and host memory, beside the rank's share of the state.

    python -m tests.benchmarks.saving [WIDTH]

Two ranks train a stack of linear layers with Adam over gloo and save folders and single files, while the step waits and
in the background; then another training resumes. Seconds are medians of what `save_checkpoint` took; bytes are the most
that the process held above what it held before, of the rank with most. A rank's share are its shards of the parameters
and of the optimizer's state; of a file, rank 0 makes one tensor whole after another. A rank that loads holds the
optimizer's shards, two thirds of its share, when it is done, and did not before. Pages of a mapped file are the
system's, all ranks of a machine share them: memory while loading is `RssAnon`, without them, looked at every
millisecond.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_autoparallel.callbacks.peak_memory import memory_probe
from lightning_autoparallel.strategy.out_of_memory import local_bytes
from lightning_autoparallel.torch_compat.tree import tree_leaves
from tests.distributed.jobs import MESH, Net, make_strategy, make_trainer
from tests.support.worlds import World

SAVES = 4
KINDS = {"folder": True, "file": False}
MODES = {"synchronous": False, "asynchronous": True}
LAYERS = 6


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one training that saves and one that loads, on one rank."""

    blocked_s: float
    saving_bytes: int
    loading_bytes: int
    share_bytes: int


class Stack(Net):
    """Its state is three times its parameters."""

    steps = SAVES + 1

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = [nn.Linear(width, width) for _ in range(LAYERS)]
        self.net = nn.Sequential(nn.Linear(6, width), *inner, nn.Linear(width, 3))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Meter:
    """The most that this process holds above what it held at the start."""

    def __init__(self) -> None:
        self._probe = memory_probe(torch.device("cpu"))
        self._before = 0

    def start(self) -> None:
        """From here on; what was freed is given back to the system first."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._probe.reset()
        self._before = self._probe.peak_bytes()

    @property
    def bytes_above(self) -> int:
        """Up to now."""
        return self._probe.peak_bytes() - self._before


class AnonymousMeter:
    """The most that this process holds above what it held at the start, without what files have mapped into it."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._before = self._most = 0
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        """From here on."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._before = self._most = anonymous_bytes()
        self._thread.start()

    def stop(self) -> int:
        """Bytes."""
        self._ended.set()
        self._thread.join()
        return self._most - self._before

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self._most = max(self._most, anonymous_bytes())


def anonymous_bytes() -> int:
    """What this process holds now, but for files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kilobytes) * 1024


class Saves(Callback):
    """Saves after every step but the first, each time when the write before has ended."""

    def __init__(self, path: str) -> None:
        self.path, self.meter = path, Meter()
        self.blocked_s: list[float] = []
        self.bytes: list[int] = []
        self.share_bytes = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 1:
            return
        state = tree_leaves([optimizer.state for optimizer in trainer.optimizers])
        kept = [leaf for leaf in state if isinstance(leaf, torch.Tensor)]
        self.share_bytes = local_bytes([*pl_module.parameters(), *kept])
        self.meter.start()
        start = time.perf_counter()
        trainer.save_checkpoint(self.path)
        self.blocked_s.append(time.perf_counter() - start)
        trainer.strategy.wait_for_checkpoint()
        self.bytes.append(self.meter.bytes_above)
        trainer.strategy.barrier()


class Loads(Callback):
    """Measures from where the checkpoint is opened to where training goes on."""

    def __init__(self) -> None:
        self.meter, self.bytes = AnonymousMeter(), 0

    def on_train_start(self, trainer, pl_module):
        self.bytes = self.meter.stop()


def cost(width: int, as_folder: bool, in_background: bool, path: str) -> Cost:
    """Train and save, then load, on this rank."""
    options = {"save_distributed_checkpoint": as_folder, "async_save": in_background, "leave_sharded": True}
    saves, loads = Saves(path), Loads()
    _fit(width, options, saves, None)
    _fit(width, options, loads, path)
    return Cost(
        blocked_s=statistics.median(saves.blocked_s),
        saving_bytes=max(saves.bytes),
        loading_bytes=loads.bytes,
        share_bytes=saves.share_bytes,
    )


def _fit(width: int, options: dict[str, Any], callback: Any, resume_from: str | None) -> None:
    torch.manual_seed(0)
    module, strategy = Stack(width), make_strategy(MESH, options)
    trainer = make_trainer(
        strategy, 2, callbacks=[callback], max_steps=SAVES + 1 + (resume_from is not None), max_epochs=-1
    )
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    if resume_from is not None:
        real: Callable[..., Any] = strategy.load_checkpoint

        def load(*args: Any, **kwargs: Any) -> Any:
            callback.meter.start()
            return real(*args, **kwargs)

        strategy.load_checkpoint = load  # type: ignore[method-assign]
    trainer.fit(module, ckpt_path=resume_from)


def measured(width: int) -> dict[tuple[str, str], Cost]:
    """What either kind costs either way, by kind and mode: the most of both ranks."""
    world, found = World(2), {}
    with tempfile.TemporaryDirectory() as folder:
        for (kind, as_folder), (mode, in_background) in itertools.product(KINDS.items(), MODES.items()):
            ranks = world.run(cost, width, as_folder, in_background, str(Path(folder, f"{kind}-{mode}.ckpt")))
            names = [field.name for field in fields(Cost)]
            found[kind, mode] = Cost(**{name: max(getattr(rank, name) for rank in ranks) for name in names})
    world.stop()
    return found


def table(costs: dict[tuple[str, str], Cost]) -> list[str]:
    """Lines to print."""
    lines = []
    for (kind, mode), one in costs.items():
        share = one.share_bytes
        lines.append(
            f"{kind}, {mode}: a step waits {one.blocked_s:.3f} s; the rank's share is {share / 1e6:.1f} MB, "
            f"saving needs {one.saving_bytes / 1e6:.1f} MB ({one.saving_bytes / share:.2f} of it), "
            f"loading {one.loading_bytes / 1e6:.1f} MB ({one.loading_bytes / share:.2f})"
        )
    for kind in KINDS:
        waits, goes_on = (costs[kind, mode].blocked_s for mode in MODES)
        lines.append(f"{kind}: a step waits {goes_on / waits:.2f} times as long for an asynchronous save")
    return lines


if __name__ == "__main__":
    print("\n".join(table(measured(*(int(argument) for argument in sys.argv[1:] or ("1440",))))))
