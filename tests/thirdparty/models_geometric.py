"""Graph networks of torch_geometric on batches of small graphs, which are objects of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.thirdparty.built import ROWS, STEPS, Builder, Built, Step, generator


class Graphs(nn.Module):
    """Convolutions over edges, then a class per graph."""

    def __init__(self, convolutions: nn.Module) -> None:
        super().__init__()
        self.convolutions, self.head = convolutions, nn.Linear(8, 3)

    def forward(self, data: Any) -> torch.Tensor:
        from torch_geometric.nn import global_mean_pool

        hidden = self.convolutions(data.x, data.edge_index)
        return self.head(global_mean_pool(hidden, data.batch, data.num_graphs))


def graphs(same_size: bool) -> list[list[Any]]:
    """Lists of graphs: rings, each with a chord."""
    from torch_geometric.data import Data

    random, batches = generator(), []
    for _ in range(STEPS):
        batch = []
        for row in range(ROWS):
            nodes = 5 if same_size else 4 + row
            start = torch.arange(nodes)
            edges = torch.stack([start, (start + 1) % nodes])
            edges = torch.cat([edges, edges.flip(0), torch.tensor([[0], [2]])], dim=1)
            label = torch.randint(0, 3, (1,), generator=random)
            batch.append(Data(x=torch.randn(nodes, 6, generator=random), edge_index=edges, y=label))
        batches.append(batch)
    return batches


def joined(batch: list[Any], rank: int, shards: int) -> Any:
    """A rank's graphs as one `Batch`."""
    from torch_geometric.data import Batch

    each = len(batch) // shards
    return Batch.from_data_list(batch[rank * each : (rank + 1) * each])


def classifier(kind: str, same_size: bool = False, **options: Any) -> Built:
    """One of the library's networks as a classifier of graphs."""
    from torch_geometric.nn import models

    net = Graphs(getattr(models, kind)(6, 8, num_layers=2, **options))

    def loss(net: nn.Module, data: Any) -> torch.Tensor:
        return F.cross_entropy(net(data), data.y)

    return Built(module=Step(net, loss), batches=graphs(same_size), rows=joined)


def nodes() -> Built:
    """A class per node, of those that a mask selects."""
    built = classifier("GCN", out_channels=3)

    def loss(net: nn.Module, data: Any) -> torch.Tensor:
        chosen = data.x[:, 0] > -0.5
        labels = (data.x[:, 1] > 0).long()
        return F.cross_entropy(net.convolutions(data.x, data.edge_index)[chosen], labels[chosen])

    built.module.loss = loss
    return built


MODELS: dict[str, Builder] = {
    "gcn": partial(classifier, "GCN"),
    "gcn_same_size": partial(classifier, "GCN", same_size=True),
    "gat": partial(classifier, "GAT", heads=2),
    "graph_sage": partial(classifier, "GraphSAGE"),
    "gin": partial(classifier, "GIN"),
    "pna": partial(
        classifier,
        "PNA",
        aggregators=["mean", "max"],
        scalers=["identity", "amplification"],
        deg=torch.tensor([0, 0, 4, 2]),
    ),
    "masked_nodes": nodes,
}
