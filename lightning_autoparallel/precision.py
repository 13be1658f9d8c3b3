"""``Trainer(precision=...)`` -> what the captured step computes in."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from lightning_autoparallel.errors import ConfigError


def check_precision(plugin: Precision) -> Precision:
    """The plugin, if its precision is supported.

    Raises:
        ConfigError: any other precision than 32-true.
    """
    if type(plugin) is not Precision or plugin.precision != "32-true":
        raise ConfigError(
            f"precision {plugin.precision!r} is not supported yet by AutoParallelStrategy: "
            "use Trainer(precision='32-true')"
        )
    return plugin
