"""Lightning's lifecycle -> the stages."""

from lightning_autoparallel.strategy.strategy import AutoParallelStrategy

__all__ = ["AutoParallelStrategy"]
