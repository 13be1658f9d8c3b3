"""The mesh as a grid of ranks, coloured by node, and what each of its axes carries in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_autoparallel.callbacks.tables import collective_rows
from lightning_autoparallel.cli.page.elements import Row, code, section, table, text
from lightning_autoparallel.contracts import CollectiveCount, PlanReport
from lightning_autoparallel.cost.sizes import format_bytes

_CELL = 24
_STEP = _CELL + 3  # from one square to the next
_MOST_ACROSS = 32
_MOST_DOWN = 16
_NUMBER_FITS = 1000


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where ranks are drawn: ``down`` and ``across`` name the mesh axes of each side."""

    ranks: int
    rows: int
    columns: int
    down: Sequence[str]
    across: Sequence[str]
    last_is_down: bool

    @property
    def cells(self) -> list[tuple[int, int, int]]:
        """Rank, column and row of every rank that is drawn."""
        found = []
        for column in range(min(self.columns, _MOST_ACROSS)):
            for row in range(min(self.rows, _MOST_DOWN)):
                rank = column * self.rows + row if self.last_is_down else row * self.columns + column
                if rank < self.ranks:
                    found.append((rank, column, row))
        return found


def grid_of(axes: Mapping[str, int], per_node: int | None) -> Grid:
    """The last axis down and the others across, or the other way round if that is wider than high.

    A single long axis has a column for each node.
    """
    ranks, names = math.prod(axes.values()), list(axes)
    if len(names) == 1 and ranks > _MOST_DOWN:
        rows = min(per_node or _MOST_DOWN, _MOST_DOWN)
        columns = math.ceil(ranks / rows)
        return Grid(ranks=ranks, rows=rows, columns=columns, down=(), across=names, last_is_down=True)
    last = axes[names[-1]] if names else 1
    others = ranks // last
    if last > others:
        return Grid(ranks=ranks, rows=others, columns=last, down=names[:-1], across=names[-1:], last_is_down=False)
    return Grid(ranks=ranks, rows=last, columns=others, down=names[-1:], across=names[:-1], last_is_down=True)


def mesh(report: PlanReport) -> str:
    """The section: the grid, and below it collectives by axis."""
    per_node = report.hardware.get("ranks_per_node")
    axes = {name: size for name, size in report.mesh.items() if size > 1}
    grid = grid_of(axes, per_node)
    said = ", ".join(f"{name} {size}" for name, size in report.mesh.items()) or "one rank"
    caption = "; ".join(_captions(axes, grid, per_node))
    drawn = f'<div class="wide">{mesh_svg(axes, per_node)}</div><p class="said">{text(caption)}</p>'
    return section(f"Mesh: {said}", "", drawn + axes_table(report))


def mesh_svg(axes: Mapping[str, int], per_node: int | None) -> str:
    """A square for each rank, at most 32 across and 16 down."""
    cells = grid_of(axes, per_node).cells
    width = (1 + max(column for _, column, _ in cells)) * _STEP
    height = (1 + max(row for _, _, row in cells)) * _STEP
    drawn = "".join(_cell(axes, rank, column, row, per_node) for rank, column, row in cells)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="mesh" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">{drawn}</svg>'
    )


def axes_table(report: PlanReport) -> str:
    """Collectives of one step by mesh axes, all kinds and graphs: launches, bytes, and a bar of the bytes."""
    by_axes: dict[str, dict[str, CollectiveCount]] = {}
    for graph, kind, axes, counted in collective_rows(report):
        if graph in report.step_graphs:
            kinds = by_axes.setdefault(axes, {})
            kinds[kind] = kinds.get(kind, CollectiveCount()) + counted
    if not by_axes:
        return '<p class="said">No collectives run in a step.</p>'
    totals = {axes: sum(kinds.values(), CollectiveCount()) for axes, kinds in by_axes.items()}
    most = max(total.size_bytes for total in totals.values()) or 1
    rows = (_axes_row(axes, by_axes[axes], total, most) for axes, total in totals.items())
    return table(("collectives of a step on", "kinds", ""), ("launches", "bytes"), rows)


def _axes_row(axes: str, kinds: Mapping[str, CollectiveCount], total: CollectiveCount, most: int) -> Row:
    said = "<br>".join(
        f"{text(kind)} <small>{counted.count} of {format_bytes(counted.size_bytes // max(counted.count, 1))}</small>"
        for kind, counted in sorted(kinds.items(), key=lambda item: -item[1].size_bytes)
    )
    bar = f'<div class="bar"><i style="width:{100 * total.size_bytes / most:.1f}%"></i></div>'
    return Row(cells=(code(axes), said, bar, f"{total.count:,}", format_bytes(total.size_bytes)))


def _cell(axes: Mapping[str, int], rank: int, column: int, row: int, per_node: int | None) -> str:
    node = rank // per_node if per_node else 0
    said = f"rank {rank}: {', '.join(_coordinates(axes, rank))}" + (f"; node {node}" if per_node else "")
    x, y = column * _STEP, row * _STEP
    number = f'<text x="{x + _CELL // 2}" y="{y + 16}">{rank}</text>' if rank < _NUMBER_FITS else ""
    square = f'<rect class="m{node % 4}" x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" rx="4"/>'
    return f"<g><title>{text(said)}</title>{square}{number}</g>"


def _coordinates(axes: Mapping[str, int], rank: int) -> list[str]:
    """``["dp_shard 1", "tp 3"]``: ranks count along the last axis first."""
    found = []
    for name, size in reversed(list(axes.items())):
        rank, place = divmod(rank, size)
        found.append(f"{name} {place}")
    return found[::-1]


def _captions(axes: Mapping[str, int], grid: Grid, per_node: int | None) -> Iterator[str]:
    for direction, side in (("across", grid.across), ("down", grid.down)):
        if side:
            yield f"{direction}: {' x '.join(f'{name} {axes[name]}' for name in side)}"
    if per_node and grid.ranks > per_node:
        yield f"each shade is a node of {per_node} ranks"
    if len(grid.cells) < grid.ranks:
        yield f"{len(grid.cells)} of {grid.ranks} ranks are drawn"
