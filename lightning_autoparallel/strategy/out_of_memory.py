"""What an error that says that memory ran out does not know: how much was predicted, and what for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.config import AUTO, EngineConfig
from lightning_autoparallel.contracts import LARGEST_SHOWN, GraphPrediction, MemoryShare, PlanReport
from lightning_autoparallel.cost.sizes import format_bytes

_CPU_ALLOCATOR = "DefaultCPUAllocator"  # opens the message of a RuntimeError, which has no class of its own


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory, or the host's, ran out."""
    on_host = isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    return on_host or isinstance(error, torch.OutOfMemoryError | MemoryError)


def memory_note(
    reports: Mapping[str, PlanReport],
    step: str,
    config: EngineConfig,
    parameters: Iterable[Tensor],
    optimizer_state: Iterable[Tensor],
) -> str:
    """The predicted peak of ``step`` with the largest values in it, what this rank holds besides, and what to do.

    Args:
        reports: of what was captured, by step or module call.
        step: ``training_step`` or a sibling.
        config: how it was planned.
        parameters: of the module.
        optimizer_state: tensors that optimizers keep.
    """
    found = config.plan.base == AUTO and any(name.startswith(step) and ":" not in name for name in reports)
    held = f"{format_bytes(local_bytes(parameters))} of parameters and {format_bytes(local_bytes(optimizer_state))} of "
    lines = [f"autoparallel: this rank holds {held}optimizer state; {_remedy(config, found)} it needs less memory"]
    predictions = {
        f"{name} ({graph})": predicted
        for name, report in reports.items()
        if name.startswith(step)
        for graph, predicted in report.predictions.items()
    }
    if not predictions:
        return f"{lines[0]}. No peak of {step} is predicted: {_why(reports, step)}"
    name, largest = max(predictions.items(), key=lambda item: item[1].peak_memory_bytes)
    return "\n".join([f"{lines[0]}. Besides, predicted for {name}:", *_peak(largest)])


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's shards."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _peak(predicted: GraphPrediction) -> list[str]:
    largest = predicted.at_peak[:LARGEST_SHOWN]
    return [
        f"  a peak of {format_bytes(predicted.peak_memory_bytes)}, of {len(predicted.at_peak)} values. The largest:",
        *(f"  {format_bytes(share.size_bytes)}: {_shown(share)}" for share in largest),
    ]


def _shown(share: MemoryShare) -> str:
    where = f", made in {share.module}" if share.module else ""
    return f"{share.name} ({share.kind}{where})"


def _remedy(config: EngineConfig, found: bool) -> str:
    recompute = "activation_checkpointing='full', " if config.activation_checkpointing == "none" else ""
    if found:
        return (
            "with a smaller memory_budget_gib, by which plan 'auto' shares out more of the parameters, "
            f"{recompute}or smaller batches (accumulate_grad_batches),"
        )
    if recompute:
        return f"with {recompute}or smaller batches (accumulate_grad_batches),"
    return "with smaller batches (accumulate_grad_batches), or more ranks to share parameters out to,"


def _why(reports: Mapping[str, PlanReport], step: str) -> str:
    notes = [note for name, report in reports.items() if name.startswith(step) for note in report.notes]
    return "; ".join(notes) or "nothing was captured of it"
