"""The head of a loss: the product that makes its widest value, and what is computed with that, in chunks of rows."""

from lightning_autoparallel.passes.loss_head.chunk_options import ChunkOptions
from lightning_autoparallel.passes.loss_head.head_region import HeadRegion, NotChunkable, find_region
from lightning_autoparallel.passes.loss_head.write_chunks import write_chunks

__all__ = ["ChunkOptions", "HeadRegion", "NotChunkable", "find_region", "write_chunks"]
