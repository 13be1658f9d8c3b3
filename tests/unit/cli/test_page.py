"""The page of a report: well-formed, complete in itself, to scale, and never too long to open."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lightning_autoparallel.cli.page import report_page
from lightning_autoparallel.cli.page.lanes import Span, idle_times, lanes_of, merged
from lightning_autoparallel.cli.page.memory_picture import curve_svg, peaks
from lightning_autoparallel.cli.page.mesh_picture import mesh_svg
from lightning_autoparallel.cli.page.scale import ticks
from lightning_autoparallel.cli.page.timeline_picture import WIDTH, lanes_svg
from lightning_autoparallel.contracts import (
    CollectiveCount,
    Explained,
    Explanation,
    GraphPrediction,
    MemoryShare,
    MeshTrial,
    ModuleReport,
    OtherWay,
    ParameterReport,
    PassReport,
    TimelineEvent,
)
from tests.unit._graphs import report_of

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('&')</script>"
VOID = {"meta", "input", "br"}


class Checked(HTMLParser):
    """Fails at a tag that closes another than the open one; collects tags and text outside the style sheet."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data.strip())


def checked(page: str) -> Checked:
    parser = Checked()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def svgs(page: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def event(name: str, stream: str, start_us: float, duration_us: float) -> TimelineEvent:
    return TimelineEvent(name=name, stream=stream, start_us=start_us, duration_us=duration_us)


def graph(*events: TimelineEvent, time_us: float, **known) -> GraphPrediction:
    figures = {"compute_us": 0.0, "communication_us": 0.0, "exposed_us": 2.0, "peak_memory_bytes": 2048}
    return GraphPrediction(time_us=time_us, events=events, **{**figures, "live_bytes": (1024, 2048, 512), **known})


def one(kind: str, count: int, size_bytes: int) -> dict:
    return {kind: {"dp_shard": CollectiveCount(count=count, size_bytes=size_bytes)}}


def weight(placement: str) -> ParameterReport:
    sizes = {"parameter_bytes": 64, "gradient_bytes": 64, "optimizer_bytes": 128}
    return ParameterReport(
        shape=(8, 4), local_shape=(4, 4), dtype="float32", placements={"dp_shard": placement}, **sizes
    )


FORWARD = graph(event("gather", "dp_shard", 0.0, 5.0), event("mm", "compute", 2.0, 6.0), time_us=8.0)
BACKWARD = graph(event("mm_1", "compute", 0.0, 3.0), time_us=12.0)
REPORT = report_of(
    graph="training_step",
    mesh={"dp_shard": 4, "tp": 2},
    hardware={"name": "h100", "memory_bytes": 80_000_000_000, "ranks_per_node": 4, "intra_node": {}, "inter_node": {}}
    | {"is_measured": True},
    collectives={"forward": one("all_gather", 3, 3072), "backward": one("reduce_scatter", 1, 512)},
    predictions={"forward": FORWARD, "backward": BACKWARD},
    predicted_peak_bytes=2048,
    samples=16,
    tokens=2000,
    parameters={f"layers.{i}.mlp.weight": weight("S(0)") for i in range(3)},
    modules=(ModuleReport(path="layers.0.mlp", saved_bytes=256, collectives={"forward": one("all_gather", 1, 1024)}),),
    passes=(
        PassReport(
            name="bucket_collectives",
            graph="training_step.forward",
            seconds=0.5,
            nodes_before=90,
            nodes_after=70,
            before=one("all_gather", 9, 9 * 2048),
            after=one("all_gather", 3, 9 * 1024),
            notes=("all in one",),
        ),
    ),
    notes=("found in no time",),
)


def test_a_page_is_well_formed_and_loads_nothing():
    page = report_page(REPORT)
    parsed = checked(page)
    assert len(svgs(page)) == 4  # two timelines, memory, the mesh
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parsed.tags}
    assert not [attrs for _, attrs in parsed.tags if "src" in attrs or "href" in attrs]
    assert "url(" not in page
    assert "@import" not in page


def test_the_figures_of_the_headline():
    text = checked(report_page(REPORT)).text
    for figure in ("20.0 us", "20.0 %", "100.0 M", "tokens/s", "12.5 M tokens/s per device", "2.0 KiB"):
        assert figure in text


