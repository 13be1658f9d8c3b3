"""Whether a training is that of the oracle which its mode promises."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.semantics.base import Case
from tests.semantics.run import Outcome

ABSOLUTE = 2e-6
LINE = re.compile(r"\w+\.py:\d+")
# no line of the step made that
OF_BATCH = re.compile("batch leaf .[0-9a-z_.]+. has other values on rank")
FORWARD = re.compile("runs in forward mode")


def judge(
    kind: type[Case],
    how: str,
    outcomes: list[Outcome],
    plain: Outcome,
    ddp: Callable[[], list[Outcome]] | None = None,
) -> None:
    """Asserts that each rank's outcome is the right one; `ddp` is left out on one rank, where it is the plain one."""
    if any(outcome.error for outcome in outcomes):
        if how == "step" and kind.oracle != "ddp" and "losses" not in kind.uncompared:
            for outcome in outcomes:  # what came before the refusal was right
                so_far = plain.losses[: len(outcome.losses)]
                torch.testing.assert_close(outcome.losses, so_far, rtol=kind.tolerance or 1e-5, atol=ABSOLUTE)
        return refused(kind, how, outcomes)
    first = outcomes[0]
    mode = first.modes.get("training_step", "step")
    assert all(outcome.modes == first.modes for outcome in outcomes), [outcome.modes for outcome in outcomes]
    if how == "auto":
        alone = len(outcomes) == 1 and kind.oracle == "ddp"
        assert alone or mode in kind.modes, f"ran as {mode!r}: {_about_mode(first)}"
    assert_captures(kind, first, mode)
    oracles = Oracles(kind, plain, ddp, len(outcomes))
    for rank, outcome in enumerate(outcomes):
        found = list(differences(kind, outcome, oracles, rank))
        if found:
            other = {**outcome.modes, "training_step": "forward" if mode == "step" else "step"}
            alike = not list(differences(kind, outcome, oracles, rank, other))
            also = "it is the other mode's" if alike else "SILENTLY WRONG: it is the other mode's neither"
            raise AssertionError(f"rank {rank}, {outcome.modes or mode}, {also}:\n" + "\n".join(found[:8]))
        kind.check(outcome)
    if how == "auto":
        assert_said(kind, first)


class Oracles:
    """Who is right, by mode and rank; DDP trains only where it is asked."""

    def __init__(self, kind: type[Case], plain: Outcome, ddp: Callable[[], list[Outcome]] | None, world: int) -> None:
        self._only_ddp, self._plain, self._ddp, self.world = kind.oracle == "ddp", plain, ddp, world

    def of(self, mode: str, rank: int) -> Outcome:
        """The outcome that the rank's must equal."""
        if self._ddp is None or (mode == "step" and not self._only_ddp):
            return self._plain
        return self._ddp()[rank]


def refused(kind: type[Case], how: str, outcomes: list[Outcome]) -> None:
    """A refusal is of all ranks, before the first step, with the text that the case or the mode allows."""
    errors = [outcome.error or "no error" for outcome in outcomes]
    assert all(outcome.error for outcome in outcomes), errors
    if how == "step":  # nothing else is wanted, and what cannot be captured may come late, in another branch or loop
        located = LINE.search(errors[0]) or OF_BATCH.search(errors[0])
        assert located or (kind.refusal and re.search(kind.refusal, errors[0])), errors[0]
        return
    assert not any(outcome.losses for outcome in outcomes), f"stopped in the middle: {errors[0]}"
    assert kind.refusal is not None and re.search(kind.refusal, errors[0]), errors[0]


def assert_said(kind: type[Case], outcome: Outcome) -> None:
    """What left the whole step said so once, with the user's line."""
    left = sum(mode == "forward" for mode in outcome.modes.values())
    said = [text for text in outcome.warnings if FORWARD.search(text)]
    assert len(said) == left, f"{left} steps in forward, said {said}"
    without = [text for text in said if kind.names_line and not LINE.search(text)]
    assert not without, f"right, but names no line: {without}"


def assert_captures(kind: type[Case], outcome: Outcome, mode: str) -> None:
    """No more captures than the case allows."""
    again = sum("training_step is captured again" in text for text in outcome.warnings)
    if kind.captures is not None and mode == "step":
        assert 1 + again <= kind.captures, f"{1 + again} captures: {outcome.warnings}"


def differences(
    kind: type[Case], got: Outcome, oracles: Oracles, rank: int, modes: dict[str, str] | None = None
) -> Iterator[str]:
    """One line for each thing that is not the oracle's of the mode of the step that made it."""
    if modes is None and len(set(got.mode_at)) == 2:
        yield from _mixed_differences(kind, got, oracles, rank)
        return
    modes = got.modes if modes is None else modes
    sides = [oracles.of(modes.get(f"{name}_step", "step"), rank) for name in ("training", "validation", "predict")]
    compare = Compare(kind.tolerance or (1e-6 if oracles.world == 1 else 1e-5), kind.rows, rank, oracles.world)
    yield from _losses(kind, got, sides[0].losses, compare)
    yield from _all_but_losses(kind, got, sides, compare, oracles.of("forward", rank) if kind.rows_elsewhere else None)


