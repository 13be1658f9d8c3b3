"""Inductor's cache of compiled graphs on disk, for graphs whose sizes are all known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.codecache import FxGraphHashDetails
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextlib.contextmanager
def kept_on_disk(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """What Inductor compiles inside is found again by later processes, where the user's settings of its cache allow.

    It keeps a graph only where it can ask its fake mode for guards on sizes, of which ours have none. Torch versions
    whose cache leaves out what code depends on, the number of threads and the default dtype, are told the one and not
    asked where the other is unusual.
    """
    if fake_mode is None or fake_mode.shape_env is not None:
        yield
        return
    fake_mode.shape_env = ShapeEnv()
    try:
        with inductor_config.patch(_told_to_older_caches()):
            yield
    finally:
        fake_mode.shape_env = None


def _told_to_older_caches() -> dict[str, Any]:
    if hasattr(FxGraphHashDetails, "_may_generate_cpu_cpp_code"):
        return {}
    usual = torch.get_default_dtype() is torch.float32
    return {"cpp.threads": torch.get_num_threads(), "fx_graph_cache": inductor_config.fx_graph_cache and usual}
