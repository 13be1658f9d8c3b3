"""How ``decompose_gather_matmul`` and ``decompose_matmul_scatter`` find, judge and write what they decompose."""

from lightning_autoparallel.passes.decompose.gathers import Gather, NotDecomposable, feeds_products, read_gather
from lightning_autoparallel.passes.decompose.options import DecomposeOptions
from lightning_autoparallel.passes.decompose.scatters import Scatter, read_scatter, scatters_products
from lightning_autoparallel.passes.decompose.write_gather import write_gather
from lightning_autoparallel.passes.decompose.write_scatter import write_scatter

__all__ = [
    "DecomposeOptions",
    "Gather",
    "NotDecomposable",
    "Scatter",
    "feeds_products",
    "read_gather",
    "read_scatter",
    "scatters_products",
    "write_gather",
    "write_scatter",
]