def test_blocks_are_folded_and_passes_have_launches_and_bytes_before_and_after():
    page = report_page(REPORT)
    text = " ".join(checked(page).text)
    assert "layers.*" in text
    assert "layers.0" not in text
    assert "weight {dp_shard: S(0)}" in text
    assert "9 → <b>3</b>" in page
    assert "18.0 KiB → <b>9.0 KiB</b>" in page
    assert "all in one" in text
    assert "found in no time" in text


def test_the_meshes_that_were_tried_are_a_table_the_best_first():
    best = MeshTrial(mesh={"dp_shard": 8}, fits=True, us_per_sample=1e3, taken_bytes=2.0**30, samples=64)
    other = MeshTrial(mesh={"dp_shard": 2, "tp": 4}, fits=False, why_not=f"{EVIL} is too large")
    page = report_page(replace(REPORT, meshes=(best, other)))
    text = checked(page).text
    assert text.index("dp_shard: 8") < text.index("dp_shard: 2, tp: 4")
    assert "1.0 GiB" in text and f"{EVIL} is too large" in text and "<script" not in page
    assert not [line for line in checked(report_page(REPORT)).text if "Meshes" in line]


def test_what_was_asked_about_is_explained():
    others = (OtherWay(way=f"S(1) {EVIL}", more_us=1500.0, more_bytes=-1024.0), OtherWay(way="R", ruled_out="no room"))
    weight = Explained(what="layers.*.weight", count=3, taken="S(0)", others=others)
    alone = Explained(what="scale", count=1, taken="R", others=())
    asked = Explanation(pattern="*.weight", choices=(weight, alone), note="on tp")
    page = report_page(replace(REPORT, explanation=asked))
    text = checked(page).text
    assert "layers.*.weight (3 alike): S(0)" in text and "scale: R" in text
    assert f"S(1) {EVIL}: 1.50 ms more, 1.0 KiB less kept" in text and "R: ruled out: no room" in text
    assert "<script" not in page
    assert not [line for line in checked(report_page(REPORT)).text if "placed so" in line]


def test_names_are_escaped_everywhere():
    evil = graph(event(EVIL, EVIL, 0.0, 1.0), time_us=2.0, at_peak=(_share(EVIL),))
    report = replace(
        REPORT,
        graph=EVIL,
        plan=EVIL,
        mesh={EVIL: 2},
        hardware={**REPORT.hardware, "name": EVIL},
        predictions={"forward": evil, "backward": evil},
        collectives={"forward": {EVIL: {EVIL: CollectiveCount(count=1)}}, "backward": {}},
        parameters={f"{EVIL}.0.{EVIL}": weight(EVIL)},
        modules=(ModuleReport(path=f"{EVIL}.0", saved_bytes=1, collectives={"forward": one(EVIL, 1, 1)}),),
        passes=(replace(REPORT.passes[0], name=EVIL, graph=EVIL, notes=(EVIL,), before=one(EVIL, 1, 1)),),
        notes=(EVIL,),
        timings_s={EVIL: 1.0},
    )
    page = report_page(report)
    assert "script" not in {tag for tag, _ in checked(page).tags}
    assert "<script" not in page
    assert len(svgs(page)) == 4


def _share(name: str) -> MemoryShare:
    return MemoryShare(name=name, size_bytes=1, kind=name, module=name)


def test_where_nothing_is_predicted_the_page_says_what_is_missing():
    page = report_page(replace(REPORT, predictions={}, predicted_peak_bytes=None, hardware={}, notes=("no rate: fp4",)))
    text = checked(page).text
    assert "No times are predicted for this step, so there is no timeline." in text
    assert text.count("no rate: fp4") == 2
    assert text.count("not predicted") == 4


def test_a_graph_without_a_time_is_named_beside_the_others():
    text = checked(report_page(replace(REPORT, predictions={"forward": FORWARD}))).text
    assert "backward: its time is not predicted" in text


def test_a_report_of_which_nothing_is_known_is_a_page():
    checked(report_page(report_of()))


def test_bars_are_as_long_as_their_calls():
    bars = {
        (bar.get("class"), bar.find(f"{SVG}title").text): (float(bar.get("x")), float(bar.get("width")))
        for bar in ET.fromstring(lanes_svg(lanes_of(FORWARD, 100), FORWARD.time_us)).iter(f"{SVG}rect")
    }
    assert bars == {
        ("c", "mm: 6.0 us from 2.0 us"): (WIDTH * 2 / 8, WIDTH * 6 / 8),
        ("k0", "gather: 5.0 us from 0.0 us"): (0.0, WIDTH * 5 / 8),
        ("x", "exposed: gather: 2.0 us from 0.0 us"): (0.0, WIDTH * 2 / 8),
        ("idle", "nothing computes: 2.0 us from 0.0 us"): (0.0, WIDTH * 2 / 8),
    }


