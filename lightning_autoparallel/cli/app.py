"""LightningCLI with AutoParallelStrategy in its own top-level section."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from lightning_autoparallel.cli.bench import BENCH, add_bench_arguments, run_bench
from lightning_autoparallel.cli.parser import (
    LINKED_KEY,
    USE_STRATEGY_SECTION,
    AutoParallelArgumentParser,
    RecipeConfigFile,
)
from lightning_autoparallel.cli.plan import PLAN, CommandTrainer, add_plan_arguments, plan_with_guards
from lightning_autoparallel.cli.rehearse import (
    REHEARSE,
    RehearsingTrainer,
    add_rehearse_arguments,
    rehearsing_options,
)
from lightning_autoparallel.cli.tools import TOOLS
from lightning_autoparallel.config import AUTO
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import LightningModule, Strategy, Trainer
from lightning_autoparallel.lightning_compat.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning_autoparallel.strategy import AutoParallelStrategy
from lightning_autoparallel.strategy.fake_world import PlanningStrategy, on_meta
from lightning_autoparallel.strategy.planned_device import CUDA, PlannedDevice, needs_guards
from lightning_autoparallel.strategy.planning import planning_trainer
from lightning_autoparallel.strategy.rehearsal import RehearsalStrategy
from lightning_autoparallel.torch_compat.cuda_guards import load_no_more


class Commands(CommandTrainer, RehearsingTrainer):
    """The Trainer whose methods are the subcommands; `bench` makes none, its processes do."""

    bench = staticmethod(run_bench)


class AutoParallelCLI(LightningCLI):
    """Parses a recipe, builds model, data, strategy and Trainer from it, and runs the subcommand.

    Args:
        strategy_class: its constructor's arguments are the keys of the `strategy:` section.
        trainer_class: a Trainer, or a subclass with one method per further subcommand.
        args: the command line; `sys.argv[1:]` if None.
    """

    def __init__(
        self, strategy_class: type[Strategy], trainer_class: type[Trainer] = Commands, args: ArgsType = None
    ) -> None:
        self.strategy_class = strategy_class
        self._mesh: str | None = None
        self._given = args
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

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's subcommands and this package's, each with the arguments that are not options."""
        plan = {"model", "datamodule", "output", "options"}
        return {
            **LightningCLI.subcommands(),
            PLAN: plan,
            REHEARSE: {"model", "datamodule", "output", "options"},
            BENCH: {"parser", "config"},
        }

    def _add_subcommands(self, parser: LightningArgumentParser, **kwargs: Any) -> None:
        super()._add_subcommands(parser, **kwargs)
        assert isinstance(parser, AutoParallelArgumentParser)
        parser.show_tools({name: tool.help for name, tool in TOOLS.items()})

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == PLAN:
            self._subcommand_method_arguments[PLAN] += add_plan_arguments(parser)
        if subcommand == REHEARSE:
            self._subcommand_method_arguments[REHEARSE] += add_rehearse_arguments(parser)
        if subcommand == BENCH:
            add_bench_arguments(parser)
        return parser

    def before_instantiate_classes(self) -> None:
        """Refuse a Trainer strategy from a config file, which the link would overwrite in silence.

        Planning and rehearsing need no loggers and callbacks, so they are not even made: some talk to a server at once.
        """
        trainer = self._get(self.config, "trainer")
        if trainer.get("strategy") not in (None, "auto"):
            self._parser(self.subcommand).error(USE_STRATEGY_SECTION)
        if self.subcommand in (PLAN, REHEARSE):
            for key in ("logger", "callbacks", "profiler", *(["plugins"] if self.subcommand == PLAN else [])):
                trainer[key] = None
        if self.subcommand == PLAN:
            strategy = self._get(self.config, "strategy")
            if strategy.get("mesh") == AUTO:  # which a strategy that trains does not take
                self._mesh, strategy["mesh"] = AUTO, None

    def _planned_device(self) -> PlannedDevice:
        """The device to plan for; where this process cannot, it ends with what one has said that can."""
        kind = self._get(self.config, "device")
        if kind == CUDA and needs_guards():
            self._check_starts_alike()
            sys.exit(plan_with_guards(self._given))
        load_no_more()
        return PlannedDevice(kind)

    def _check_starts_alike(self) -> None:
        if self._given is not None and (self.strategy_class, self.trainer_class) != (AutoParallelStrategy, Commands):
            raise ConfigError(
                "--device cuda without a GPU starts the command anew, which would forget this script's strategy or "
                "Trainer: make AutoParallelCLI without args=, so that the script itself can be started again"
            )

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        if self.subcommand == PLAN:
            device = self._planned_device()
            self.parser.add_instantiator(partial(_built_on_meta, device), LightningModule, prepend=True)

    def instantiate_classes(self) -> None:
        """Make model, data and Trainer; for ``bench`` nothing, as each of its processes makes its own."""
        if self.subcommand != BENCH:
            super().instantiate_classes()

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == BENCH:
            run_bench(self._parser(BENCH), self.config[BENCH])
        else:
            super()._run_subcommand(subcommand)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer of the recipe; for ``plan`` one that only plans, for ``rehearse`` one of one rank.

        Raises:
            ConfigError: the world size does not fit the mesh.
        """
        if self.subcommand == REHEARSE:
            return self._rehearsing_trainer(kwargs)
        if self.subcommand != PLAN:
            return super().instantiate_trainer(**kwargs)
        given = self._get(self.config_init, "trainer")
        strategy = PlanningStrategy(
            world_size=self._get(self.config_init, "world_size"),
            ranks_per_node=self._get(self.config_init, "ranks_per_node"),
            inference=self._get(self.config_init, "inference"),
            global_batch_size=self._get(self.config_init, "global_batch_size"),
            device=self._get(self.config_init, "device"),
            **self._strategy_options(),
        )
        return planning_trainer(strategy, {**given, **kwargs}, self.trainer_class)

    def _rehearsing_trainer(self, more: dict[str, Any]) -> Trainer:
        given = {**self._get(self.config_init, "trainer"), **more}
        world_size, ranks_per_node, warmup, steps = (
            self._get(self.config_init, key) for key in ("world_size", "ranks_per_node", "warmup", "steps")
        )
        options = self._get(self.config, "strategy").as_dict()
        strategy = RehearsalStrategy(world_size=world_size, ranks_per_node=ranks_per_node, **options)
        return self.trainer_class(**{**given, **rehearsing_options(given, warmup, steps), "strategy": strategy})

    def _strategy_options(self) -> dict[str, Any]:
        options = self._get(self.config, "strategy").as_dict()
        if self._mesh is not None:
            options["mesh"] = self._mesh
        dump = self._get(self.config, "dump")
        return options if dump is None else {**options, "dump_dir": dump}


def _built_on_meta(
    device: PlannedDevice, class_type: type[LightningModule], *args: Any, **kwargs: Any
) -> LightningModule:
    """What jsonargparse calls for a model that is planned only; its place in Lightning's hparams is not needed."""
    kwargs.pop("applied_instantiation_links", None)
    with device.seeming(None), on_meta(class_type.__name__):
        return class_type(*args, **kwargs)
