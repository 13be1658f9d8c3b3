"""How many collectives DTensor itself takes for a redistribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached, _optimize_transform_infos
from torch.distributed.tensor.placement_types import Partial, Replicate

from lightning_autoparallel.contracts import Placements


class StockCounts:
    """Counts on one mesh of a fake world, whose axes have been flattened in every ascending combination."""

    def __init__(self, mesh: DeviceMesh, shape: Sequence[int]) -> None:
        self._mesh = mesh
        self._meta = TensorMeta(torch.Size(shape), tuple(torch.empty(shape, device="meta").stride()), torch.float32)
        self._specs: dict[Placements, DTensorSpec] = {}

    def fewest(self, source: Placements, target: Placements) -> int | None:
        """With or without flattened meshes, whichever is fewer; None where DTensor cannot do it."""
        before, after = self._spec(source), self._spec(target)
        infos = _gen_transform_infos_non_cached(before, after)
        if any(_is_impossible(*info.src_dst_placements) for info in infos):
            return None
        merged = _optimize_transform_infos(infos, self._mesh, source, target)
        return min(sum(info._comm_type_key() is not None for info in steps) for steps in (infos, merged))

    def _spec(self, placements: Placements) -> DTensorSpec:
        if placements not in self._specs:
            self._specs[placements] = DTensorSpec(self._mesh, placements, tensor_meta=self._meta)
        return self._specs[placements]


def _is_impossible(source: object, target: object) -> bool:
    return isinstance(target, Partial) and not isinstance(source, Replicate)
