"""Names of torch's operators by what a compiler makes of them; what no set names is a kernel of its own."""

from __future__ import annotations

_VIEWS = """alias as_strided chunk detach diagonal expand lift_fresh movedim mT narrow permute reshape _reshape_alias
select slice split split_with_sizes squeeze swapaxes t transpose unbind _unsafe_view unsqueeze view view_as"""
_EMPTY = "empty empty_like empty_strided new_empty new_empty_strided"
_SIZES = "sym_numel sym_size sym_storage_offset sym_stride"
_GENERATORS = """arange eye fill full full_like iota new_full new_ones new_zeros ones ones_like rand randn scalar_tensor
zeros zeros_like"""
_POINTWISE = """cat constant_pad_nd convert_element_type flip masked_fill native_dropout native_dropout_backward repeat
roll select_backward select_scatter slice_backward slice_scatter split_with_sizes_copy stack _to_copy tril triu where"""
_REDUCTIONS = """all amax amin any argmax argmin cumsum linalg_vector_norm _log_softmax _log_softmax_backward_data
logsumexp max mean min native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward norm
prod _softmax _softmax_backward_data std std_mean sum var var_mean"""

# Our own, whose result depends on the rank.
_RANKED_VIEWS = "rank_chunk"
_RANKED_POINTWISE = "rank_cat rank_sum"

REDUCTIONS = frozenset(_REDUCTIONS.split())
"""What reads a row, or all, of its input before it gives any of its result; overloads tagged as pointwise do not."""
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "take"})
"""Rows that are looked up: as many bytes of the table (the first argument) are read as are written."""
FREE = frozenset(f"{_VIEWS} {_RANKED_VIEWS} {_EMPTY} {_SIZES}".split())
"""Nothing moves."""
FUSED = LOOKUPS | REDUCTIONS | frozenset(f"{_GENERATORS} {_POINTWISE} {_RANKED_POINTWISE}".split())
"""Computed with what is before and after, as everything that torch tags as pointwise is."""
