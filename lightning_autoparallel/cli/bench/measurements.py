"""What is measured, by whom, and what came out: plain values that travel as JSON between processes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Kind = Literal["autoparallel", "ddp", "fsdp2"]
OURS: Final = "autoparallel"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to train the config: a strategy, and what differs from the config's ``strategy:`` section."""

    name: str
    kind: Kind = OURS
    compiled: bool = False  # torch.compile around the modules of one of Lightning's strategies
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every process of one measurement is told.

    ``config`` holds the sections of the parsed config; ``steps`` batches are timed after ``warmup`` others.
    """

    config: Mapping[str, Any]
    contender: Contender
    processes: int
    warmup: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One process's own measurement.

    ``step_ms`` and ``launches`` are of the timed batches, each from its start to the start of the next; ``losses`` are
    this process's, of all batches. ``compile_s`` is None where compiling cannot be told from the first step, and
    ``planned_launches`` where nothing is planned. ``sent_bytes`` left the host per timed batch, through the network
    interface that gloo is told to use; None if it is told none. ``cpu_ms`` are of this process, all threads, per timed
    batch. ``predicted_ms`` are of a whole step, where the hardware's rates were measured. ``graphs`` is equal for steps
    that run the same calls in the same order.
    """

    step_ms: Sequence[float]
    launches: Sequence[int]
    losses: Sequence[float]
    peak_bytes: int
    memory_label: str
    startup_s: float
    compile_s: float | None
    planned_launches: int | None
    accumulated: int
    device: str
    backend: str
    sent_bytes: float | None = None
    cpu_ms: float | None = None
    predicted_ms: float | None = None
    graphs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of one contender: rank 0's times, launches and bytes, the largest peak of all ranks, losses averaged."""

    step_ms: float
    launches: float
    peak_bytes: int
    startup_s: float
    compile_s: float | None
    losses: Sequence[float]
    planned_launches: int | None = None
    memory_label: str = ""
    device: str = ""
    backend: str = ""
    sent_bytes: float | None = None
    cpu_ms: float | None = None
    predicted_ms: float | None = None
    graphs: str | None = None


@dataclass(frozen=True, kw_only=True)
class Runs:
    """All rounds of one contender, and what went wrong in others."""

    contender: Contender
    measured: Sequence[Measurement] = ()
    errors: Sequence[str] = ()

    def median(self, what: str) -> float | None:
        """The median over rounds of one quantity of `Measurement`; None if there is none."""
        values = self.values(what)
        return statistics.median(values) if values else None

    def values(self, what: str) -> list[float]:
        """One quantity of every round that has it."""
        found = [getattr(run, what) for run in self.measured]
        return [value for value in found if value is not None]


def combine(ranks: Sequence[RankResult]) -> Measurement:
    """One measurement from those of its processes, rank 0 first.

    With gradients accumulated over k batches, k of them are one window, whose mean counts: the optimizer runs once in
    each.
    """
    first = ranks[0]
    return Measurement(
        step_ms=statistics.median(window_means(first.step_ms, first.accumulated)),
        launches=statistics.median(window_means(first.launches, first.accumulated)),
        peak_bytes=max(rank.peak_bytes for rank in ranks),
        startup_s=max(rank.startup_s for rank in ranks),
        compile_s=first.compile_s,
        losses=[statistics.fmean(losses) for losses in zip(*(rank.losses for rank in ranks), strict=True)],
        planned_launches=first.planned_launches,
        memory_label=first.memory_label,
        device=first.device,
        backend=first.backend,
        sent_bytes=first.sent_bytes,
        cpu_ms=first.cpu_ms,
        predicted_ms=first.predicted_ms,
        graphs=first.graphs,
    )


def window_means(values: Sequence[float], size: int) -> list[float]:
    """Means of consecutive windows of ``size`` values; a rest that fills none is left out."""
    whole = len(values) // size * size
    return [statistics.fmean(values[start : start + size]) for start in range(0, whole, size)]
