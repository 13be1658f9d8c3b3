"""A callback that compares the trained model with the best one that ignores context."""

from __future__ import annotations

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer
from lightning_autoparallel.models.data import TextDataModule


class EntropyReport(Callback):
    """Prints, once training ends and on rank 0, the last validation loss beside the text's unigram entropy.

    Raises:
        ConfigError: when training starts, if the data is not a `TextDataModule`.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse data whose entropy is unknown, before time is spent on training."""
        _text(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the comparison, both numbers in nats per byte; nothing if validation never ran."""
        loss = trainer.callback_metrics.get("val_loss")
        if loss is None or not trainer.is_global_zero:
            return
        entropy = _text(trainer).unigram_entropy()
        relation = "<" if float(loss) < entropy else ">="
        print(f"validation loss {float(loss):.3f} nats/byte {relation} unigram entropy {entropy:.3f} nats/byte")


def _text(trainer: Trainer) -> TextDataModule:
    # Trainer sets `datamodule` only once it is given one, and its type does not declare it.
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, TextDataModule):
        raise ConfigError(
            f"EntropyReport needs the entropy of a TextDataModule's text, but the data is {type(data).__name__}; "
            "use TextDataModule or remove the callback."
        )
    return data
