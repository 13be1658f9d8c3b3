"""Which of Lightning's two packages this process trains with, and the one sentence for those who mix them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from lightning_autoparallel.errors import ConfigError

UNIFIED, STANDALONE = "lightning.pytorch", "pytorch_lightning"
A_TRAINER = "this Trainer"


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


def check_flavour(thing: object, called: str | None = None) -> None:
    """Refuse a module, or what a Trainer hands over, that is of the other flavour; ``called`` so, or by its class.

    Raises:
        ConfigError: it is.
    """
    sentence = mixed_flavours(type(thing), called)
    if sentence is not None:
        raise ConfigError(sentence)


def mixed_flavours(kind: type, called: str | None = None) -> str | None:
    """The sentence for who brings a ``kind`` of the other flavour; None where it is not."""
    is_other = any(f"{base.__module__}.".startswith(f"{OTHER_FLAVOUR}.") for base in kind.__mro__)
    return _mixed(called or kind.__name__) if is_other else None


def _mixed(what: str) -> str:
    return (
        f"{what} is of {OTHER_FLAVOUR}, but lightning_autoparallel was imported with {FLAVOUR}, and the two cannot be "
        f"mixed: import Trainer, LightningModule and callbacks from {FLAVOUR}, or from {OTHER_FLAVOUR} alone, before "
        "lightning_autoparallel"
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
    raise ConfigError(_mixed(A_TRAINER))
