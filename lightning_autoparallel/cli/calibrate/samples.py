"""What is timed, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_autoparallel.cost import GroupShape

Work = Literal["memory", "matmul", "attention"]


@dataclass(frozen=True, kw_only=True)
class KernelSample:
    """One kernel: ``size_bytes`` it reads and writes, ``flops`` it computes, the slowest rank's ``time_us``."""

    work: Work
    dtype: str
    size_bytes: int
    flops: int
    time_us: float


@dataclass(frozen=True, kw_only=True)
class CollectiveSample:
    """One collective over ``axes``: ``size_bytes`` of its larger side, and the slowest rank's ``time_us``."""

    kind: str
    axes: str
    group: GroupShape
    size_bytes: int
    time_us: float


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """A training step of a module with so many ``parameters``; ``graphs_us`` is predicted of its computing."""

    parameters: int
    time_us: float
    graphs_us: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Everything that was measured.

    ``launch_us`` is what starting a collective takes before it is waited for. ``overlap`` has, by repetition, what
    a collective alone, computing alone and both at once took.
    """

    kernels: Sequence[KernelSample] = ()
    collectives: Sequence[CollectiveSample] = ()
    launch_us: float = 0.0
    overlap: Sequence[tuple[float, float, float]] = ()
    steps: Sequence[StepSample] = ()
