"""The timeline of each graph: a lane for computing, one for each group of mesh axes, and what is exposed."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_autoparallel.callbacks.predictions import format_time
from lightning_autoparallel.cli.page.elements import bullets, clipped, key, section, text
from lightning_autoparallel.cli.page.lanes import COMPUTE, Lane, Lanes, Span, lanes_of
from lightning_autoparallel.cli.page.scale import ticks
from lightning_autoparallel.contracts import GraphPrediction, PlanReport

WIDTH = 1200.0
_LANE_HEIGHT = 28
_BAR_HEIGHT = 20
_COLORS = 5  # of lanes of communication, in the style sheet
_MOST_SPANS = 3000
_THINNEST = 0.3
_FAINTEST = 0.35


def timeline(report: PlanReport) -> str:
    """The section, or what is missing where times are not predicted."""
    if not report.predictions:
        said = "No times are predicted for this step, so there is no timeline."
        return section("Timeline", said, bullets(report.notes or ("no cost is known for it",)))
    said = "Where a pointer rests on a call its name shows. Neighbours too narrow to see are drawn as one."
    most = _MOST_SPANS // len(report.predictions)
    panels = [_panel(name, predicted, most) for name, predicted in report.predictions.items()]
    missing = [f"{name}: its time is not predicted" for name in report.step_graphs if name not in report.predictions]
    entries = [
        ("c", "computes"),
        ("k0", "communicates beside it"),
        ("x", "exposed: nothing computes beside it"),
    ]
    drawn = key(entries) + _zoom("".join(panels)) + (bullets(missing) if missing else "")
    return section(f"Timeline of rank 0, predicted for {report.hardware.get('name', 'unknown hardware')}", said, drawn)


def lanes_svg(lanes: Lanes, time_us: float) -> str:
    """Lanes below each other, ``time_us`` as wide as the whole; it stretches to any width, so it holds no text."""
    height = _LANE_HEIGHT * len(lanes.lanes)
    scale = WIDTH / time_us if time_us > 0 else 0.0
    idle = "".join(_bar(span, "idle", scale, 0, height) for span in lanes.idle)
    drawn = "".join(_lane(lane, number, scale) for number, lane in enumerate(lanes.lanes))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height}" preserveAspectRatio="none" '
        f'style="height:{height}px" role="img">{idle}{drawn}</svg>'
    )


def _zoom(panels: str) -> str:
    """A box to tick that draws the panels wider; without a script."""
    box = '<input type="checkbox" id="zoom"><label for="zoom">five times as wide, to scroll in</label>'
    return f'<div class="zoom">{box}<div class="panels">{panels}</div></div>'


def _panel(name: str, predicted: GraphPrediction, most: int) -> str:
    lanes = lanes_of(predicted, most)
    share = predicted.exposed_us / predicted.time_us if predicted.time_us > 0 else 0.0
    said = (
        f"{format_time(predicted.time_us)}, computing {format_time(predicted.compute_us)}, communicating "
        f"{format_time(predicted.communication_us)}, exposed {format_time(predicted.exposed_us)} ({100 * share:.1f} %)"
    )
    labels = "".join(f'<div title="{text(lane.stream)}">{clipped(lane.stream)}</div>' for lane in lanes.lanes)
    drawn = f'<div class="stretch">{lanes_svg(lanes, predicted.time_us)}{_axes(predicted.time_us)}</div>'
    return (
        f'<h3>{text(name)} <small>{text(said)}</small></h3><div class="lanes"><div class="labels">{labels}</div>'
        f'<div class="scroll">{drawn}</div></div>'
    )


def _lane(lane: Lane, number: int, scale: float) -> str:
    look = "c" if lane.stream == COMPUTE else f"k{(number - 1) % _COLORS}"
    top = number * _LANE_HEIGHT + (_LANE_HEIGHT - _BAR_HEIGHT) // 2
    bars = [_bar(span, look, scale, top, _BAR_HEIGHT) for span in lane.spans]
    bars += [_bar(span, "x", scale, top, _BAR_HEIGHT, "exposed: ") for span in lane.exposed]
    return "".join(bars)


def _bar(span: Span, look: str, scale: float, top: int, height: int, prefix: str = "") -> str:
    width_us = span.end_us - span.start_us
    share = span.busy_us / width_us if width_us > 0 else 1.0
    # joined over gaps: as much fainter as is missing, or lanes would look busier than they are
    faint = f' fill-opacity="{max(share, _FAINTEST):.2f}"' if share < 0.95 else ""
    others = f" and {span.calls - 1} more" if span.calls > 1 else ""
    said = f"{prefix}{clipped(span.longest)}{others}: {format_time(span.busy_us)} from {format_time(span.start_us)}"
    place = (
        f'x="{span.start_us * scale:.2f}" y="{top}" width="{max(width_us * scale, _THINNEST):.2f}" height="{height}"'
    )
    return f'<rect class="{look}" {place}{faint}><title>{said}</title></rect>'


def _axes(time_us: float) -> str:
    """Two axes, of which the style sheet shows the one that suits the width."""
    widths = (("coarse", 8), ("fine", 40))
    return "".join(f'<div class="axis {look}">{"".join(_marks(time_us, most))}</div>' for look, most in widths)


def _marks(time_us: float, most: int) -> Iterator[str]:
    unit, size = ("us", 1.0) if time_us < 1e3 else ("ms", 1e3) if time_us < 1e6 else ("s", 1e6)
    for at in ticks(time_us / size, most):
        share = at * size / time_us if time_us > 0 else 0.0
        if share < 0.97:  # the last one would stand half outside
            yield f'<span style="left:{100 * share:.2f}%">{at:g} {unit}</span>'
