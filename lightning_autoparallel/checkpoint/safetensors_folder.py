"""A folder of safetensors files with an index, as Hugging Face lays models out: read by parts, written file by file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.checkpoint.stored import Part, StoredSpec, StoredTensors, fill_parts
from lightning_autoparallel.errors import CheckpointError, ConfigError

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
MAIN = "model"  # the first part of a file's name
CONFIG = "config.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFolder(StoredTensors):
    """All tensors of a folder: those of the files that its index names, or of its only file.

    Args:
        path: the folder, or one file.
        prefix: names without it are not looked at, and the others are given without it.

    Raises:
        CheckpointError: there is no such folder or file, a file of the index is missing, or one is not whole.
        ConfigError: the package safetensors is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str = "") -> None:
        self.source = os.fspath(path)
        self._prefix = prefix
        files = [_opened(file) for file in _files(Path(path))]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        slices = {name: file.get_slice(name) for name, file in self._file_of.items() if name.startswith(prefix)}
        self.specs = {
            name.removeprefix(prefix): StoredSpec(
                tuple(found.get_shape()), _DTYPES.get(found.get_dtype(), found.get_dtype())
            )
            for name, found in slices.items()
        }

    def read(self, name: str, part: Part) -> Tensor:
        """A part of a tensor, that stays in the file until it is looked at."""
        found: Tensor = self._file_of[self._prefix + name].get_slice(self._prefix + name)[part]
        return found

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """As ``StoredTensors.fill``."""
        fill_parts(self.read, targets)


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "safetensors files need the package of this name: pip install 'lightning-autoparallel[hf]'"
        ) from error
    return safetensors


def _opened(file: Path) -> Any:
    library = _safetensors()
    try:
        return library.safe_open(str(file), framework="pt")
    except (OSError, library.SafetensorError) as error:
        raise CheckpointError(f"{file} is no whole safetensors file ({error}): fetch or write it again") from error


def _files(path: Path) -> list[Path]:
    if path.is_file() and path.name.endswith(SUFFIX):
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: give one with safetensors files, on this machine's disks")
    index = _only(path, INDEX_SUFFIX)
    if index is None:
        file = _only(path, SUFFIX)
        if file is None:
            there = sorted(entry.name for entry in path.iterdir())
            raise CheckpointError(
                f"{path} has no {MAIN}{INDEX_SUFFIX} and no {MAIN}{SUFFIX}, but {', '.join(there[:12]) or 'nothing'}"
            )
        return [file]
    files = sorted({path / file for file in _weight_map(index).values()})
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{index} names files that are not there: {', '.join(missing)}")
    return files


def _only(path: Path, suffix: str) -> Path | None:
    """The main file with this suffix, or the only one."""
    main = path / f"{MAIN}{suffix}"
    found = [main] if main.is_file() else sorted(path.glob(f"*{suffix}"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path} has several *{suffix} and none is {MAIN}{suffix}: {names}; give one of them")
    return found[0] if found else None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error


def write_safetensors(
    folder: Path,
    specs: Mapping[str, StoredSpec],
    make: Callable[[Sequence[str]], Mapping[str, Tensor]],
    max_file_bytes: int,
) -> None:
    """Write tensors to a folder, file by file: ``make`` gives those of one file, and is asked for no others meanwhile.

    Args:
        specs: all tensors, with the dtypes that they are to have.
        max_file_bytes: a file gets larger for one tensor only.
    """
    library = _safetensors()
    files = list(_divided(specs, max_file_bytes))
    digits = f"-of-{len(files):05}"
    names = [f"{MAIN}-{number:05}{digits}{SUFFIX}" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [f"{MAIN}{SUFFIX}"]
    for file, held in zip(names, files, strict=True):
        library.torch.save_file(dict(make(held)), folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file for file, held in zip(names, files, strict=True) for name in held}
        total = sum(_size_bytes(spec) for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / f"{MAIN}{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")


def _divided(specs: Mapping[str, StoredSpec], max_file_bytes: int) -> Iterable[list[str]]:
    held: list[str] = []
    size = 0
    for name, spec in specs.items():
        added = _size_bytes(spec)
        if held and size + added > max_file_bytes:
            yield held
            held, size = [], 0
        held.append(name)
        size += added
    yield held


def _size_bytes(spec: StoredSpec) -> int:
    assert isinstance(spec.dtype, torch.dtype)
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize
