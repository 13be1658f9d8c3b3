"""The split graphs of a recipe's training step, as ``plan`` has them before the passes over them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from unittest import mock

from torch import fx

from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.cli.main import main
from lightning_autoparallel.contracts import PartitionedGraph
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.memory import predict_step_memory, surroundings_of
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes import AxesByGroup, joint_groups, run_passes, split_passes
from lightning_autoparallel.pipeline import rewriting
from lightning_autoparallel.pipeline.stages import StageContext

SPLIT_PASSES = tuple(each.name for each in split_passes())


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfFigures:
    """What is predicted of one graph."""

    time_us: float
    exposed_us: float
    peak_bytes: int
    launches: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitStep:
    """A partitioned step, and what its passes are bound to."""

    partitioned: PartitionedGraph
    context: StageContext
    costs: CostModel

    def halves(self) -> dict[str, fx.GraphModule]:
        """The graphs by name."""
        backward = self.partitioned.backward
        assert backward is not None
        return {"forward": self.partitioned.forward, "backward": backward}

    def copied(self) -> SplitStep:
        """The same step in graphs of its own; their nodes share fake values with these."""
        halves = {name: _copied(half) for name, half in self.halves().items()}
        return dataclasses.replace(self, partitioned=dataclasses.replace(self.partitioned, **halves))

    def run(self, names: Sequence[str]) -> SplitStep:
        """Run those of the passes over split graphs that are named, in their order, in place."""
        around = partial(surroundings_of, self.partitioned)
        limit = rewriting._bucket_limit(self.context.config, self.costs)
        passes = split_passes(limit, joint_groups(self.context.mesh), self.costs, around)
        others = [name for name in SPLIT_PASSES if name not in names]
        for name, half in self.halves().items():
            run_passes(half, name, passes, AxesByGroup(self.context.mesh), ArtifactWriter(None), disabled=others)
        return self

    def figures(self) -> dict[str, HalfFigures]:
        """Predicted of each half."""
        memory = predict_step_memory(self.partitioned)
        assert memory.backward is not None
        peaks = {"forward": memory.forward.peak_bytes, "backward": memory.backward.peak_bytes}
        return {name: self._half(half.graph, peaks[name]) for name, half in self.halves().items()}

    def _half(self, graph: fx.Graph, peak_bytes: int) -> HalfFigures:
        timeline = self.costs.timeline(graph)
        counted = fxn.count_collectives(graph, AxesByGroup(self.context.mesh))
        launches = {kind: sum(one.count for one in per.values()) for kind, per in counted.items()}
        return HalfFigures(
            time_us=timeline.time_us, exposed_us=timeline.exposed_us, peak_bytes=peak_bytes, launches=launches
        )


def with_split_step(arguments: Sequence[str], look: Callable[[SplitStep], None]) -> None:
    """Call ``look`` inside of the fake world of ``plan`` with these arguments; what ``plan`` prints is left out."""
    made, stdout = rewriting.StepRewriting._rewritten, sys.stdout

    def looked_at(self):
        step = made(self)
        with contextlib.redirect_stdout(stdout):
            look(SplitStep(partitioned=step.partitioned, context=self._context, costs=self._costs))
        return step

    unchanged = ["--strategy.disabled_passes", json.dumps(SPLIT_PASSES)]
    with (
        contextlib.redirect_stdout(io.StringIO()) as hidden,
        mock.patch.object(rewriting.StepRewriting, "_rewritten", looked_at),
        mock.patch.object(sys, "argv", sys.argv[:1]),  # Lightning warns of arguments that are not its own
    ):
        assert main(["plan", *arguments, *unchanged]) == 0, hidden.getvalue()


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    (old,), (new,) = module.graph.find_nodes(op="output"), graph.find_nodes(op="output")
    new.meta = dict(old.meta)
    return fx.GraphModule(module, graph)
