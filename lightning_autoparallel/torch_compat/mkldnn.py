"""oneDNN on the CPU, switched off while a step is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def mkldnn_off() -> Iterator[None]:
    """Its recurrent layers are one operator that keeps what only it can read; torch's own are matrix products.

    ``torch.backends.mkldnn.flags`` would set more than that, and warn of what this machine lacks.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
