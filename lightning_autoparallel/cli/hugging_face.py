"""`import-hf DIR OUT` and `export-hf CKPT DIR`: LLaMA between Hugging Face's layout and checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from lightning_autoparallel.models.llama3_conversion import export_hugging_face, import_hugging_face

IMPORT, EXPORT = "import-hf", "export-hf"
IMPORT_HELP = "Write a LLaMA of Hugging Face's layout as a checkpoint to start from."
EXPORT_HELP = "Write a checkpoint of Llama3Module as transformers reads it."

_KINDS = {"auto": None, "file": False, "folder": True}
_DTYPES = ("float32", "bfloat16", "float16")


def run_import(args: Sequence[str]) -> None:
    """Parse what follows the command's name, and do it.

    Raises:
        CheckpointError: the folder cannot be read or is another network, or the checkpoint cannot be written there.
        ConfigError: the package safetensors is missing.
        SystemExit: a mistake in the arguments.
    """
    parser = argparse.ArgumentParser(prog=f"lightning-autoparallel {IMPORT}", description=IMPORT_HELP)
    parser.add_argument("folder", metavar="DIR", help="config.json and safetensors files, with an index if several")
    parser.add_argument("out", metavar="OUT", help="the checkpoint, which holds weights only")
    parser.add_argument(
        "--kind", choices=list(_KINDS), default="auto", help="a file up to 8 GB and a folder above, unless given"
    )
    given = parser.parse_args(args)
    size, overrides = import_hugging_face(given.folder, given.out, _KINDS[given.kind])
    print(given.out)
    print(f"--model.init_args.weights {given.out} --model.init_args.size {size}", end="")
    print(f" --model.init_args.overrides '{json.dumps(overrides)}'" if overrides else "")


def run_export(args: Sequence[str]) -> None:
    """Parse what follows the command's name, and do it.

    Raises:
        CheckpointError: the checkpoint cannot be read or is no Llama3Module's, or the folder is not empty.
        ConfigError: the package safetensors is missing.
        SystemExit: a mistake in the arguments.
    """
    parser = argparse.ArgumentParser(prog=f"lightning-autoparallel {EXPORT}", description=EXPORT_HELP)
    parser.add_argument("checkpoint", metavar="CKPT", help="a file, or a folder of shards or a URL of one")
    parser.add_argument("folder", metavar="DIR", help="where to write; nothing may be there")
    parser.add_argument("--dtype", choices=_DTYPES, help="of all tensors; as they are stored unless given")
    parser.add_argument("--file-gb", type=float, default=5.0, help="gigabytes of one safetensors file (5)")
    parser.add_argument("--files-from", metavar="DIR", help="copy the tokenizer and other settings of this folder")
    parser.add_argument("--trust", action="store_true", help="unpickle objects of Python, too, which may run code")
    given = parser.parse_args(args)
    if not given.file_gb > 0:
        parser.error(f"--file-gb {given.file_gb:g} is not above 0")
    export_hugging_face(
        given.checkpoint,
        given.folder,
        dtype=None if given.dtype is None else getattr(torch, given.dtype),
        max_file_bytes=int(given.file_gb * 10**9),
        files_from=given.files_from,
        weights_only=False if given.trust else None,
    )
    print(given.folder)
