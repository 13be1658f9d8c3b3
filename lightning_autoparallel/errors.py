"""The errors a user of the package can meet; each message says what was given, what is wrong and what to do."""

from __future__ import annotations


class AutoParallelError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(AutoParallelError):
    """An argument, a recipe or the launch is wrong: mesh, plan, precision, devices, batch shapes."""


class CaptureError(AutoParallelError):
    """The step cannot be recorded as one static graph; names the user's file and line where it is known."""


class UnsupportedOpError(AutoParallelError):
    """An operator of the step has no meaning on shards and no safe fallback."""


class InfeasiblePlanError(AutoParallelError):
    """No placement satisfies the plan, its rules or its memory budget."""


class PassError(AutoParallelError):
    """A graph pass was asked for by an unknown name, or left a graph that does not lint."""


class CheckpointError(AutoParallelError):
    """A checkpoint is missing, unreadable, or does not match the model or the mesh."""
