"""Sizes and tables as text."""

import io
import sys

import pytest

from lightning_autoparallel.callbacks.tables import make_table, print_table, render_table
from lightning_autoparallel.cost.sizes import format_bytes


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes_have_a_unit(size_bytes, expected):
    assert format_bytes(size_bytes) == expected


def _table():
    table = make_table("A title", ("name",), ("count",), caption="a caption")
    table.add_row("x" * 100, "1")
    return table


def test_text_is_plain_and_unbroken():
    text = render_table(_table())
    assert "\x1b" not in text and text.startswith("A title") and text.endswith("a caption")
    assert any("x" * 100 in line and line.endswith("1") for line in text.splitlines())
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_title_is_not_broken_at_the_width_of_narrow_columns():
    title, caption = "a title of several words", "and a longer caption of several words"
    lines = render_table(make_table(title, ("a",), caption=caption)).splitlines()
    assert (lines[0], lines[-1]) == (title, caption)


def test_a_terminal_keeps_its_width(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_table(_table())
    assert "x" * 41 not in sys.stdout.getvalue()
