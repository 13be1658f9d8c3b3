"""The argument parser: recipe names for `--config`, and errors that say which key was meant."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser

from lightning_autoparallel.cli.recipes import find_config
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import mixed_flavours
from lightning_autoparallel.lightning_compat.cli import LightningArgumentParser

LINKED_KEY = "trainer.strategy"
USE_STRATEGY_SECTION = (
    f"{LINKED_KEY} cannot be set: this command always trains with AutoParallelStrategy. Its arguments belong in the "
    "top-level `strategy:` section of the config (mesh, plan, compile, ...), or on the command line as `--strategy.KEY`"
)
CONFIG_AFTER_SUBCOMMAND = "\nGive --config after the subcommand: `lightning-autoparallel fit --config RECIPE`"
WRONG_TIME = 'form "h:m:s"'
QUOTE_TIMES = '\nIn YAML a time stands in quotes, as in `timeout: "1:30:00"`: without them it is read as a number'
NO_WORLD_SIZE = "\nGive the number of ranks to plan for: `lightning-autoparallel plan --config RECIPE --world-size 64`"
MIN_SIMILARITY = 0.6

# How jsonargparse and argparse name an unknown key; the tests fail when a new version words it otherwise.
UNKNOWN_KEY = re.compile(r"(?:does not accept option '|Option '|unrecognized arguments: --)(?P<key>[^'\s=]+)")
WRONG_CLASS = re.compile(
    r"does not correspond to a subclass of.*Given value: (?:\{'class_path': ')?(?P<path>[\w.]+)", re.DOTALL
)
CLASS_OF_KEY = re.compile(r"Problem with given class_path '(?P<path>[^']+)'")


class RecipeConfigFile(ActionConfigFile):
    """A `--config` option that also takes the name of a packaged recipe."""

    @staticmethod
    def apply_config(parser: ArgumentParser, cfg: Any, dest: str, value: str) -> None:
        """Read the config `value` names into `cfg`; ends the program with status 2 if there is none."""
        try:
            path = find_config(value)
        except ConfigError as error:
            parser.error(str(error))
        ActionConfigFile.apply_config(parser, cfg, dest, path)


class AutoParallelArgumentParser(LightningArgumentParser):
    """LightningCLI's parser; an unknown key is an error that names the nearest known one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # a key cut short is a mistake, not an abbreviation: with another version it may mean another key
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """As jsonargparse's; ``show_tools`` adds to what this returns."""
        self._commands = super().add_subcommands(*args, **kwargs)
        return self._commands

    def show_tools(self, tools: Mapping[str, str]) -> None:
        """List commands that parse their own arguments: their help by name."""
        for name, said in tools.items():
            self._commands.add_subcommand(name, ArgumentParser(description=said), help=said)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print `message` with a hint at the cause and end the program with status 2."""
        parser = getattr(ex, "subcommand_parser", None) or self
        super().error(explain(message, _known_keys(parser)), ex)


def explain(message: str, known: Iterable[str]) -> str:
    """`message` of the parser, with the remedy where its cause is known, such as the nearest of the `known` keys."""
    if message.startswith(USE_STRATEGY_SECTION):
        return message
    if LINKED_KEY in message:
        return USE_STRATEGY_SECTION
    if "plan.world_size" in message:
        return message + NO_WORLD_SIZE
    if WRONG_TIME in message:
        return message + QUOTE_TIMES
    if wrong := WRONG_CLASS.search(message):
        return message + _of_other_flavour(wrong["path"])
    found = UNKNOWN_KEY.search(message)
    if found is None:
        return message
    if "before subcommand" in message:
        return message + CONFIG_AFTER_SUBCOMMAND
    owner = CLASS_OF_KEY.search(message)
    near = nearest(found["key"], _parameters_of(owner["path"]) if owner else known)
    return f"{message}\nDid you mean '{near}'?" if near else message


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key most like `key` or the start of it, or None if none is like it.

    Starts count because what follows a misspelt part is unknown too: `strategy.mseh.tp` means `strategy.mesh`.
    """
    names = set(known)
    parts = key.split(".")
    starts = [".".join(parts[: n + 1]) for n in range(len(parts))]
    pairs = [(start, name) for start in starts if start not in names for name in sorted(names)]
    scored = [(SequenceMatcher(None, start, name).ratio(), name) for start, name in pairs]
    score, name = max(scored, default=(0.0, ""), key=lambda pair: pair[0])
    return name if score >= MIN_SIMILARITY else None


def _known_keys(parser: LightningArgumentParser) -> set[str]:
    keys = set(parser.get_defaults(skip_validation=True).keys())
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    return (keys | sections) - {LINKED_KEY}


def _of_other_flavour(class_path: str) -> str:
    cls = pydoc.locate(class_path)
    sentence = mixed_flavours(cls) if isinstance(cls, type) else None
    return "" if sentence is None else f"\n{sentence}"


def _parameters_of(class_path: str) -> list[str]:
    cls = pydoc.locate(class_path)  # imported by the parser already, or there would be another error
    return list(inspect.signature(cls).parameters) if isinstance(cls, type) else []
