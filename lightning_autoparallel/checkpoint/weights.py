"""``load_weights``: a module starts from files, read straight into each rank's shards once they exist."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightning_autoparallel.apply import materialise_whole
from lightning_autoparallel.checkpoint.location import Location
from lightning_autoparallel.checkpoint.matching import Match, match_names
from lightning_autoparallel.checkpoint.safetensors_folder import SUFFIX, SafetensorsFolder
from lightning_autoparallel.checkpoint.stored import StoredTensors, own_checkpoint
from lightning_autoparallel.errors import CheckpointError

Source = str | os.PathLike[str] | Callable[[], StoredTensors]


@dataclass(frozen=True, kw_only=True)
class _Request:
    open: Callable[[], StoredTensors]
    into: str
    strict: bool

    def match(self, module: nn.Module) -> Match:
        return match_names(module.get_submodule(self.into), self.open(), self.into, self.strict)


def load_weights(module: nn.Module, source: Source, *, into: str = "", prefix: str = "", strict: bool = True) -> None:
    """Start ``module`` from weights that lie in files.

    Called in ``configure_model`` under AutoParallelStrategy, the files are read once parameters lie in shards, and
    every rank reads its shards only: build the module on the meta device, and no rank ever holds it whole. Called
    elsewhere, or under another strategy, they are read at once; what is on meta then gets memory on the CPU, whole.

    Tensors go by their names, into the dtypes of the module. Tied parameters need one of their names only. What the
    files do not have by intent, buffers that are no part of a ``state_dict``, is initialised by the module
    (``reset_parameters``, or ``_init_weights`` of a model of transformers).

    Args:
        module: the LightningModule, or any module.
        source: a folder in Hugging Face's layout (``*.safetensors``, and an index where they are several) or one such
            file; a checkpoint of ours or of Lightning, file or folder; or a function that opens something else.
        into: the path of the submodule that takes them, ``"model"`` for what is in ``self.model``. Names in safetensors
            files are those below it, names in checkpoints those of the whole LightningModule.
        prefix: what names in safetensors files begin with before those of the submodule; others are not looked at.
        strict: whether every tensor must have its counterpart. Otherwise what the files lack starts as the module
            initialises it, what the module lacks is left out, and both are said.

    Raises:
        CheckpointError: there are no such files, or (at once or when the strategy loads them, on all ranks) they do
            not fit: names what is missing, left over, or of another shape.
        ConfigError: the package safetensors is missing, or something on meta cannot be initialised.
    """
    known = dict(module.named_modules())
    if into not in known:
        raise CheckpointError(f"into={into!r} is no submodule of {type(module).__name__}: give a path such as 'model'")
    opens = source if callable(source) else partial(_opened, source, into, prefix)
    request = _Request(open=opens, into=into, strict=strict)
    trainer = getattr(module, "_trainer", None)
    to_come = getattr(getattr(trainer, "strategy", None), "weights_to_come", None)
    if isinstance(to_come, WeightsToCome) and to_come.takes_requests:
        to_come.add(request)
        return
    match = request.match(module)
    materialise_whole(known[into], torch.device("cpu"), match.given)
    match.load(module)


class WeightsToCome:
    """What ``load_weights`` was asked for while a module was built that is to be sharded."""

    def __init__(self) -> None:
        self._requests: list[_Request] = []
        self._matches: list[Match] = []
        self.takes_requests = False

    @contextlib.contextmanager
    def requested(self) -> Iterator[None]:
        """Inside, ``load_weights`` only says what to load."""
        self.takes_requests = True
        try:
            yield
        finally:
            self.takes_requests = False

    @property
    def targets(self) -> list[str]:
        """The submodules that weights are to come for. Paths may differ between machines."""
        return [request.into for request in self._requests]

    def add(self, request: _Request) -> None:
        """Load this, after what was asked for before."""
        self._requests.append(request)

    def open(self, module: nn.Module) -> frozenset[str]:
        """Compare files and module; all names of the tensors that ``load`` will fill.

        Raises:
            CheckpointError: they do not fit.
        """
        self._matches = [request.match(module) for request in self._requests]
        return frozenset(f"{match.into}.{name}".removeprefix(".") for match in self._matches for name in match.given)

    def load(self, module: nn.Module) -> None:
        """Fill the module's tensors and shards, once."""
        matches, self._matches, self._requests = self._matches, [], []
        for match in matches:
            match.load(module)


def _opened(source: str | os.PathLike[str], into: str, prefix: str) -> StoredTensors:
    location = Location(source)
    if location.is_sharded() or (location.is_file() and not location.path.endswith(SUFFIX)):
        return own_checkpoint(source, _dotted(into))
    if not location.is_local:
        raise CheckpointError(
            f"{source} is not on this machine's disks, where safetensors files are read: copy it there"
        )
    return SafetensorsFolder(location.path, _dotted(prefix))


def _dotted(path: str) -> str:
    return f"{path}." if path and not path.endswith(".") else path
