"""What `--config` may name."""

from __future__ import annotations

import pytest

from lightning_autoparallel.cli.recipes import find_config, recipe_folder, recipe_names
from lightning_autoparallel.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    recipes = tmp_path / "recipes"
    (recipes / "llama3").mkdir(parents=True)
    for name in ("debug", "8b"):
        (recipes / "llama3" / f"{name}.yaml").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return recipes


def test_names_are_paths_without_suffix(folder):
    assert recipe_names(folder) == ["llama3/8b", "llama3/debug"]


@pytest.mark.parametrize("value", ["llama3/debug", "llama3/debug.yaml", "recipes/llama3/debug.yaml"])
def test_a_recipe_is_found_from_anywhere(folder, value):
    assert find_config(value, folder) == str(folder / "llama3/debug.yaml")


def test_an_existing_file_comes_first(folder):
    own = folder.parent / "elsewhere/llama3"
    own.mkdir()
    (own / "debug.yaml").write_text("{}")
    assert find_config("llama3/debug.yaml", folder) == "llama3/debug.yaml"


@pytest.mark.parametrize("value", ["trainer: {max_steps: 1}", "{a: 1}", "s3://bucket/a.yaml"])
def test_what_is_no_path_is_left_alone(folder, value):
    assert find_config(value, folder) == value


def test_a_missing_recipe_lists_all_and_names_the_nearest(folder):
    with pytest.raises(ConfigError, match=r"Did you mean 'llama3/debug'\? Recipes: llama3/8b, llama3/debug"):
        find_config("llama3/debgu", folder)


def test_recipes_inside_the_package_win_over_those_beside_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    assert recipe_folder(package) == tmp_path / "recipes"
    (package / "recipes").mkdir()
    assert recipe_folder(package) == package / "recipes"
