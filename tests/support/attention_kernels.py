"""The kernels of attention that torch chooses on a Hopper GPU, the CUDA device ``cuda:0``, be it there or not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
HALF, FULL, DOUBLE = torch.bfloat16, torch.float32, torch.float64
# As an H200 was seen to choose under torch 2.11 with cuDNN 9.19; tests/gpu asks a real one.
EXPECTED = {
    "half": "cudnn",
    "half, causal": "cudnn",
    "half, dropout": "cudnn",
    "half, heads of 256": "cudnn",
    "half, heads of 264": "efficient",
    "half, mask": "cudnn",
    "half, causal, more keys": "cudnn",
    "float32": "efficient",
    "half, mask, heads of 12": "math",
    "float32, heads of 6": "math",
    "float64": "math",
    "half, fewer key heads": "math",
    "half, grouped": "cudnn",
    "float32, grouped": "math",
    "half, one key": "flash",
    "half, deterministic": "flash",
    "half, efficient first": "efficient",
    "half, products only": "math",
    "float32, flash only": "No available kernel",
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged: what no kernel can compute is said of each of them."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Only kernels that always give the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def chosen_kernels() -> dict[str, str]:
    """Which kernel each call takes, by what is said of it in ``EXPECTED``.

    Where fake tensors are made, no two calls are of the same sizes under other allowed kernels: they remember answers.
    """
    with quiet():
        return _all_chosen()


def _all_chosen() -> dict[str, str]:
    found = {
        "half": _chosen(HALF, 64),
        "half, causal": _chosen(HALF, 64, is_causal=True),
        "half, dropout": _chosen(HALF, 64, dropout_p=0.1),
        "half, heads of 256": _chosen(HALF, 256),
        "half, heads of 264": _chosen(HALF, 264),
        "half, mask": _chosen(HALF, 64, mask=(8, 8)),
        "half, causal, more keys": _chosen(HALF, 64, keys=16, is_causal=True),
        "float32": _chosen(FULL, 64),
        "half, mask, heads of 12": _chosen(HALF, 12, mask=(8, 8)),
        "float32, heads of 6": _chosen(FULL, 6),
        "float64": _chosen(DOUBLE, 64),
        "half, fewer key heads": _chosen(HALF, 64, heads=(4, 2)),
        "half, grouped": _chosen(HALF, 64, heads=(4, 2), enable_gqa=True),
        "float32, grouped": _chosen(FULL, 64, heads=(4, 2), enable_gqa=True),
    }
    found["half, one key"] = _chosen(HALF, 64, keys=1)
    with deterministic():
        found["half, deterministic"] = _chosen(HALF, 64, queries=16)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        found["half, efficient first"] = _chosen(HALF, 64, queries=24)
    with sdpa_kernel(SDPBackend.MATH):
        found["half, products only"] = _chosen(HALF, 64, queries=32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found["float32, flash only"] = _chosen(FULL, 64, queries=40)
    return found


def _chosen(
    dtype: torch.dtype,
    head: int,
    *,
    queries: int = 8,
    keys: int = 8,
    heads: tuple[int, int] = (4, 4),
    mask: tuple[int, int] | None = None,
    **options: bool | float,
) -> str:
    def made(count: int, length: int) -> torch.Tensor:
        return torch.empty(2, count, length, head, dtype=dtype, device="cuda:0", requires_grad=True)

    given = None if mask is None else torch.empty(mask, dtype=dtype, device="cuda:0")
    query, key = made(heads[0], queries), made(heads[1], keys)
    try:
        return NAMES[torch._fused_sdp_choice(query, key, key, given, **options)]
    except RuntimeError as error:
        return str(error).partition(".")[0]
