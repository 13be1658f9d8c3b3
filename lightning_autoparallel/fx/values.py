"""Values of tensors."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

_CHEAP_BYTES = 1 << 20  # of a tensor on the host
_HASHED_BYTES = 1 << 16  # what takes no time
_ROWS = 256  # that larger values are looked at as


def digest(tensor: Tensor) -> str:
    """A tensor's values in few characters, for ranks to compare."""
    return hashlib.blake2b(_bytes(tensor), digest_size=8).hexdigest()


def fingerprint(values: Tensor | np.ndarray[Any, Any]) -> str:
    """As ``digest``, in about the time of reading: larger ones by sums of rows and of columns, in whole numbers."""
    data = _as_bytes(values)
    if len(data) <= _HASHED_BYTES:
        return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()
    whole = len(data) // (8 * _ROWS) * (8 * _ROWS)
    words = data[:whole].view(np.uint64).reshape(_ROWS, -1)
    sums = words.sum(axis=1, dtype=np.uint64), words.sum(axis=0, dtype=np.uint64)
    parts = [part.tobytes() for part in (*sums, data[whole:])]
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return bytes(_as_bytes(tensor).tobytes())


def _as_bytes(values: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    plain = values.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().flatten().view(torch.uint8).numpy() if values.numel() else np.empty(0, np.uint8)


class Snapshot:
    """What a tensor was: which object, its version, and a copy of its values where looking at them is cheap.

    Torch's version does not count writes through ``tensor.data`` or through memory that numpy shares: of tensors on the
    host up to 1 MiB the values tell. Of larger ones, and of those on other devices, where each look would wait for the
    device, the version has to do.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = ref(tensor), _version(tensor)
        self._values = tensor.detach().clone() if _is_cheap(tensor) else None

    def is_of(self, tensor: Any) -> bool:
        """Whether it is the same tensor with the same values, as far as can be told."""
        if not isinstance(tensor, Tensor) or tensor is not self._tensor() or _version(tensor) != self._version:
            return False
        if self._values is None:
            return self._version is not None
        return _same_values(self._values, tensor)

    def follow(self, tensor: Tensor) -> None:
        """Take a change in place for known: from here on the version tells, as a copy for each change would cost."""
        self._tensor, self._version, self._values = ref(tensor), _version(tensor), None


def _version(tensor: Tensor) -> int | None:
    """How often it was changed in place; nobody counts for tensors made under ``torch.inference_mode``."""
    return None if tensor.is_inference() else tensor._version


def _is_cheap(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_plain and tensor.numel() * tensor.element_size() <= _CHEAP_BYTES


def _same_values(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):  # ``tensor.data = ...`` may change them
        return False
    return torch.equal(one, other) or _bytes(one) == _bytes(other)  # NaN is not equal to itself
