"""Memory of one rank over the calls of its graphs, on top of what stays: parameter shards and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from lightning_autoparallel.cli.page.elements import Row, clipped, code, key, section, table, text
from lightning_autoparallel.cli.page.scale import ticks
from lightning_autoparallel.contracts import LARGEST_SHOWN, GraphPrediction, MemoryShare, PlanReport
from lightning_autoparallel.cost.sizes import format_bytes

WIDTH = 1200.0
HEIGHT = 220.0
_MOST_POINTS = 600
_ROOM_ABOVE = 1.08
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def memory(report: PlanReport) -> str:
    """The section: a curve of the step, one of each other graph, and the largest values at each peak."""
    drawn = {name: found for name, found in report.predictions.items() if found.live_bytes}
    if not drawn:
        return ""
    step = {name: found for name, found in drawn.items() if name in report.step_graphs}
    others = [{name: found} for name, found in drawn.items() if name not in step]
    panels = "".join(_panel(report, graphs) for graphs in (step, *others) if graphs)
    entries = [("base", "parameter shards and optimizer state"), ("live", "what else is alive"), ("x", "peak")]
    said = "From the first call to the last, in the order in which they are launched; predicted."
    return section("Memory of one rank", said, key(entries) + panels + _largest(report))


def curve_svg(live: Sequence[int], base_bytes: int, top_bytes: float) -> str:
    """The curve as an area on top of ``base_bytes``; ``top_bytes`` is as high as the whole. It holds no text."""
    points = peaks(live, _MOST_POINTS)
    step = WIDTH / max(len(points) - 1, 1)
    heights = [(i * step, HEIGHT * (1 - (base_bytes + size) / top_bytes)) for i, size in enumerate(points)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in heights)
    floor = HEIGHT * (1 - base_bytes / top_bytes)
    peak = HEIGHT * (1 - (base_bytes + max(live, default=0)) / top_bytes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" '
        f'style="height:{HEIGHT:g}px" role="img">'
        f'<polygon class="live" points="0,{floor:.1f} {line} {WIDTH:g},{floor:.1f}"/>'
        f'<rect class="base" x="0" y="{floor:.1f}" width="{WIDTH:g}" height="{HEIGHT - floor:.1f}"/>'
        f'<line class="peak" x1="0" x2="{WIDTH:g}" y1="{peak:.1f}" y2="{peak:.1f}"/></svg>'
    )


def peaks(values: Sequence[int], most: int) -> list[int]:
    """At most ``most`` values: the largest of each of so many neighbouring parts."""
    if len(values) <= most:
        return list(values)
    edges = [i * len(values) // most for i in range(most + 1)]
    return [max(values[start:end]) for start, end in pairwise(edges)]


def _panel(report: PlanReport, graphs: dict[str, GraphPrediction]) -> str:
    optimizer = 2 * report.parameters_bytes if report.optimizer_bytes is None else report.optimizer_bytes
    base = report.parameters_bytes + (optimizer if "backward" in graphs else 0)
    live = [size for found in graphs.values() for size in found.live_bytes]
    peak = base + max(live)
    top = max(peak * _ROOM_ABOVE, 1.0)
    labels = "".join(_height_marks(top))
    flex = "".join(f'<span style="flex:{len(found.live_bytes)}">{text(name)}</span>' for name, found in graphs.items())
    divider = "".join(_dividers([len(found.live_bytes) for found in graphs.values()]))
    said = f"peak {format_bytes(peak)}: {format_bytes(base)} stay, {format_bytes(max(live))} come and go"
    mark = f'<em style="top:{HEIGHT * (1 - peak / top):.0f}px">{text(said)}</em>'
    return (
        f'<div class="curve"><div class="heights">{labels}</div><div class="stretch">{curve_svg(live, base, top)}'
        f'{divider}{mark}<div class="parts">{flex}</div></div></div>'
    )


def _dividers(calls: Sequence[int]) -> Iterator[str]:
    """Where one graph ends and the next begins."""
    for place in list(accumulate(calls))[:-1]:
        yield f'<i class="divider" style="left:{100 * place / sum(calls):.2f}%"></i>'


def _height_marks(top: float) -> list[str]:
    unit, size = next(((name, size) for name, size in _UNITS if top >= size), _UNITS[-1])
    return [
        f'<span style="top:{HEIGHT * (1 - at * size / top):.0f}px">{at:g} {unit}</span>' for at in ticks(top / size, 4)
    ]


def _largest(report: PlanReport) -> str:
    rows = [
        _share_row(graph, share)
        for graph, found in report.predictions.items()
        for share in found.at_peak[:LARGEST_SHOWN]
    ]
    return table(("largest at the peak of", "value", "kind", "module"), ("size",), rows) if rows else ""


def _share_row(graph: str, share: MemoryShare) -> Row:
    cells = (text(graph), clipped(share.name), text(share.kind), code(share.module))
    return Row(cells=(*cells, format_bytes(share.size_bytes)))
