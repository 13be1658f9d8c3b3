"""Members of enums in a checkpoint's metadata, as early releases of Python 3.11 (3.11.2 for one) write them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat

from lightning_autoparallel.torch_compat.dcp import _MetadataUnpickler


class Named:
    """Is pickled as an attribute of ``owner``."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)


def loaded(owner: Any, name: str) -> Any:
    return _MetadataUnpickler(io.BytesIO(pickle.dumps(Named(owner, name)))).load()


def test_a_member_is_read() -> None:
    assert loaded(SerializationFormat, "TORCH_SAVE") is SerializationFormat.TORCH_SAVE


@pytest.mark.parametrize(("owner", "name"), [(SerializationFormat, "__class__"), (torch.Size, "numel")])
def test_no_other_attribute_is(owner: Any, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=f"'{name}' of .* does not belong into"):
        loaded(owner, name)


def test_what_the_module_of_metadata_imports_is_refused() -> None:
    named = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    with pytest.raises(pickle.UnpicklingError, match=r"metadata\.os\.system does not belong into"):
        _MetadataUnpickler(io.BytesIO(named)).load()
