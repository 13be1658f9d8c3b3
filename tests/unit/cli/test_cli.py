"""The command line, with a stand-in strategy of one device so that parsing is all that is tested."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_autoparallel.cli.app import AutoParallelCLI

ROOT = Path(__file__).resolve().parents[3]
RECIPE = {
    "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
    "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
    "strategy": {"mesh": {"dp_shard": 2}},
    "trainer": {
        "accelerator": "cpu",
        "logger": False,
        "max_steps": 1,
        "limit_val_batches": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}


class OneDevice(SingleDeviceStrategy):
    """Takes arguments of the kinds AutoParallelStrategy has."""

    def __init__(
        self,
        mesh: dict[str, int] | None = None,
        plan: str = "fsdp",
        compile: bool = True,
        max_captures: int = 8,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__("cpu")
        self.given = {"mesh": mesh, "plan": plan, "compile": compile, "timeout": timeout}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-autoparallel"])
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    yield
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)


def write_recipe(folder: Path, **sections: dict) -> str:
    recipe = {**RECIPE, **{name: {**RECIPE.get(name, {}), **section} for name, section in sections.items()}}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def run(*args: str) -> AutoParallelCLI:
    return AutoParallelCLI(OneDevice, args=list(args))


def error_of(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        run(*args)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_strategy_section_reaches_the_trainer(tmp_path):
    cli = run("fit", "--config", write_recipe(tmp_path, strategy={"compile": False, "timeout": "0:20:00"}))
    assert cli.trainer.strategy.given == {
        "mesh": {"dp_shard": 2},
        "plan": "fsdp",
        "compile": False,
        "timeout": timedelta(minutes=20),
    }
    assert cli.trainer.global_step == 1


def test_command_line_overrides_the_recipe(tmp_path):
    recipe = write_recipe(tmp_path)
    options = ["--strategy.mesh", "{dp_shard: 2, tp: 2}", "--strategy.plan", "ddp", "--strategy.timeout", "1:00:00"]
    given = run("fit", "--config", recipe, *options, "--trainer.fast_dev_run", "1").trainer.strategy.given
    assert given["mesh"] == {"dp_shard": 2, "tp": 2}
    assert given["plan"] == "ddp"
    assert given["timeout"] == timedelta(hours=1)


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_every_subcommand_parses_and_prints(tmp_path, capsys, subcommand):
    with pytest.raises(SystemExit) as exit_:
        run(subcommand, "--config", write_recipe(tmp_path), "--print_config")
    assert exit_.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["strategy"]["mesh"] == {"dp_shard": 2}
    assert printed["strategy"]["timeout"] == "0:30:00"
    assert "strategy" not in printed["trainer"]


def test_saved_config_is_overwritten_and_can_be_run_again(tmp_path):
    trainer = {"logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}}
    trainer["logger"]["init_args"]["version"] = 0
    recipe = write_recipe(tmp_path, trainer=trainer)
    run("fit", "--config", recipe)
    run("fit", "--config", recipe, "--strategy.mesh", "{tp: 2, dp_shard: 1}")
    saved = tmp_path / "logs/lightning_logs/version_0/config.yaml"
    given = run("fit", "--config", str(saved)).trainer.strategy.given
    assert list(given["mesh"].items()) == [("tp", 2), ("dp_shard", 1)]  # the order of axes is their meaning


def test_a_mesh_on_the_command_line_replaces_the_one_of_the_recipe(tmp_path):
    recipe = write_recipe(tmp_path)
    assert run("fit", "--config", recipe, "--strategy.mesh", "{tp: 2}").trainer.strategy.given["mesh"] == {"tp": 2}


def test_a_time_without_quotes_says_that_it_needs_them(tmp_path, capsys):
    path = Path(write_recipe(tmp_path))
    path.write_text(path.read_text().replace("strategy:\n", "strategy:\n  timeout: 1:30:00\n"))
    assert "in quotes" in error_of(capsys, "fit", "--config", str(path))


def test_interpolation_is_resolved(tmp_path):
    recipe = write_recipe(tmp_path, strategy={"mesh": {"dp_shard": "${trainer.max_steps}"}})
    assert run("fit", "--config", recipe).trainer.strategy.given["mesh"] == {"dp_shard": 1}


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("strategy", "mseh", "strategy.mesh"),
        ("strategy", "plans", "strategy.plan"),
        ("trainer", "max_step", "trainer.max_steps"),
        ("triner", "max_steps", "trainer.max_steps"),
    ],
)
def test_unknown_key_in_a_recipe_names_the_nearest(tmp_path, capsys, section, key, meant):
    assert f"Did you mean '{meant}'?" in error_of(
        capsys, "fit", "--config", write_recipe(tmp_path, **{section: {key: 2}})
    )


def test_unknown_part_below_a_misspelt_key(tmp_path, capsys):
    recipe = write_recipe(tmp_path, strategy={"mseh": {"dp_shard": 2}})
    assert "Did you mean 'strategy.mesh'?" in error_of(capsys, "fit", "--config", recipe)


def test_unknown_model_argument_names_the_nearest(tmp_path, capsys):
    transformer = "lightning.pytorch.demos.transformer.LightningTransformer"
    model = {"class_path": transformer, "init_args": {"vocab_sise": 3}}
    message = error_of(capsys, "fit", "--config", write_recipe(tmp_path, model=model))
    assert "Did you mean 'vocab_size'?" in message


@pytest.mark.parametrize("option", ["--strategy.mseh=1", "--strategy.mes=1"])
def test_unknown_option_names_the_nearest(tmp_path, capsys, option):
    message = error_of(capsys, "fit", "--config", write_recipe(tmp_path), option)
    assert "Did you mean 'strategy.mesh'?" in message


@pytest.mark.parametrize("value", ["ddp", {"class_path": "lightning.pytorch.strategies.DDPStrategy"}])
def test_trainer_strategy_in_a_recipe_points_to_the_section(tmp_path, capsys, value):
    message = error_of(capsys, "fit", "--config", write_recipe(tmp_path, trainer={"strategy": value}))
    assert "top-level `strategy:` section" in message


def test_trainer_strategy_on_the_command_line_points_to_the_section(tmp_path, capsys):
    message = error_of(capsys, "fit", "--config", write_recipe(tmp_path), "--trainer.strategy", "ddp")
    assert "top-level `strategy:` section" in message


def test_config_before_the_subcommand_says_where_it_goes(tmp_path, capsys):
    assert "after the subcommand" in error_of(capsys, "--config", write_recipe(tmp_path), "fit")


def test_missing_recipe_lists_what_exists(capsys):
    assert "Recipes: " in error_of(capsys, "fit", "--config", "llama3/nope")


def test_a_long_usage_does_not_bury_the_error(tmp_path, capsys):
    assert len(error_of(capsys, "fit", "--config", write_recipe(tmp_path, strategy={"x": 1})).splitlines()) < 8


def test_wheel_holds_the_recipes(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"lightning_autoparallel/{file.relative_to(ROOT)}" for file in (ROOT / "recipes").rglob("*.yaml")}
    assert recipes
    assert recipes <= names
    assert not any(name.startswith(("recipes/", "tests/")) for name in names)
