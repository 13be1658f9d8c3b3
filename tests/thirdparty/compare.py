"""One case on all sides, each in fresh processes with a time limit, and what of it is a row of the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.worlds import World, WorldError
from tests.thirdparty.training import ON_GPU, RANKS, Outcome, train

TOLERANCE = 1e-4  # of weights, buffers and losses; relative to those above 1
# Of the way that all weights went together: a wrong factor is seen even where steps are short.
MOVED_SHARE = 1e-2
LIMIT_S = 120
PRELOAD = (
    "tests.thirdparty",
    "torch._inductor.compile_fx",
    "transformers",
    "lightning_autoparallel",
    "tests.thirdparty.training",
)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two trainings are apart."""

    largest: float
    share: float

    @property
    def small(self) -> bool:
        """Whether they are the same training."""
        return self.largest <= TOLERANCE and self.share <= MOVED_SHARE

    def __str__(self) -> str:
        return f"{self.largest:.1e} ({self.share:.0e} of the way)"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case's line: how it ran, how far it is from what it has to equal, or why it did not run."""

    name: str
    mode: str = ""
    oracle: str = ""
    difference: Difference | None = None
    reference: Difference | None = None  # DDP from one device
    notice: str = ""
    error: str = ""
    trace: str = ""

    @property
    def passed(self) -> bool:
        """Whether the case trained to what its mode promises."""
        return not self.error and self.difference is not None and self.difference.small

    def __str__(self) -> str:
        said = f"\n    {self.notice}" if self.notice else ""
        if self.error:
            return f"{self.name:36} {self.mode or '-':8} {(self.error.splitlines() or ['?'])[0]}{said}"
        verdict = "" if self.passed else "  DIFFERENT"
        reference = "" if self.reference is None else f"; ddp {self.reference}"
        return f"{self.name:36} {self.mode:8} {self.difference} from {self.oracle}{reference}{verdict}{said}"


def run_case(name: str, limit_s: float = LIMIT_S, side: str = "ours") -> Row:
    """Train a case under this package, then as its mode's oracle does, and compare.

    On one axis, with `tp` on two, with `gpu` on one GPU.
    """
    ours = _outcomes(name, side, limit_s)
    mode, notice = ours[0].mode, ours[0].notice
    oracle = "gpu_plain" if side == "gpu" else "ddp" if mode == "forward" else "plain"
    expected = [] if any(outcome.error for outcome in ours) else _outcomes(name, oracle, limit_s)
    for side, outcomes in (("", ours), (f"the {oracle} side: ", expected)):
        for outcome in outcomes:
            if outcome.error:
                return Row(name=name, mode=mode, notice=notice, error=side + outcome.error, trace=outcome.trace)
    return Row(name=name, mode=mode, notice=notice, oracle=oracle, difference=difference(ours, expected))


def run_oracles(name: str, limit_s: float = LIMIT_S) -> Row:
    """Only one device and DDP: whether the case itself is sound, and how far rounding carries it."""
    plain, nudged, ddp = (_outcomes(name, side, limit_s) for side in ("plain", "nudged", "ddp"))
    error = next((outcome for outcome in (*plain, *ddp) if outcome.error), None)
    if error is not None:
        return Row(name=name, error=error.error, trace=error.trace)
    return Row(
        name=name,
        mode="nudged",
        oracle="plain",
        difference=difference(nudged, plain),
        reference=difference(ddp, plain),
    )


def difference(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> Difference:
    """State of the first ranks and losses, as means over ranks: where a value is above 1, relative to it."""
    after, expected, before = ours[0].after, theirs[0].after, theirs[0].before
    assert after.keys() == expected.keys(), after.keys() ^ expected.keys()
    off = {name: _distance(after[name], value) for name, value in expected.items()}
    relative = [distance / expected[name].double().abs().clamp(min=1.0) for name, distance in off.items()]
    losses = zip(_mean_losses(ours), _mean_losses(theirs), strict=True)
    largest = [
        *(float(values.max()) for values in relative if values.numel()),
        *(abs(a - b) / max(1.0, abs(b)) for a, b in losses),
    ]
    moved = _norm(_distance(expected[name], weight) for name, weight in before.items())
    return Difference(largest=max(largest), share=_norm(off[name] for name in before) / max(moved, 1e-12))


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Element by element; what is not a number on both sides is alike."""
    if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return torch.full(b.shape, torch.inf, dtype=torch.float64)
    return (a.double() - b.double()).abs().nan_to_num(0.0, posinf=torch.inf)


def _norm(distances: Iterable[Tensor]) -> float:
    return float(sum(float(values.square().sum()) for values in distances) ** 0.5)


def _mean_losses(outcomes: Sequence[Outcome]) -> list[float]:
    return [sum(step) / len(step) for step in zip(*(outcome.losses for outcome in outcomes), strict=True)]


def _outcomes(name: str, side: str, limit_s: float) -> list[Outcome]:
    world = World(RANKS[side], PRELOAD, backend="nccl" if side in ON_GPU else "gloo")
    try:
        return world.run(train, name, side, timeout_s=limit_s)
    except WorldError as error:
        return [Outcome(error=str(error).strip().splitlines()[-1], trace=str(error))]
    finally:
        world.stop()
