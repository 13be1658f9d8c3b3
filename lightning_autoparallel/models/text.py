"""Reading text as bytes from files, folders or Python's own standard library."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_autoparallel.errors import ConfigError

SUFFIXES = (".txt", ".py", ".jsonl")
"""The file kinds that hold text."""

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests"})


def read_text(path: Path | None, max_bytes: int) -> bytes:
    """The first `max_bytes` bytes of the text under a path, its files in sorted order and joined by line ends.

    Args:
        path: a file or folder; None is the standard library's sources, without its tests.
        max_bytes: reading stops once this many bytes are there.

    Raises:
        ConfigError: nothing is at the path, it holds no file of a known kind, or a `.jsonl` line has no text.
    """
    text = bytearray()
    for file in _files(path):
        text += _documents(file) + b"\n"
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])


def _files(path: Path | None) -> Iterable[Path]:
    if path is None:
        return _sources(Path(sysconfig.get_path("stdlib")))
    kinds = ", ".join(SUFFIXES)
    if not path.exists():
        raise ConfigError(f"There is no text at {path}; give a {kinds} file, a folder of them, or no path at all.")
    if path.is_file() and path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is of kind {path.suffix or 'without suffix'!r}; text is read from {kinds} files.")
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    if not files:
        raise ConfigError(f"The folder {path} holds no {kinds} file; give another folder or a file.")
    return files


def _sources(folder: Path) -> Iterator[Path]:
    """Python files below a folder in the order of their paths; as lazily as they are read, because there are many."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            if entry.name not in _NOT_LIBRARY:
                yield from _sources(entry)
        elif entry.suffix == ".py":
            yield entry


def _documents(file: Path) -> bytes:
    if file.suffix != ".jsonl":
        return file.read_bytes()
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
    return b"\n".join(_json_text(file, number, line) for number, line in lines if line.strip())


def _json_text(file: Path, number: int, line: str) -> bytes:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{file}, line {number}: expected a JSON object with a "text" field ({error!r}).') from error
    if not isinstance(text, str):
        raise ConfigError(f'{file}, line {number}: "text" is a {type(text).__name__}; it has to be a string.')
    return text.encode("utf-8")
