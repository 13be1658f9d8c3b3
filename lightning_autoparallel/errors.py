"""The errors a user of the package can meet; each message says what was given, what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AutoParallelError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(AutoParallelError):
    """An argument, a recipe or the launch is wrong: mesh, plan, precision, devices, batch shapes."""


class CaptureError(AutoParallelError):
    """The step cannot be recorded as one static graph; names the user's file and line where it is known."""


class StepFailedError(CaptureError):
    """The step raised an error of its own while it was recorded: the cause."""


class TooManyCapturesError(CaptureError):
    """A step or a module call was captured for ``max_captures`` kinds of batches and branches, and met another."""


class RanksDifferError(ConfigError):
    """Ranks hold batches, or call a module on arguments, of different shapes: raised on all, before anything ran."""


class OtherRankError(AutoParallelError):
    """Another rank has stopped, or has come to another place of the step, where this one cannot go on alone.

    ``places`` say, by rank, where ranks are.
    """

    places: tuple[object, ...] = ()


class UnsupportedOpError(AutoParallelError):
    """An operator of the step has no meaning on shards and no safe fallback."""


class InfeasiblePlanError(AutoParallelError):
    """No placement satisfies the plan, its rules or its memory budget."""


class SearchTimeError(InfeasiblePlanError):
    """No placement was found in the time that a search has; there may be one."""


class PassError(AutoParallelError):
    """A graph pass was asked for by an unknown name, or left a graph that does not lint."""


class BrokenGraphError(PassError):
    """A graph pass left a graph that does not lint: the pass is at fault."""


class CheckpointError(AutoParallelError):
    """A checkpoint is missing, unreadable, or does not match the model or the mesh."""


def closest(given: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``known`` most like ``given`` as text; None where none is alike by ``cutoff``, from 0 (any) to 1."""
    return next(iter(get_close_matches(str(given), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(given: object, known: Iterable[str], opening: str = "; did you mean") -> str:
    """``; did you mean 'fsdp'?``, to end a message about an unknown name with; empty where no known one is like it."""
    name = closest(given, known)
    return "" if name is None else f"{opening} {name!r}?"
