"""How each kind of block lies on the mesh, what it holds, and what it sends."""

from __future__ import annotations

from lightning_autoparallel.callbacks.kinds import KindBytes, block_collectives, kinds
from lightning_autoparallel.cli.page.elements import Row, code, key, section, table, text
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.cost.sizes import format_bytes

_PARTS = ("parameters", "gradients", "optimizer", "saved")  # each has a colour in the style sheet


def plan_by_kind(report: PlanReport) -> str:
    """The section: modules whose paths differ in numbers only are one row, parts of a block stand below it."""
    rows = list(kinds(report))
    if not rows:
        return ""
    most = max(_total(row) for row in rows) or 1
    said = "Bytes of one rank, all modules of a kind together; saved: kept by the forward for the backward."
    shown = table(
        ("module", "placements", "memory"),
        ("modules", *_PARTS),
        (_row(row, most) for row in rows),
    )
    drawn = key((part, part) for part in _PARTS) + shown + _block_table(report)
    return section("Plan by kind of block", said, drawn)


def _row(row: KindBytes, most: int) -> Row:
    _, star, rest = row.kind.partition("*")
    inside = bool(star and rest)
    name = code(rest if inside else row.kind) if row.kind else "<i>the step itself</i>"
    sizes = [format_bytes(row.parameters), format_bytes(row.gradients), _optimizer(row), format_bytes(row.saved)]
    cells = (name, _placements(row.placements), _bar(row, most), f"{row.modules:,}", *sizes)
    return Row(cells=cells, look="inside" if inside else "whole" if star else "")


def _placements(written: str) -> str:
    """``weight {tp: S(0)}; bias {tp: R}`` as a label for each parameter."""
    return " ".join(f'<span class="chip">{text(one)}</span>' for one in written.split("; ") if one)


def _bar(row: KindBytes, most: int) -> str:
    parts = "".join(
        f'<i class="{part}" style="width:{100 * (getattr(row, part) or 0) / most:.1f}%"></i>' for part in _PARTS
    )
    return f'<div class="stack" title="{format_bytes(_total(row))}">{parts}</div>'


def _total(row: KindBytes) -> int:
    return row.parameters + row.gradients + (row.optimizer or 0) + row.saved


def _optimizer(row: KindBytes) -> str:
    return "unknown" if row.optimizer is None else format_bytes(row.optimizer)


def _block_table(report: PlanReport) -> str:
    rows = [
        Row(
            cells=(
                code(block),
                text(graph),
                text(kind),
                code(axes),
                f"{launches:.4g}",
                format_bytes(round(counted.size_bytes * launches / max(counted.count, 1))),
            )
        )
        for block, graph, kind, axes, launches, counted in block_collectives(report)
    ]
    columns = ("collectives of each", "graph", "kind", "axes")
    return table(columns, ("launches per block", "bytes per block"), rows) if rows else ""
