"""``decompose_gather_matmul``: a product begins with the shard that is there, while the others are on their way.

An all-gather that products read becomes a transfer per other rank. Each step multiplies one shard while the next one
travels, so that only the first transfer, at most, is waited for in vain. ``decompose/`` says which gathers that may be,
where it is predicted to be faster, and how it is written.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.liveness import SurroundingsOf
from lightning_autoparallel.fx.added_calls import FakeResults
from lightning_autoparallel.passes.decompose import DecomposeOptions, feeds_products, read_gather, write_gather
from lightning_autoparallel.passes.decompose.selection import Decomposition, Preview, decompose


def decompose_gather_matmul(
    graph: fx.Graph,
    *,
    options: DecomposeOptions | None = None,
    costs: CostModel | None = None,
    preview: Preview | None = None,
    surroundings: SurroundingsOf | None = None,
) -> tuple[str, ...]:
    """Decompose all-gathers that only products read.

    ``preview`` predicts a graph once the passes behind this one have run. Without it, or ``costs``, only what
    ``options`` force is decomposed. What is not forced stays whole where it would pass the peak, as ``surroundings`` of
    the graph have it, by more than an order may: parts that are to be added up are all kept until the last is there.

    Raises:
        ConfigError: what is forced cannot be done by the backend.
    """
    write = partial(write_gather, results=FakeResults())
    way = Decomposition(what="all_gather", is_candidate=feeds_products, read=read_gather, write=write)
    return decompose(graph, way, options or DecomposeOptions(), costs, preview, surroundings)
