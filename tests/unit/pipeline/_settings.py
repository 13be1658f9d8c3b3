"""A module of settings, as steps import them."""

from types import SimpleNamespace

SCALE = 1.0
OPTIONS = SimpleNamespace(rate=1.0)
