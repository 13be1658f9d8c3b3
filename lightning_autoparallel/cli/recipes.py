"""Where recipes lie, and what `--config` may be given instead of a path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning_autoparallel.errors import ConfigError, did_you_mean

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
SUFFIX = ".yaml"


def recipe_folder(package: Path = PACKAGE_FOLDER) -> Path:
    """The folder of packaged recipes: inside an installed package, beside it in a checkout."""
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def recipe_names(folder: Path) -> list[str]:
    """Names of all recipes under `folder`, as `--config` takes them: `llama3/debug`."""
    files = sorted(folder.rglob(f"*{SUFFIX}"))
    return [file.relative_to(folder).with_suffix("").as_posix() for file in files]


def find_config(value: str, folder: Path | None = None) -> str:
    """The path to read for a `--config` value: itself, or that of the packaged recipe of this name.

    A path that exists comes first, so that a user's own file hides a packaged one. Inline YAML and addresses with a
    scheme are handed back as they are.

    Raises:
        ConfigError: neither a file nor a recipe has this name; the message lists the recipes that exist.
    """
    if _is_no_path(value) or Path(value).is_file():
        return value
    folder = folder or recipe_folder()
    known = recipe_names(folder)
    name = value.removeprefix("./").removeprefix("recipes/").removesuffix(SUFFIX)
    if name in known:
        return str(folder / f"{name}{SUFFIX}")
    raise ConfigError(_not_found(value, name, known))


def _is_no_path(value: str) -> bool:
    return any(mark in value for mark in (":", "{", "\n")) or not value.strip()


def _not_found(value: str, name: str, known: Iterable[str]) -> str:
    hint = did_you_mean(name, known, opening=" Did you mean")
    listed = ", ".join(known) or "none"
    return f"no config file and no recipe is named {value!r}.{hint} Recipes: {listed}. Or give the path of a YAML file."
