"""Pieces of HTML that every section is made of; what comes from a report is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_LONGEST_NAME = 60


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table: cells are HTML already; ``look`` is the row's class in the style sheet."""

    cells: Sequence[str]
    look: str = ""


def text(value: object) -> str:
    """Any value as text between tags or quotes."""
    return escape(str(value))


def clipped(name: str) -> str:
    """A name as text, cut in its middle where it is very long."""
    if len(name) <= _LONGEST_NAME:
        return text(name)
    half = _LONGEST_NAME // 2 - 1
    return text(f"{name[:half]} … {name[-half:]}")


def code(value: str) -> str:
    """A name or placement in the font of programs."""
    return f"<code>{text(value)}</code>"


def section(title: str, said: str, body: str) -> str:
    """A part of the page: its heading, a sentence about it (may be empty) and HTML."""
    sentence = f'<p class="said">{text(said)}</p>' if said else ""
    return f"<section><h2>{text(title)}</h2>{sentence}{body}</section>"


def table(columns: Sequence[str], numbers: Sequence[str], rows: Iterable[Row]) -> str:
    """A table with text ``columns`` on the left and right-aligned ``numbers`` after them; it scrolls if too wide."""
    heads = [f"<th>{text(name)}</th>" for name in columns] + [f'<th class="n">{text(name)}</th>' for name in numbers]
    body = "".join(_row(row, len(columns)) for row in rows)
    head = "".join(heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(row: Row, texts: int) -> str:
    look = f' class="{row.look}"' if row.look else ""
    cells = (f"<td>{cell}</td>" if i < texts else f'<td class="n">{cell}</td>' for i, cell in enumerate(row.cells))
    return f"<tr{look}>{''.join(cells)}</tr>"


def bullets(lines: Iterable[str]) -> str:
    """Sentences below each other."""
    return "<ul>" + "".join(f"<li>{text(line)}</li>" for line in lines) + "</ul>"


def folded(title: str, body: str) -> str:
    """HTML that shows when its title is clicked."""
    return f"<details><summary>{text(title)}</summary>{body}</details>"


def key(entries: Iterable[tuple[str, str]]) -> str:
    """What the colours of a drawing mean: classes of the style sheet and their names."""
    shown = (f'<span><i class="swatch {look}"></i>{text(name)}</span>' for look, name in entries)
    return f'<div class="key">{"".join(shown)}</div>'
