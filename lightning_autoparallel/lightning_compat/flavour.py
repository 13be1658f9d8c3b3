"""Which of Lightning's two packages this process trains with, and the one sentence for those who mix them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from lightning_autoparallel.errors import ConfigError

UNIFIED, STANDALONE = "lightning.pytorch", "pytorch_lightning"


def choose(imported: Container[str], is_installed: Callable[[str], bool]) -> str:
    """``pytorch_lightning`` where only that is imported or, of neither, installed; else ``lightning.pytorch``."""
    if UNIFIED in imported:
        return UNIFIED
    if STANDALONE in imported:
        return STANDALONE
    return STANDALONE if is_installed(STANDALONE) and not is_installed("lightning") else UNIFIED


def _is_installed(package: str) -> bool:
    # a folder of that name beside the script, without an __init__.py, has no origin
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


FLAVOUR = choose(sys.modules, _is_installed)
OTHER_FLAVOUR = STANDALONE if FLAVOUR == UNIFIED else UNIFIED


def check_flavour(thing: object) -> None:
    """Refuse a module, or what a Trainer hands over, that is of the other flavour.

    Raises:
        ConfigError: it is.
    """
    if any(_belongs(base, OTHER_FLAVOUR) for base in type(thing).__mro__):
        raise ConfigError(mixed_flavours(f"{type(thing).__name__} is of {OTHER_FLAVOUR}"))


def mixed_flavours(what: str) -> str:
    """The sentence for who mixes both; it opens with ``what`` is of the other one."""
    order = "" if FLAVOUR == STANDALONE else " and import it before lightning_autoparallel"
    return (
        f"{what}, but lightning_autoparallel was imported with {FLAVOUR}, and the two cannot be mixed: import Trainer, "
        f"LightningModule and callbacks from {FLAVOUR}, or {OTHER_FLAVOUR} alone{order}"
    )


def refuse_other_flavour(name: str, strategy: type) -> None:
    """Where the other flavour has been imported too, its Trainer says the sentence for ``strategy`` and its ``name``.

    Its registry gets a factory that raises, and its ``Strategy`` takes ours for one of its own, so that the Trainer
    goes on to hand over its plugins, which ``check_flavour`` refuses; otherwise it would speak of an invalid name.
    """
    if OTHER_FLAVOUR not in sys.modules:
        return
    strategies = import_module(f"{OTHER_FLAVOUR}.strategies")
    strategies.Strategy.register(strategy)
    if name not in strategies.StrategyRegistry:
        strategies.StrategyRegistry.register(name, _refuse, description=f"for a Trainer of {FLAVOUR}")


def _refuse() -> NoReturn:
    raise ConfigError(mixed_flavours(f"this Trainer is of {OTHER_FLAVOUR}"))


def _belongs(kind: type, flavour: str) -> bool:
    return f"{kind.__module__}.".startswith(f"{flavour}.")
