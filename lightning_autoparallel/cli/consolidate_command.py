"""`lightning-autoparallel consolidate FOLDER FILE`: a sharded checkpoint as one file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_autoparallel.checkpoint import consolidate

CONSOLIDATE = "consolidate"
CONSOLIDATE_HELP = "Write a folder of shards as the one file that one device, DDP and load_from_checkpoint read."


def run_consolidate(args: Sequence[str]) -> None:
    """Parse what follows the command's name, and do it.

    Raises:
        CheckpointError: there is no complete sharded checkpoint, or the file cannot be written there.
        SystemExit: a mistake in the arguments.
    """
    parser = argparse.ArgumentParser(prog=f"lightning-autoparallel {CONSOLIDATE}", description=CONSOLIDATE_HELP)
    parser.add_argument("folder", metavar="FOLDER", help="a checkpoint of AutoParallelStrategy, or a URL of one")
    parser.add_argument("file", metavar="FILE", help="where to write the file")
    parser.add_argument("--trust", action="store_true", help="unpickle objects of Python, too, which may run code")
    given = parser.parse_args(args)
    consolidate(given.folder, given.file, weights_only=False if given.trust else None)
    print(given.file)
