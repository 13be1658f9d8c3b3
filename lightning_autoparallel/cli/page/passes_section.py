"""What each pass made of the collectives, and what it said about them."""

from __future__ import annotations

from lightning_autoparallel.cli.page.elements import Row, bullets, folded, section, table, text
from lightning_autoparallel.contracts import CollectiveCount, CollectiveTable, PassReport, PlanReport
from lightning_autoparallel.cost.sizes import format_bytes


def passes(report: PlanReport) -> str:
    """The section: passes that left the collectives as they were are fainter; their notes unfold below."""
    if not report.passes:
        return ""
    columns = ("pass", "graph", "launches that changed")
    numbers = ("nodes", "collectives", "bytes", "seconds")
    shown = table(columns, numbers, (_row(done) for done in report.passes))
    said = "In the order in which they ran; bytes are those of one rank, all collectives together."
    return section("Passes", said, shown + _notes(report))


def total(counts: CollectiveTable) -> CollectiveCount:
    """All kinds on all axes together."""
    return sum((one for per_axes in counts.values() for one in per_axes.values()), CollectiveCount())


def _row(done: PassReport) -> Row:
    before, after = total(done.before), total(done.after)
    cells = (
        text(done.name),
        text(_graph(done)),
        text(_changes(done)),
        _change(f"{done.nodes_before:,}", f"{done.nodes_after:,}"),
        _change(f"{before.count:,}", f"{after.count:,}"),
        _change(format_bytes(before.size_bytes), format_bytes(after.size_bytes)),
        f"{done.seconds:.2f}",
    )
    return Row(cells=cells, look="" if done.before != done.after else "faint")


def _graph(done: PassReport) -> str:
    """``forward`` for ``training_step.forward``; ``joint`` for the graph of both."""
    return done.graph.rpartition(".")[2] if "." in done.graph else "joint"


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} → <b>{after}</b>"


def _changes(done: PassReport) -> str:
    found = []
    for kind in sorted({*done.before, *done.after}):
        old, new = (total({kind: counts.get(kind, {})}).count for counts in (done.before, done.after))
        if old != new:
            found.append(f"{kind} {old:,} → {new:,}")
    return ", ".join(found)


def _notes(report: PlanReport) -> str:
    noted = [done for done in report.passes if done.notes]
    if not noted:
        return ""
    lists = (f"<p>{text(done.name)}, {text(_graph(done))}</p>{bullets(done.notes)}" for done in noted)
    return folded(f"What {len(noted)} of {len(report.passes)} runs of passes noted", "".join(lists))