def span(name: str, start_us: float, end_us: float) -> Span:
    busy_us = end_us - start_us
    return Span(start_us=start_us, end_us=end_us, busy_us=busy_us, calls=1, longest=name, longest_us=busy_us)


def test_what_is_narrow_is_joined_and_what_is_far_or_wide_is_not():
    spans = merged([span("a", 0.0, 1.0), span("b", 1.5, 4.5), span("c", 9.0, 29.0)], 2.0)
    assert [(one.start_us, one.end_us, one.busy_us, one.calls, one.longest) for one in spans] == [
        (0.0, 4.5, 4.0, 2, "b"),
        (9.0, 29.0, 20.0, 1, "c"),
    ]
    assert len(merged([span("a", 0.0, 3.0), span("b", 3.0, 4.0)], 2.0)) == 2


def test_idle_times_are_what_no_computing_covers():
    idle = idle_times([event("a", "", 1.0, 4.0), event("b", "", 2.0, 1.0), event("c", "", 7.0, 1.0)], 10.0)
    assert [(gap.start_us, gap.end_us) for gap in idle] == [(0.0, 1.0), (5.0, 7.0), (8.0, 10.0)]


def test_100_000_events_are_less_than_a_megabyte():
    name = "<" * 300
    events = [event(name, ("compute", "dp_shard", "tp")[i % 3], i * 1.0, 0.9 if i % 2 else 1.7) for i in range(100_000)]
    long = graph(*events, time_us=100_001.0, live_bytes=tuple(range(100_000)))
    page = report_page(replace(REPORT, predictions={"forward": long, "backward": long}))
    assert len(page.encode()) < 1_000_000
    lanes = lanes_of(long, 1500)
    assert lanes.size <= 1500
    assert [lane.spans[-1].end_us > 99_000 for lane in lanes.lanes] == [True] * 3
    assert sum(drawn.calls for lane in lanes.lanes for drawn in lane.spans) == 100_000


def test_the_curve_keeps_every_peak():
    live = [1] * 5000 + [900] + [1] * 5000
    assert max(peaks(live, 600)) == 900
    assert len(peaks(live, 600)) == 600
    area = ET.fromstring(curve_svg(live, 100, 1000.0)).find(f"{SVG}polygon")
    assert min(float(point.partition(",")[2]) for point in area.get("points").split()) == 0.0


@pytest.mark.parametrize(
    ("axes", "ranks", "titles"),
    [
        ({}, 1, "rank 0: ; node 0"),
        ({"dp_shard": 4}, 4, "rank 3: dp_shard 3; node 0"),
        ({"dp_shard": 130}, 130, "rank 129: dp_shard 129; node 16"),
        ({"dp_shard": 16, "tp": 8}, 128, "rank 13: dp_shard 1, tp 5; node 1"),
        ({"dp_replicate": 2, "dp_shard": 64}, 64, "rank 64: dp_replicate 1, dp_shard 0; node 8"),
        ({"pp": 2, "dp_shard": 4, "tp": 2}, 16, "rank 11: pp 1, dp_shard 1, tp 1; node 1"),
        ({"dp_shard": 64, "tp": 8}, 256, "rank 8: dp_shard 1, tp 0; node 1"),
    ],
)
def test_each_rank_is_a_square(axes, ranks, titles):
    cells = ET.fromstring(mesh_svg(axes, 8)).findall(f"{SVG}g")
    named = [cell.find(f"{SVG}title").text for cell in cells]
    assert len(set(named)) == ranks
    assert titles in named


@pytest.mark.parametrize(
    ("end", "shown"), [(7.3, [0, 2, 4, 6]), (1.0, [0, 0.5, 1.0]), (0.0, [0]), (140.0, [0, 50, 100])]
)
def test_ticks_are_round(end, shown):
    assert ticks(end, 4) == pytest.approx(shown)


def test_tooltips_are_plain_names_again():
    named = graph(event("a<b>", "compute", 0.0, 1.0), time_us=1.0)
    (bar,) = ET.fromstring(lanes_svg(lanes_of(named, 10), 1.0)).iter(f"{SVG}rect")
    assert bar.find(f"{SVG}title").text == "a<b>: 1.0 us from 0.0 us"
