"""Torch's own decomposition tables."""

from torch._decomp import core_aten_decompositions, get_decompositions

__all__ = ["core_aten_decompositions", "get_decompositions"]
