"""``decompose_matmul_scatter``: what goes to one rank is sent while what goes to the next one is computed.

A reduce-scatter of a product, or of a sum of products, becomes a transfer per other rank; the rank's own part is
computed last. Parts are added in float32 where they are narrower. ``decompose/`` says which scatters that may be,
where it is predicted to be faster, and how it is written.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.fx.added_calls import FakeResults
from lightning_autoparallel.passes.decompose import DecomposeOptions, read_scatter, scatters_products, write_scatter
from lightning_autoparallel.passes.decompose.selection import Decomposition, Preview, decompose


def decompose_matmul_scatter(
    graph: fx.Graph,
    *,
    options: DecomposeOptions | None = None,
    costs: CostModel | None = None,
    preview: Preview | None = None,
) -> tuple[str, ...]:
    """Decompose reduce-scatters of products.

    ``preview`` predicts a graph once the passes behind this one have run. Without it, or ``costs``, only what
    ``options`` force is decomposed. The order ``broadcast`` has no counterpart here: parts are sent straight.

    Raises:
        ConfigError: what is forced cannot be done by the backend.
    """
    write = partial(write_scatter, results=FakeResults())
    way = Decomposition(what="reduce_scatter", is_candidate=scatters_products, read=read_scatter, write=write)
    return decompose(graph, way, options or DecomposeOptions(), costs, preview)
