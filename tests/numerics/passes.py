"""Trains a small LLaMA-3 with some passes switched off, on one rank, and says what it computed and launched."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import MeshSpec, parallelize
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.pipeline import ParallelModule
from lightning_autoparallel.torch_compat.collectives import launched_collectives
from tests.numerics.chained_gathers import whole_in_backward
from tests.numerics.rules import plan_of
from tests.numerics.training import full, local_rows

ROWS, LENGTH, VOCABULARY, STEPS = 4, 8, 64, 20


@dataclass(frozen=True, kw_only=True)
class Place:
    """A mesh, the plan on it, and the model: one whose weights are wider than what it computes with, or not.

    A `chained` plan is stored, and has products whose weight the forward reads cut over tp and the backward whole.
    """

    mesh: tuple[tuple[str, int], ...]
    plan: str
    layers: int = 1
    wide: bool = False
    chained: bool = False

    @property
    def world_size(self) -> int:
        """Processes that the mesh needs."""
        return math.prod(size for _, size in self.mesh)

    def __str__(self) -> str:
        mesh = "x".join(f"{name.removeprefix('dp_')}{size}" for name, size in self.mesh)
        return "-".join([self.plan, mesh, f"{self.layers}layers", *["wide"] * self.wide, *["chained"] * self.chained])


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The passes that are switched off, and the bytes of a bucket, by default those that saturate a link."""

    off: tuple[str, ...] = ()
    bucket_mb: float | None = None
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What one rank saw: losses of all steps, parameters afterwards, launches of every step, and what passes did.

    `changed` names the passes that wrote a note, changed the number of nodes, or that of collectives.
    """

    losses: list[float]
    parameters: dict[str, Tensor]
    measured: list[dict[str, int]]
    predicted: dict[str, int]
    measured_inference: dict[str, int]
    predicted_inference: dict[str, int]
    changed: frozenset[str]


class Judged(nn.Module):
    """LLaMA-3 and a layer with a bias on its logits, each with a loss over the same targets, some of them ignored.

    The bias is there for `join_biases`. Both losses count the targets, for `merge_identical_collectives`.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = Llama3(llama3_config("debug", {"dim": 32, "n_layers": layers, "vocab_size": VOCABULARY}))
        self.second = nn.Linear(VOCABULARY, VOCABULARY)

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        first = self.net(tokens)
        return first, self.second(first)

    def forward(self, batch: Tensor) -> Tensor:
        targets = batch[:, 1:].flatten()
        both = (logits.flatten(0, 1) for logits in self.logits(batch[:, :-1]))
        return sum(F.cross_entropy(logits, targets, ignore_index=0) for logits in both)


class Wide(Judged):
    """The same with weights in float64, cast where they are used: all of its arithmetic is in float32.

    Its casts are there for `cast_before_gather`, and for `fuse_chained_all_gathers`: without one between a weight and
    its readers, a gather over two axes takes one step already.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.double()

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        narrow = {name: parameter.float() for name, parameter in self.net.named_parameters()}
        first = torch.func.functional_call(self.net, narrow, (tokens,))
        return first, F.linear(first, self.second.weight.float(), self.second.bias.float())


def judge(place: Place, switches: Switches, stored: str | None = None) -> Judgement:
    """Train 20 steps; every rank of a world calls it alike. `stored` is the plan's file, of a chained place."""
    mesh = build_mesh(MeshSpec(axes=place.mesh), "cpu")
    plan = stored or plan_of("llama3", place.plan)
    # Over gloo, only what is forced is decomposed; the logits of a small vocabulary are no peak.
    options = {"disabled_passes": switches.off, "bucket_mb": switches.bucket_mb}
    options |= {"decompose_matmuls": "always", "loss_chunks": 2}
    return _train(_make(place, mesh, plan, compile=switches.compile, **options), mesh)


def store_chained_plan(place: Place, folder: str) -> str:
    """Write the plan whose backward reads some weights whole; its file."""
    path = Path(folder) / "changed.json"
    mesh = build_mesh(MeshSpec(axes=place.mesh), "cpu")
    _make(place, mesh, plan_of("llama3", place.plan), compile=False, dump_dir=folder)
    if dist.get_rank() == 0:
        document = json.loads((Path(folder) / "forward_backward" / "plan.json").read_text())
        assert whole_in_backward(document) == 2 * place.layers
        path.write_text(json.dumps(document))
    dist.barrier()
    return str(path)


def batches() -> list[Tensor]:
    """A batch of tokens per step, the last token of a row in the first half of them ignored as a target."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(1, VOCABULARY, (ROWS, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    for batch in drawn:
        batch[: ROWS // 2, -1] = 0
    return drawn


def _make(place: Place, mesh: ParallelMesh, plan: Any, **options: Any) -> ParallelModule:
    torch.manual_seed(0)
    module = (Wide if place.wide else Judged)(place.layers)
    return parallelize(module, (batches()[0],), mesh, plan, **options)


def _train(parallel: ParallelModule, mesh: ParallelMesh) -> Judgement:
    report = parallel.report
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, eps=1e-5)
    losses, measured = [], []
    for batch in batches():
        optimizer.zero_grad()
        with _measured(mesh) as launches:
            loss = parallel(_rows(batch, mesh))
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        measured.append(launches)
    parameters = {name: full(parameter) for name, parameter in parallel.named_parameters()}
    with torch.no_grad():
        inference = parallel.prepare(_rows(batches()[0], mesh))  # its capture may make groups, which start at 0
        with _measured(mesh) as launches:
            parallel(_rows(batches()[0], mesh))
    return Judgement(
        losses=losses,
        parameters=parameters,
        measured=measured,
        predicted=report.launches(),
        measured_inference=launches,
        predicted_inference=inference.launches(),
        changed=_changed(report),
    )


def _rows(batch: Tensor, mesh: ParallelMesh) -> Tensor:
    return local_rows(batch, mesh.data_parallel_rank, mesh.data_parallel_size)


def _changed(report: PlanReport) -> frozenset[str]:
    return frozenset(
        done.name
        for done in report.passes
        if any(not note.startswith("skipped") for note in done.notes)
        or done.nodes_before != done.nodes_after
        or done.before != done.after
    )


@contextlib.contextmanager
def _measured(mesh: ParallelMesh) -> Iterator[dict[str, int]]:
    """Fills what it yields with the launches inside by mesh axes, from the groups' own sequence numbers."""
    axes = mesh.axes_by_group()
    before = {group: launched_collectives(group) for group in axes}
    launches: dict[str, int] = {}
    yield launches
    for group, name in axes.items():
        count = launched_collectives(group) - before[group]
        if count:
            launches[name] = count
