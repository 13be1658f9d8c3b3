"""What the user's activation-checkpoint regions change: torch runs these again in the backward, and it changes again.

Two updates of batch norm's statistics in a step are what one device makes of such a region. A graph runs it once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.capture.stand_ins import ListStandIn

if TYPE_CHECKING:
    from lightning_autoparallel.capture.state import StepState


class RegionWrites:
    """Opened ``around`` each region of a step."""

    def __init__(self, module: nn.Module, state: StepState) -> None:
        self._module, self._state = module, state

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A region that nobody differentiates runs once.

        Raises:
            CaptureError: the region has changed a buffer, counted, or appended to a list.
        """
        if not torch.is_grad_enabled():
            yield
            return
        buffers, counted = self._buffers(), self._counted()
        yield
        changed = [f"buffer {name!r}" for name, now in self._buffers().items() if buffers.get(name, now) != now]
        changed += [text for identity, text in self._counted().items() if identity not in counted]
        if changed:
            raise self._state.watcher.refuse(
                f"{user_line()} checkpoints activations of what changes {changed[0]}: torch runs that again in the "
                "backward, which changes it a second time, as a captured step does not"
            )

    def _buffers(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._module.named_buffers()}

    def _counted(self) -> dict[Any, str]:
        """Numbers that the run has read and written, and lists with what it has appended."""
        reads = self._state.reads
        numbers: dict[Any, str] = {place.identity: place.text for place in reads.counted_places()}
        grown: dict[Any, str] = {
            (item.place.identity, len(item)): item.place.text
            for item, _ in reads.changed.values()
            if isinstance(item, ListStandIn) and item.place is not None
        }
        return {**numbers, **grown}
