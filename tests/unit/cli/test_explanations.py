"""`plan --explain` as text."""

from __future__ import annotations

import json

from lightning_autoparallel.artifacts import to_json
from lightning_autoparallel.cli.explanations import explanation_lines
from lightning_autoparallel.contracts import Explained, Explanation, OtherWay
from tests.unit._graphs import report_of


def test_costs_are_differences_and_equal_ones_the_same() -> None:
    others = (
        OtherWay(way="a", more_us=0.04),
        OtherWay(way="b", more_us=-0.2, proved=False),
        OtherWay(way="g", more_us=-0.3),
        OtherWay(way="c", more_us=0.0, more_bytes=2048.0),
        OtherWay(way="d", more_us=1536.0, more_bytes=-10.0),
        OtherWay(way="f", more_us=3.0, proved=False),
        OtherWay(way="e", ruled_out="pinned by rule '*'"),
    )
    weight = Explained(what="layers.*.weight", count=3, taken="R", others=others, further=1, unsolved=2)
    alone = Explained(what="head", count=1, taken="S(0)", note="there is no other way")
    lines = list(explanation_lines(Explanation(pattern="*", choices=(weight, alone), note="on tp")))
    assert [line.strip() for line in lines] == [
        "Why what '*' matches is placed so, on tp",
        "layers.*.weight (3 alike): R",
        "a: the same",
        "b: 0.2 us less, which the solver's gap allows, as many bytes kept",
        "g: 0.3 us less, as the solver reckons, not behind the passes, as many bytes kept",
        "c: the same time, 2.0 KiB more kept",
        "d: 1.54 ms more, 10 B less kept",
        "f: at most 3.0 us more, as many bytes kept",
        "e: ruled out: pinned by rule '*'",
        "1 more, none of them cheaper or possible",
        "2 more, not looked at: cut off",
        "head: S(0); there is no other way",
    ]


def test_a_report_has_it_as_strict_json() -> None:
    """What is ruled out has no price, and JSON no infinity."""
    others = (OtherWay(way="S(0)", more_us=1.5), OtherWay(way="S(1)", ruled_out="no room"))
    asked = Explanation(pattern="*", choices=(Explained(what="head", count=1, taken="R", others=others),))
    written = to_json(report_of(explanation=asked).as_json())
    assert "Infinity" not in written
    (told,) = json.loads(written)["explanation"]["choices"]
    assert [(way["way"], way["more_us"], way["ruled_out"]) for way in told["others"]] == [
        ("S(0)", 1.5, ""),
        ("S(1)", None, "no room"),
    ]
