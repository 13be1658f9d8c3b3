"""Every pass, switched off by name, against the graph without it: the same training, and what the report says of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import AutoParallelStrategy, parallelize
from lightning_autoparallel.errors import PassError
from lightning_autoparallel.passes import all_passes
from tests.support.sgd import sgd_losses
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

ROWS, STEPS = 8, 20


class TwoHeads(nn.Module):
    """Two losses that both count the same targets: the count is computed, and without the pass reduced, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 5), nn.Linear(10, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return sum(F.cross_entropy(head(hidden), y, ignore_index=0) for head in (self.first, self.second))


class NarrowHeads(TwoHeads):
    """Computes under autocast: weights are only read in bfloat16."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x, y)


def train_on_two_axes(disabled: list[str], megabytes: float | None) -> tuple[list[float], int]:
    """Losses of three steps on a 2x2 mesh with the plan hsdp, and launches per step."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,))
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    options = {"compile": False, "disabled_passes": disabled, "bucket_mb": megabytes}
    parallel = parallelize(TwoHeads(), (x, y), mesh, "hsdp", **options)
    losses = sgd_losses(parallel, 3, x.chunk(4)[dist.get_rank()], y.chunk(4)[dist.get_rank()])
    return losses, sum(parallel.report.launches().values())


def train(
    disabled: list[str], kind: type[TwoHeads] = TwoHeads, chunks: int = 1
) -> tuple[list[float], int, dict[str, tuple[str, ...]]]:
    """Losses of 20 steps on this rank, launches per step, and the notes of the passes in the report."""
    torch.manual_seed(0)
    module = kind()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator)
    y = torch.randint(0, 5, (ROWS,), generator=generator)
    size = {"dp_shard": dist.get_world_size()}
    parallel = parallelize(module, (x, y), size, "fsdp", compile=False, disabled_passes=disabled, loss_chunks=chunks)
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = sgd_losses(parallel, STEPS, x.chunk(size)[rank], y.chunk(size)[rank])
    reports = {f"{report.name}/{report.graph}": report.notes for report in parallel.report.passes}
    return losses, sum(parallel.report.launches().values()), reports


# What each pass says of this module: two hidden layers' worth of gathers, seven gradients, one count too many.
NOTES = {
    "cast_before_gather/forward_backward": "6 casts moved before gathers",
    "merge_identical_collectives/forward_backward": "1 collectives merged",
    "join_biases/forward_backward": "biases joined with their products",
    "chunk_loss_head/forward_backward": ": 2 chunks of rows",
    "tag_collectives/forward_backward": "6 gathers of parameters, 6 reductions of gradients",
    "bucket_collectives/forward_backward.backward": "2 all_gather in 1 buckets",
    "fuse_chained_all_gathers/forward_backward.forward": "skipped: one axis",
    "decompose_gather_matmul/forward_backward.forward": "6 all_gather with products stay whole: over gloo",
    "decompose_matmul_scatter/forward_backward.backward": "1 reduce_scatter with products stay whole: over gloo",
    "prefetch_gathers/forward_backward.forward": "5 gathers started 1 ahead",
    "sink_waits/forward_backward.backward": "waits moved to their first use",
    "schedule_overlap/forward_backward.backward": "exposed ",
    "cap_compute_runs/forward_backward.backward": "heavy calls between reductions",
    "exchange_reduce_scatters/forward_backward.backward": "6 reduce_scatter exchanged, and added up on each rank",
}


# Six gathers in the forward, two in the backward, and six gradients: one launch of each. Heads in chunks are not
# gathered for the backward, which are those two.
FEWER_LAUNCHES = {"merge_identical_collectives": 1, "bucket_collectives": 5 + 1 + 5, "chunk_loss_head": 2}


IN_TURN = ("cast_before_gather", "bucket_collectives", "decompose_gather_matmul", "schedule_overlap")
NAMES = [graph_pass.name for graph_pass in all_passes()]


@pytest.mark.parametrize("name", tiered(NAMES, IN_TURN.__contains__))
def test_a_pass_changes_the_graph_and_no_numbers(name: str, worlds: Worlds):
    kind = NarrowHeads if name == "cast_before_gather" else TwoHeads
    # What is one launch leaves nothing to the other passes.
    off = [] if name == "bucket_collectives" else ["bucket_collectives"]
    chunks = 2 if name == "chunk_loss_head" else 1
    losses, launches, notes = worlds(2).run(train, off, kind, chunks)[0]
    plain_losses, plain_launches, plain_notes = worlds(2).run(train, [*off, name], kind, chunks)[0]
    assert losses[0] == pytest.approx(plain_losses[0], rel=1e-6)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    (key,) = [key for key in NOTES if key.startswith(name)]
    assert any(NOTES[key] in note for note in notes[key])
    assert not any(key.startswith(name) for key in plain_notes)
    assert plain_launches - launches == FEWER_LAUNCHES.get(name, 0)


def test_all_passes_off_at_once_change_no_numbers(worlds: Worlds):
    names = [graph_pass.name for graph_pass in all_passes()]
    assert {key.split("/")[0] for key in NOTES} == set(names)  # a pass that is left out is not merely tested less
    (losses, _, _), (plain_losses, _, plain_notes) = (worlds(2).run(train, off)[0] for off in ([], names))
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert plain_notes == {}


@pytest.mark.matrix
def test_buckets_over_two_axes_change_no_numbers(worlds: Worlds):
    """Gradients scattered over one axis and summed over the other, buckets of each; limits of 1 MB and of 200 bytes."""
    plain = worlds(4).run(train_on_two_axes, ["bucket_collectives"], None)[0]
    merged, small = (worlds(4).run(train_on_two_axes, [], megabytes)[0] for megabytes in (1.0, 2e-4))
    assert merged[0] == pytest.approx(plain[0], rel=1e-6)
    assert small[0] == pytest.approx(plain[0], rel=1e-6)
    assert merged[1] < small[1] < plain[1]


def test_an_unknown_pass_is_refused_when_the_strategy_is_made():
    with pytest.raises(PassError, match="no pass is called 'bucket_everything': passes are cast_before_gather, merge_"):
        AutoParallelStrategy(disabled_passes=["bucket_everything"])
