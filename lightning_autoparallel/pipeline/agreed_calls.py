"""What ranks compare before a call is captured or runs: the call, its batch, and the rows that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_autoparallel.capture import BatchLayout
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.fx.values import digest
from lightning_autoparallel.pipeline.agreement import (
    StepIdentity,
    check_same_call,
    check_same_rows,
)
from lightning_autoparallel.pipeline.compared_steps import compare_step
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.pipeline.step_calls import StepCall


@dataclass(frozen=True)
class Taken:
    """What a step takes from outside of its batch: numbers and tensors as text, digests of buffers that changed."""

    fed: str
    buffers: Mapping[str, str]


Agreement = Callable[[], None]  # waits for the answer, and raises where ranks differ


def check_agreement(
    context: StageContext,
    call: StepCall,
    layout: BatchLayout,
    leaves: Sequence[tuple[str, Any]],
    variant: int,
    state: Any,
    taken: Taken | None = None,
) -> None:
    """Whether every rank is about to run variant number ``variant`` of a call, on a batch of one kind.

    ``taken`` is what a captured step takes from outside of its batch; of a call, the number of its draws.

    Raises:
        AutoParallelError: on all ranks, if one is not.
    """
    now, fed = _state_text(layout, state), taken.fed if taken is not None else ""
    if call.local:
        batch = f"{layout} in {layout.structure}"
        mine = StepIdentity(
            name=call.name, batch=batch, shapes={}, values={}, variant=variant, module_state=now, fed=fed
        )
        check_same_call(context.control, mine)
        if layout.refused:
            raise CaptureError(f"{call.name}: {layout.refused}")
        return
    begin_agreement(context, call, layout, leaves, variant, state, taken, ahead=False)()


def begin_agreement(
    context: StageContext,
    call: StepCall,
    layout: BatchLayout,
    leaves: Sequence[tuple[str, Any]],
    variant: int,
    state: Any,
    taken: Taken | None = None,
    ahead: bool = True,
) -> Agreement:
    """The same of a step of the whole module, which may run ``ahead`` of the answer; what it gives waits for that."""
    batched = {leaf.path for leaf in layout.leaves if leaf.batched}
    values = {path: digest(leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and path not in batched}
    values |= {path: repr(leaf) for path, leaf in leaves if type(leaf) in (int, float)}
    mine = StepIdentity(
        name=call.name,
        batch=str(layout),
        shapes={leaf.path: leaf.shape for leaf in layout.tensors if leaf.shape is not None},
        values=values,
        variant=variant,
        module_state=_state_text(layout, state),
        fed=taken.fed if taken is not None else "",
        buffers=taken.buffers if taken is not None else {},
        written="" if context.control.alone else context.own_writes.text(),
    )
    differences = compare_step(context.control, mine, ahead, call.training)

    def answered() -> None:
        context.own_writes.tell(differences(), call.name, context.warn, context.control.gather)
        context.own_writes.clear()

    return answered


def _state_text(layout: BatchLayout, state: Any) -> str:
    return repr((state, layout.same, sorted(layout.sharing)))


def check_shared_rows(
    context: StageContext, call: StepCall, layout: BatchLayout, leaves: Sequence[tuple[str, Any]]
) -> None:
    """Once per kind of batch: ranks that other axes than dp_* tell apart hold the same rows.

    What a module hands to the next carries a gradient; it may differ in the last bit.

    Raises:
        ConfigError: they do not.
    """
    mesh = context.mesh
    if mesh.device_mesh.size() == mesh.data_parallel_size:
        return
    batched = {leaf.path for leaf in layout.tensors if leaf.batched or (call.local and not leaf.requires_grad)}
    digests = {path: digest(leaf) for path, leaf in leaves if path in batched}
    check_same_rows(context.control, mesh.data_parallel_rank, digests)
