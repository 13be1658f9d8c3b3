"""Tables and sizes as all callbacks print them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_autoparallel.contracts import CollectiveCount, PlanReport

_FILE_WIDTH = 160  # no table is wider: a log file has no terminal whose width could break its lines


def make_table(title: str, columns: Sequence[str], numbers: Sequence[str] = (), caption: str | None = None) -> Table:
    """An empty table with text ``columns`` on the left and right-aligned ``numbers`` after them."""
    width = max(len(title), len(caption or ""))  # rich would break both at the width of the columns
    table = Table(
        title=title, caption=caption, box=box.SIMPLE, min_width=width, title_justify="left", caption_justify="left"
    )
    for column in columns:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def render_table(table: Table) -> str:
    """The table as plain text, without colors or trailing blanks."""
    text = io.StringIO()
    Console(file=text, width=_FILE_WIDTH, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def print_table(table: Table) -> None:
    """Print to standard output: plain text of full width, unless that is a terminal."""
    console = Console()
    if console.is_terminal:
        console.print(table)
    else:
        print(render_table(table), flush=True)


def collective_rows(report: PlanReport) -> Iterator[tuple[str, str, str, CollectiveCount]]:
    """Every collective of a report as graph ("forward", ...), kind, mesh axes and count."""
    for graph, table in report.collectives.items():
        for kind, per_axes in sorted(table.items()):
            for axes, counted in sorted(per_axes.items()):
                yield graph, kind, axes, counted
