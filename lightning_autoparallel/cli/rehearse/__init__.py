"""``lightning-autoparallel rehearse``: one real rank of a job on this machine, beside what is predicted of it."""

from lightning_autoparallel.cli.rehearse.rehearse import (
    REHEARSE,
    RehearsingTrainer,
    add_rehearse_arguments,
    rehearsing_options,
)

__all__ = ["REHEARSE", "RehearsingTrainer", "add_rehearse_arguments", "rehearsing_options"]
