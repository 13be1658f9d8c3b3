"""The whole page: headline, timeline, memory, mesh, plan, what else there was, passes and notes of one report."""

from __future__ import annotations

from string import Template

from lightning_autoparallel.callbacks.predictions import predicted_lines
from lightning_autoparallel.cli.page.choices_section import explanation, tried_meshes
from lightning_autoparallel.cli.page.elements import bullets, section, text
from lightning_autoparallel.cli.page.headline import headline
from lightning_autoparallel.cli.page.kinds_section import plan_by_kind
from lightning_autoparallel.cli.page.memory_picture import memory
from lightning_autoparallel.cli.page.mesh_picture import mesh
from lightning_autoparallel.cli.page.page_style import STYLE
from lightning_autoparallel.cli.page.passes_section import passes
from lightning_autoparallel.cli.page.timeline_picture import timeline
from lightning_autoparallel.contracts import PlanReport

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
<h1>$title</h1>
<p class="said">$said</p>
$body
</main>
</body>
</html>
""")


def report_page(report: PlanReport) -> str:
    """A self-contained page: it loads nothing, runs no script, and stays below a megabyte for any timeline."""
    sections = (headline, timeline, memory, mesh, tried_meshes, plan_by_kind, explanation, passes, _notes)
    hardware = report.hardware.get("name")
    said = "Predicted and counted, not measured" + (f"; times for {hardware}." if hardware else ".")
    return _PAGE.substitute(
        title=text(f"{report.graph}, plan {report.plan}"),
        style=STYLE,
        said=text(said),
        body="\n".join(draw(report) for draw in sections),
    )


def _notes(report: PlanReport) -> str:
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in report.timings_s.items())
    lines = [*report.notes, *predicted_lines(report), *([f"time of planning: {stages}"] if stages else [])]
    return section("Notes", "", bullets(lines)) if lines else ""
