"""A report by kind of module: modules whose paths differ in numbers only are one kind, such as ``layers.*.norm``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.table import Table

from lightning_autoparallel.callbacks.tables import make_table
from lightning_autoparallel.contracts import CollectiveCount, ModuleReport, ParameterReport, PlanReport
from lightning_autoparallel.cost.sizes import format_bytes
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.nodes import kind_of

_STEP = "(the step itself)"
_ITSELF = "(itself)"


@dataclass(frozen=True, kw_only=True)
class KindBytes:
    """What all modules of one kind hold on one rank, in bytes; ``optimizer`` is None where it is not known."""

    kind: str
    modules: int
    placements: str
    parameters: int
    gradients: int
    optimizer: int | None
    saved: int


def kinds(report: PlanReport) -> Iterator[KindBytes]:
    """Every kind of module that holds parameters or saves values; each kind of block as a whole, then its parts."""
    owners = (name.rpartition(".")[0] for name in report.parameters)
    paths = dict.fromkeys((*(module.path for module in report.modules), *owners))
    by_block: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        block = fxn.block_of(path)
        group = kind_of(path if block is None else block)
        by_block.setdefault(group, {}).setdefault(kind_of(path), []).append(path)
    for group, members in by_block.items():
        if list(members) != [group]:
            yield _whole_block(report, group)
        for kind, inside in members.items():
            yield _one_kind(report, f"{kind}.{_ITSELF}" if kind == group and len(members) > 1 else kind, inside)


def _one_kind(report: PlanReport, kind: str, paths: list[str]) -> KindBytes:
    inside = set(paths)
    named = [(name, p) for name, p in report.parameters.items() if name.rpartition(".")[0] in inside]
    written = dict.fromkeys(f"{name.rpartition('.')[2]} {_placements(parameter)}" for name, parameter in named)
    saved = [module for module in report.modules if module.path in inside]
    return _row(kind, len(inside), "; ".join(written), [parameter for _, parameter in named], saved)


def _whole_block(report: PlanReport, kind: str) -> KindBytes:
    def inside(path: str) -> bool:
        block = fxn.block_of(path)
        return block is not None and kind_of(block) == kind

    parameters = {name: parameter for name, parameter in report.parameters.items() if inside(name)}
    saved = [module for module in report.modules if inside(module.path)]
    blocks = {fxn.block_of(path) for path in (*parameters, *(module.path for module in saved))}
    return _row(kind, len(blocks), "", list(parameters.values()), saved)


def _row(
    kind: str, modules: int, placements: str, parameters: list[ParameterReport], saved: list[ModuleReport]
) -> KindBytes:
    return KindBytes(
        kind=kind,
        modules=modules,
        placements=placements,
        parameters=sum(parameter.parameter_bytes for parameter in parameters),
        gradients=sum(parameter.gradient_bytes for parameter in parameters),
        optimizer=_sum_known(parameter.optimizer_bytes for parameter in parameters),
        saved=sum(module.saved_bytes for module in saved),
    )


def _sum_known(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def _placements(parameter: ParameterReport) -> str:
    return "{" + ", ".join(f"{axes}: {placement}" for axes, placement in parameter.placements.items()) + "}"


def kinds_table(report: PlanReport) -> Table:
    """``kinds`` as a table; parts of a block are indented below it and summed up in it, the last row is the sum."""
    table = make_table(
        "Memory of one rank by kind of module, all modules of a kind together (predicted)",
        ("module", "placements"),
        ("modules", "parameters", "gradients", "optimizer", "saved"),
        caption="shards with their padding; saved: kept by the forward for the backward",
    )
    for row in kinds(report):
        _add_row(table, row, _label(row.kind))
    everything = KindBytes(
        kind="all",
        modules=0,
        placements="",
        parameters=report.parameters_bytes,
        gradients=report.gradients_bytes,
        optimizer=report.optimizer_bytes,
        saved=report.saved_bytes,
    )
    table.add_section()
    _add_row(table, everything, "all")
    return table


def _label(kind: str) -> str:
    _, star, rest = kind.partition("*")
    return f"  {rest}" if star and rest else kind or _STEP


def _add_row(table: Table, row: KindBytes, label: str) -> None:
    optimizer = "unknown" if row.optimizer is None else format_bytes(row.optimizer)
    sizes = (format_bytes(row.parameters), format_bytes(row.gradients), optimizer, format_bytes(row.saved))
    table.add_row(label, row.placements, str(row.modules) if row.modules else "", *sizes)


def block_collectives(report: PlanReport) -> Iterator[tuple[str, str, str, str, float, CollectiveCount]]:
    """Per kind of block: its kind, the graph, kind and axes of collectives, launches per block, and their sum."""
    counts: dict[tuple[str, str, str, str], CollectiveCount] = {}
    blocks: dict[str, set[str]] = {}
    for module in report.modules:
        block = fxn.block_of(module.path)
        if block is None:
            continue
        blocks.setdefault(kind_of(block), set()).add(block)
        for graph, table in module.collectives.items():
            for kind, per_axes in table.items():
                for axes, counted in per_axes.items():
                    key = (kind_of(block), graph, kind, axes)
                    counts[key] = counts.get(key, CollectiveCount()) + counted
    for (block_kind, graph, kind, axes), counted in sorted(counts.items(), key=lambda item: _graph_first(item[0])):
        yield block_kind, graph, kind, axes, counted.count / len(blocks[block_kind]), counted


def _graph_first(key: tuple[str, str, str, str]) -> tuple[str, bool, str, str, str]:
    block, graph, kind, axes = key
    return block, graph == "backward", graph, kind, axes


def blocks_table(report: PlanReport) -> Table:
    """``block_collectives`` as a table; a block whose launches differ from another's shows their mean."""
    table = make_table(
        "Collectives by kind of block (predicted)",
        ("block", "graph", "kind", "axes"),
        ("launches per block", "size per block"),
    )
    for block, graph, kind, axes, launches, counted in block_collectives(report):
        each = format_bytes(round(counted.size_bytes * launches / counted.count))
        table.add_row(block, graph, kind, axes, f"{launches:.4g}", each)
    return table