def _mixed_differences(kind: type[Case], got: Outcome, oracles: Oracles, rank: int) -> Iterator[str]:
    """Of a training that left the whole step in its middle: each step's loss by its own mode, the rest by either."""
    compare = Compare(kind.tolerance or (1e-6 if oracles.world == 1 else 1e-5), kind.rows, rank, oracles.world)
    step, forward = oracles.of("step", rank), oracles.of("forward", rank)
    by_mode = {"step": step.losses, "forward": forward.losses}
    yield from _losses(kind, got, [by_mode[mode][i] for i, mode in enumerate(got.mode_at)], compare)
    if kind.remembers and oracles.world > 1:
        yield from compare("parameters", got.parameters, forward.parameters)
        return
    found = [list(_all_but_losses(kind, got, [side] * 3, compare, None)) for side in (step, forward)]
    paths = {line.partition(": ")[0] for line in found[0]}
    yield from (line for line in found[1] if line.partition(": ")[0] in paths)


def _losses(kind: type[Case], got: Outcome, expected: list[float | None], compare: Compare) -> Iterator[str]:
    losses = got.losses
    if kind.skips:
        losses = [None if other is None else loss for loss, other in zip(losses, expected, strict=False)]
    yield from compare("losses", losses, expected)


def _all_but_losses(
    kind: type[Case], got: Outcome, sides: list[Outcome], compare: Compare, elsewhere: Outcome | None
) -> Iterator[str]:
    train, validation, predict = sides
    yield from compare("results", got.results, train.results)
    # Attributes are the training's, or the validation's where only that writes them.
    owners = (train, validation) if kind.validates else (train,)
    kept = [list(compare("kept", _without(kind, got.kept), _without(kind, side.kept))) for side in owners]
    yield from kept[0] if all(kept) else ()
    yield from compare("validated", got.validated, validation.validated)
    predicted = list(compare("predicted", got.predicted, predict.predicted))
    if predicted and elsewhere is not None:
        predicted = list(compare("predicted", got.predicted, elsewhere.predicted))
    yield from predicted
    for is_validation, side in ((False, train), (True, validation)):
        mine, other = (_of_step(_without(kind, rows.logged), is_validation) for rows in (got, side))
        yield from compare("logged", mine, other)
        mine, other = (_of_step(_without(kind, [rows.metrics]), is_validation) for rows in (got, side))
        yield from compare("metrics", mine, other)
    yield from compare("parameters", got.parameters, train.parameters)
    if kind.prints:
        yield from compare("printed", got.printed, train.printed)
    if kind.warns:
        yield from compare("warned", _said(got, kind.warns), _said(train, kind.warns))


def _said(outcome: Outcome, text: str) -> list[str]:
    return [warning for warning in outcome.warnings if text in warning]


def _without(kind: type[Case], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in kind.uncompared} for row in rows]


def _of_step(rows: list[dict[str, Any]], is_validation: bool) -> list[dict[str, Any]]:
    shared = {"step", "epoch"}
    kept = [{k: v for k, v in row.items() if k in shared or k.startswith("val") == is_validation} for row in rows]
    return [row for row in kept if row.keys() - shared]


def _about_mode(outcome: Outcome) -> list[str]:
    return [text for text in outcome.warnings if FORWARD.search(text)] or ["nothing was said about it"]


class Compare:
    """Lines for what differs; where the oracle has the global batch's rows, a rank may have its own."""

    def __init__(self, tolerance: float, rows: int, rank: int, world: int) -> None:
        self.tolerance, self.rows, self.rank, self.world = tolerance, rows, rank, world

    def __call__(self, path: str, got: Any, expected: Any) -> Iterator[str]:
        if isinstance(got, Tensor) and isinstance(expected, Tensor):
            if not self._close(got, self._mine(got, expected)):
                yield f"{path}: {_short(got)} is not {_short(self._mine(got, expected))}"
        elif isinstance(got, dict) and isinstance(expected, dict) and got.keys() == expected.keys():
            for name in got:
                yield from self(f"{path}.{name}", got[name], expected[name])
        elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(self._mine(got, expected)):
            for i, (mine, other) in enumerate(zip(got, self._mine(got, expected), strict=True)):
                yield from self(f"{path}[{i}]", mine, other)
        elif not self._same(got, expected):
            yield f"{path}: {_short(got)} is not {_short(expected)}"

    def _mine(self, got: Any, expected: Any) -> Any:
        """This rank's rows of the oracle's value, where that has all ranks' and the training has one's."""
        batched = isinstance(expected, list) or expected.dim()
        if not batched or self.rows != len(expected) or (isinstance(got, Tensor) and not got.dim()):
            return expected
        if len(got) * self.world != len(expected):
            return expected
        return expected[self.rank * len(got) : (self.rank + 1) * len(got)]

    def _close(self, got: Tensor, expected: Tensor) -> bool:
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return False
        if not got.is_floating_point():
            return torch.equal(got, expected)
        return torch.allclose(
            got, expected, rtol=self.tolerance, atol=max(ABSOLUTE, self.tolerance / 10), equal_nan=True
        )

    def _same(self, got: Any, expected: Any) -> bool:
        numbers = (int, float)
        if type(got) is type(expected) and not isinstance(got, float):
            return got == expected
        if not isinstance(got, numbers) or not isinstance(expected, numbers):
            return False
        if math.isnan(got) or math.isnan(expected):
            return math.isnan(got) and math.isnan(expected)
        return math.isclose(got, expected, rel_tol=self.tolerance, abs_tol=max(ABSOLUTE, self.tolerance / 10))


def _short(value: Any) -> str:
    text = repr(value).replace("\n", "")
    return text if len(text) < 160 else text[:160] + "..."
