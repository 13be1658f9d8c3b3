"""All ranks run the same calls in the same order: another order of collectives would hang, or mix up their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import fx

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import CapturedGraph, PartitionedGraph, ShardingPlan
from lightning_autoparallel.errors import CaptureError, PassError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.plan import fingerprint_lines, first_difference

_SETTING = "the setting "


def check_same_graph(captured: CapturedGraph, plan: ShardingPlan | None, control: ControlGroup) -> None:
    """Compare what all ranks have captured, and how it is placed where that is known.

    Raises:
        CaptureError: some rank's graph is not that of rank 0; all ranks raise it.
    """
    difference = difference_between_ranks(lambda: fingerprint_lines(captured, plan), control)
    if difference is None:
        return
    rank, node = difference
    raise CaptureError(
        f"rank {rank}'s graph differs at node {node} from rank 0's: every rank must run the same step; look for "
        "branches on the rank, on the data, or on random numbers of Python"
    )


def check_same_settings(when: str, settings: Mapping[str, object], control: ControlGroup) -> None:
    """Compare settings by name; ``when`` is what errors begin with.

    Raises:
        PassError: some rank's settings are not those of rank 0; all ranks raise it.
    """
    _check(when, lambda: _setting_lines(settings), control)


def check_same_plan(plan: PlanSpec, control: ControlGroup) -> None:
    """Compare the plans that ranks were given, before any of them places a parameter.

    Raises:
        PassError: some rank's plan is not that of rank 0; all ranks raise it.
    """
    check_same_settings("before parameters are placed", {"plan": plan.as_written()}, control)


def check_same_order(partitioned: PartitionedGraph, control: ControlGroup) -> None:
    """Compare the final graphs of all ranks: one small message where they are equal.

    Raises:
        PassError: some rank's calls, or their order, are not those of rank 0; all ranks raise it.
    """
    _check("after the passes", lambda: _lines(partitioned), control)


def check_same_start(partitioned: PartitionedGraph, settings: Mapping[str, object], control: ControlGroup) -> None:
    """Compare what passes start from: their settings, by name, and the graphs.

    Raises:
        PassError: some rank's settings or calls are not those of rank 0; all ranks raise it.
    """
    _check("before the passes", lambda: [*_setting_lines(settings), *_lines(partitioned)], control)


def _setting_lines(settings: Mapping[str, object]) -> list[str]:
    return [f"{_SETTING}{name}\t{name} {value!r}" for name, value in settings.items()]


def _check(when: str, lines: Callable[[], list[str]], control: ControlGroup) -> None:
    difference = difference_between_ranks(lines, control)
    if difference is None:
        return
    rank, node = difference
    raise PassError(
        f"{when} rank {rank} differs at {node} from rank 0, so that their collectives would not meet: {_cause(node)}"
    )


def _cause(node: str) -> str:
    same = (
        "give all ranks the same configuration (plan, disabled_passes, hardware, ranks_per_node, bucket_mb, "
        "decompose_matmuls, loss_chunks, activation_checkpointing, memory_budget_gib) and the same torch"
    )
    if node.startswith(_SETTING):
        return same
    return (
        f"{same}; where they have that already, a size that a rule cuts may not divide by the ranks of its axis "
        "(heads, features): try one that does, or 'R' in the rule"
    )


def _lines(partitioned: PartitionedGraph) -> list[str]:
    return [line for name, half in partitioned.graphs().items() for line in _order_lines(name, half.graph)]


def difference_between_ranks(lines_of: Callable[[], list[str]], control: ControlGroup) -> tuple[int, str] | None:
    """The first rank whose lines differ from rank 0's, and the node there; None, and one small message, if all agree.

    Of each line, what stands before the first tab names the node in errors; what follows is compared. Lines are made
    where there are others to compare them with.
    """
    if control.alone:
        return None
    lines = lines_of()
    if control.agrees("\n".join(line.split("\t", 1)[1] for line in lines)):
        return None
    gathered = control.gather(lines)
    difference = first_difference(gathered[0], gathered)
    assert difference is not None
    return difference


def _order_lines(name: str, graph: fx.Graph) -> Iterator[str]:
    """One line per call: how errors name it, a tab, what is compared. Numbers in calls may be those of a rank."""
    for node in graph.nodes:
        read = ",".join(argument.name for argument in node.all_input_nodes)
        yield f"{fxn.describe(node)} of the {name}\t{name} {node.name} {node.target} {read}"
