"""What is said where plan ``auto`` was not found, and a training goes on without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_autoparallel.config import AUTO

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext


def told_of_shards(context: StageContext, when: str, reason: str) -> str:
    """That parameters stay in shards over all ranks, if there are several; ``when`` says what was not found."""
    idle = [name for name in context.mesh.active(context.mesh.spec.names) if not name.startswith("dp_")]
    alike = f", and all ranks of {', '.join(idle)} compute the same unless rules say otherwise" if idle else ""
    recomputed = ", and backwards recompute every block" if context.config.activation_checkpointing == AUTO else ""
    if context.mesh.device_mesh.size() == 1:
        return f"autoparallel: plan 'auto' was not found {when}{recomputed} ({reason})"
    return (
        f"autoparallel: plan 'auto' was not found {when}: parameters lie in shards over all ranks, gathered where they "
        f"are used, as plan 'fsdp' has them{alike}{recomputed} ({reason})"
    )
