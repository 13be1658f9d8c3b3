"""A report as one page for a browser: text, style and drawings in a single file, without scripts."""

from lightning_autoparallel.cli.page.html_page import report_page

__all__ = ["report_page"]
