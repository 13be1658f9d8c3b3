"""Which collectives lead to which, buckets taken as one: what may not be merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from lightning_autoparallel.fx import nodes as fxn


class CollectivePaths:
    """Paths between tagged collectives; ``merge`` makes two of them one, and paths lead through it.

    Only the nodes between parameters and gathers, and between reductions and outputs, are walked: a terminal reduction
    leads to no gather, so that no cycle has members of both kinds. ``candidates`` are the tagged collectives for which
    the graph still bears their tag out; others take part in no bucket.
    """

    def __init__(self, graph: fx.Graph) -> None:
        tagged = [node for node in graph.nodes if fxn.collective_role(node) and _is_waited_for(node)]
        known = set(tagged)
        self._bucket: dict[fx.Node, list[fx.Node]] = {node: [node] for node in tagged}
        self._later: dict[fx.Node, list[fx.Node]] = {node: [] for node in tagged}
        self.candidates: list[fx.Node] = []
        for node in tagged:
            is_gather = fxn.collective_role(node) == fxn.PARAMETER_GATHER
            nearest = _nearest(node, known, upstream=is_gather)
            if nearest is None:
                continue
            self.candidates.append(node)
            for other in nearest:
                first, second = (other, node) if is_gather else (node, other)
                self._later[first].append(second)

    def may_merge(self, bucket: Sequence[fx.Node], node: fx.Node) -> bool:
        """Whether no path leads from the bucket to the node, or back."""
        return not self._leads(bucket[0], node) and not self._leads(node, bucket[0])

    def merge(self, bucket: Sequence[fx.Node], node: fx.Node) -> None:
        """Make ``node`` a member of the bucket."""
        members = self._bucket[bucket[0]]
        members.append(node)
        self._bucket[node] = members

    def _leads(self, source: fx.Node, target: fx.Node) -> bool:
        goal = self._bucket[target]
        seen: set[int] = set()
        pending = [self._bucket[source]]
        while pending:
            members = pending.pop()
            if id(members) in seen:
                continue
            seen.add(id(members))
            following = [self._bucket[later] for member in members for later in self._later[member]]
            if any(later is goal for later in following):
                return True
            pending.extend(following)
        return False


def _is_waited_for(node: fx.Node) -> bool:
    return bool(node.users) and all(fxn.is_wait(user) for user in node.users)


def _nearest(node: fx.Node, tagged: set[fx.Node], *, upstream: bool) -> list[fx.Node] | None:
    """The tagged collectives of its own role that a gather depends on, or that depend on a reduction.

    No path between them leads through another one. None where the tag does not hold: a gather that depends on a
    reduction, or a reduction that something else is computed with.
    """
    found: list[fx.Node] = []
    seen: set[fx.Node] = set()
    pending = _neighbours(node, upstream)
    while pending:
        current = pending.pop()
        if current in seen or current.op != "call_function":
            continue
        seen.add(current)
        if current in tagged:
            if fxn.collective_role(current) != fxn.collective_role(node):
                return None
            found.append(current)
        elif not upstream and len(current.all_input_nodes) != 1:
            return None
        else:
            pending.extend(_neighbours(current, upstream))
    return sorted(found)


def _neighbours(node: fx.Node, upstream: bool) -> list[fx.Node]:
    nodes: Iterable[fx.Node] = node.all_input_nodes if upstream else node.users
    return list(nodes)
