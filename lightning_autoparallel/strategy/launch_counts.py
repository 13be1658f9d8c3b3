"""Collectives that a training step launches, counted by the process groups themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.torch_compat.collectives import launched_collectives


class LaunchCounter:
    """``measured`` and ``predicted`` launches of the last training step, by mesh axes."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._counting = False
        self.measured: dict[str, int] = {}
        self.predicted: dict[str, int] = {}

    def start(self) -> None:
        """A new training step begins."""
        self.measured, self.predicted = {}, {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Add the collectives launched inside to ``measured``, once where it is open already."""
        if self._counting or self._mesh.backend == "fake":  # whose groups do not count
            yield
            return
        # Asked anew each time: a step that was captured in between may have made groups of its own.
        before = {group: launched_collectives(group) for group in self._mesh.groups}
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
        axes_by_group = self._mesh.axes_by_group()
        for group in self._mesh.groups:
            axes, launched = axes_by_group[group], launched_collectives(group) - before.get(group, 0)
            if launched:
                self.measured[axes] = self.measured.get(axes, 0) + launched
