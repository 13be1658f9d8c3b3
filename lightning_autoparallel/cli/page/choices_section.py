"""What there was to choose from: the meshes that were tried, and other ways to place what was asked about."""

from __future__ import annotations

from lightning_autoparallel.callbacks.tried_meshes import CAPTION, NUMBERS, TEXTS, TITLE, mesh_cells
from lightning_autoparallel.cli.explanations import choice_lines
from lightning_autoparallel.cli.page.elements import Row, bullets, folded, section, table, text
from lightning_autoparallel.contracts import Explained, PlanReport


def tried_meshes(report: PlanReport) -> str:
    """The section on meshes, the best first; empty where the mesh was given."""
    rows = [Row(cells=[text(cell) for cell in mesh_cells(trial)]) for trial in report.meshes]
    return section(TITLE, f"{CAPTION[:1].upper()}{CAPTION[1:]}.", table(TEXTS, NUMBERS, rows)) if rows else ""


def explanation(report: PlanReport) -> str:
    """The section on what was asked about: what was taken, and what else there was below it; empty if nothing was."""
    found = report.explanation
    if found is None:
        return ""
    said = f"What {found.pattern!r} matches" + (f", {found.note}." if found.note else ".")
    return section("Why it is placed so", said, "".join(map(_choice, found.choices)))


def _choice(explained: Explained) -> str:
    taken, *others = choice_lines(explained)
    return folded(taken, bullets(others)) if others else bullets([taken])
