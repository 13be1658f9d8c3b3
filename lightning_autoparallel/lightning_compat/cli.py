"""Lightning's command line, apart from the rest: it needs jsonargparse, which training does not."""

from typing import TYPE_CHECKING

from lightning_autoparallel.lightning_compat.flavour import FLAVOUR, UNIFIED

if TYPE_CHECKING or FLAVOUR == UNIFIED:
    from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
else:
    from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI

__all__ = ["ArgsType", "LightningArgumentParser", "LightningCLI"]
