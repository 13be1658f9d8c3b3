"""LightningCLI with AutoParallelStrategy in its own top-level section."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy

from lightning_autoparallel.cli.parser import (
    LINKED_KEY,
    USE_STRATEGY_SECTION,
    AutoParallelArgumentParser,
    RecipeConfigFile,
)


class AutoParallelCLI(LightningCLI):
    """Parses a recipe, builds model, data, strategy and Trainer from it, and runs the subcommand.

    Args:
        strategy_class: its constructor's arguments are the keys of the `strategy:` section.
        trainer_class: a Trainer, or a subclass with one method per further subcommand.
        args: the command line; `sys.argv[1:]` if None.
    """

    def __init__(
        self, strategy_class: type[Strategy], trainer_class: type[Trainer] = Trainer, args: ArgsType = None
    ) -> None:
        self.strategy_class = strategy_class
        options = {"parser_mode": "omegaconf", "usage": "%(prog)s [--config RECIPE_OR_FILE] [--SECTION.KEY VALUE ...]"}
        super().__init__(
            trainer_class=trainer_class,
            parser_class=AutoParallelArgumentParser,
            parser_kwargs={"parser_mode": "omegaconf", **{name: dict(options) for name in self.subcommands()}},
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            # An optimizer built here would hold the parameters from before they are sharded. The model's own
            # configure_optimizers is called after that.
            auto_configure_optimizers=False,
            args=args,
        )

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser whose `--config` also takes the name of a packaged recipe."""
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c", "--config", action=RecipeConfigFile, help="A YAML file, or a packaged recipe such as llama3/debug."
        )
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the `strategy:` section and hand its instance to the Trainer."""
        parser.add_class_arguments(self.strategy_class, "strategy")
        parser.link_arguments("strategy", LINKED_KEY, apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Refuse a Trainer strategy from a config file, which the link would overwrite in silence."""
        if self._get(self.config, "trainer").get("strategy") not in (None, "auto"):
            self._parser(self.subcommand).error(USE_STRATEGY_SECTION)
