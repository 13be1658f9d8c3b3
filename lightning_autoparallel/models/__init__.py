"""The built-in model: Llama 3 as plain torch, its LightningModule and a text data module; no parallel code anywhere."""

from lightning_autoparallel.models.data import TextDataModule
from lightning_autoparallel.models.llama3 import Llama3, Llama3Config
from lightning_autoparallel.models.module import Llama3Module

__all__ = ["Llama3", "Llama3Config", "Llama3Module", "TextDataModule"]
