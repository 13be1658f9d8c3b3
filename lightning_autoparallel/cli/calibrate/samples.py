"""What is timed, and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_autoparallel.cost import GroupShape
from lightning_autoparallel.cost.hardware import Work

KernelWork = Work | Literal["memory", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class KernelSample:
    """One kernel: ``size_bytes`` it reads and writes, ``flops`` it computes, the slowest rank's ``time_us``.

    Causal attention counts the FLOPs of half of its pairs.
    """

    work: KernelWork
    dtype: str
    size_bytes: int
    flops: int
    time_us: float
    is_causal: bool = False


@dataclass(frozen=True, kw_only=True)
class OverlapSample:
    """What a collective took alone, some computing alone, and both at once."""

    communicating_us: float
    computing_us: float
    both_us: float


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

    ``launch_us`` is what starting a collective takes before it is waited for. ``longer`` are those in which computing
    takes longer than the collective beside it, ``shorter`` those in which it takes less. ``late_share`` is how much
    kernels were lengthened by, as ranks of a step wait for the slowest of them.
    """

    kernels: Sequence[KernelSample] = ()
    collectives: Sequence[CollectiveSample] = ()
    launch_us: float = 0.0
    late_share: float = 0.0
    longer: Sequence[OverlapSample] = ()
    shorter: Sequence[OverlapSample] = ()
    steps: Sequence[StepSample] = ()
