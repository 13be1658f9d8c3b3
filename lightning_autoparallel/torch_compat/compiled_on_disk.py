"""Inductor's cache of compiled graphs on disk, for graphs whose sizes are all known."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from torch._inductor import config as inductor_config
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_autoparallel.torch_compat import rank_operators


@contextlib.contextmanager
def kept_on_disk(fake_mode: FakeTensorMode | None, on_cpu: bool) -> Iterator[None]:
    """What Inductor compiles inside is found again by later processes, where the user's settings of its cache allow.

    It keeps a graph only where it can ask its fake mode for guards on sizes, of which ours have none. ``on_cpu`` says
    that the graph has tensors there.
    """
    lacks_shapes = fake_mode is not None and fake_mode.shape_env is None
    shapes = mock.patch.object(fake_mode, "shape_env", ShapeEnv()) if lacks_shapes else contextlib.nullcontext()
    with torch.compiler.config.patch(cache_key_tag=_key_tag(on_cpu)), shapes:  # type: ignore[attr-defined]
        yield


def cache_folder() -> str | None:
    """Where graphs are kept; None where the user keeps none, or the folder cannot be made: compiling says why."""
    if not inductor_config.fx_graph_cache or inductor_config.force_disable_caches:
        return None
    try:
        return cache_dir()
    except OSError:
        return None


def _key_tag(on_cpu: bool) -> str:
    """What compiled code depends on and the key of the cache, in this or another version of torch, leaves out.

    The user's own tag goes before it. Code for the CPU is written for its widest vectors, by name: on another CPU it
    would compute nonsense.
    """
    known = [torch.compiler.config.cache_key_tag, str(torch.get_default_dtype()), _own_operators()]
    return " ".join([*known, str(pick_vec_isa()), str(torch.get_num_threads())] if on_cpu else known)


@cache
def _own_operators() -> str:
    return hashlib.blake2b(Path(rank_operators.__file__).read_bytes(), digest_size=8).hexdigest()
