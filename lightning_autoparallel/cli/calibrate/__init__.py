"""The command ``calibrate``: this machine's rates, measured on the ranks it is started on."""

from lightning_autoparallel.cli.calibrate.calibrate import CALIBRATE, CALIBRATE_HELP, run_calibrate

__all__ = ["CALIBRATE", "CALIBRATE_HELP", "run_calibrate"]
