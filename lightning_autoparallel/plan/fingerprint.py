"""Graph and plan as comparable lines, so that ranks can check that they are about to run the same program."""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.contracts import CapturedGraph, ShardingPlan
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.values import digest


def fingerprint_lines(captured: CapturedGraph, plan: ShardingPlan | None = None) -> list[str]:
    """One line per node: its place in the user's code, then what is compared (operator, arguments, shape, placement).

    The two parts are separated by a tab; the first is for error messages only. Tensors that the program of the whole
    batch has found in Python are compared by their values, as numbers are.
    """
    lines = [] if captured.local else [f"{name}\t{digest(value)}" for name, value in captured.constants.items()]
    for node in captured.graph_module.graph.nodes:
        if node.op == "output":
            lines.append(f"output\t{node.args}")
            continue
        lines.append(f"{fxn.describe(node)}\t{call_text(node)} {plan.nodes[node.name] if plan else ''}")
    return lines


def call_text(node: fx.Node) -> str:
    """A node's name, operator, arguments, dtypes and shapes."""
    shapes = [f"{value.dtype}{list(value.shape)}" for value in fxn.values(node) if value is not None]
    return f"{node.name} = {node.target}{node.args}{dict(node.kwargs)} {shapes}"


def first_difference(mine: list[str], others: list[list[str]]) -> tuple[int, str] | None:
    """The first rank whose lines differ from ``mine``, and that rank's first differing node as errors name it."""
    for rank, theirs in enumerate(others):
        if theirs == mine:
            continue
        for ours, line in zip(mine, theirs, strict=False):
            if ours.split("\t", 1)[1] != line.split("\t", 1)[1]:
                return rank, line.split("\t", 1)[0]
        longer = theirs if len(theirs) > len(mine) else mine
        common = min(len(theirs), len(mine))
        if len(theirs) != len(mine):
            return rank, longer[common].split("\t", 1)[0]
    return None
