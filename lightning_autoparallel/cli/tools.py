"""Commands that need neither model nor Trainer: they parse their own arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from lightning_autoparallel.cli.calibrate import CALIBRATE, CALIBRATE_HELP, run_calibrate
from lightning_autoparallel.cli.consolidate_command import CONSOLIDATE, CONSOLIDATE_HELP, run_consolidate
from lightning_autoparallel.cli.hugging_face import EXPORT, EXPORT_HELP, IMPORT, IMPORT_HELP, run_export, run_import


@dataclass(frozen=True)
class Tool:
    """A command: ``run`` takes what follows its name."""

    run: Callable[[Sequence[str]], None]
    help: str


TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        CALIBRATE: Tool(run_calibrate, CALIBRATE_HELP),
        CONSOLIDATE: Tool(run_consolidate, CONSOLIDATE_HELP),
        IMPORT: Tool(run_import, IMPORT_HELP),
        EXPORT: Tool(run_export, EXPORT_HELP),
    }
)
