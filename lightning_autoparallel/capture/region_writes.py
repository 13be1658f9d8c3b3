"""What the user's activation-checkpoint regions change: torch runs these again in the backward, and it changes again.

Two updates of batch norm's statistics in a step are what one device makes of such a region. A graph runs it once. What
is written there without a look at what was there before is the same both times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.places import MISSING
from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.capture.stand_ins import DictStandIn
from lightning_autoparallel.capture.watch import is_watched
from lightning_autoparallel.contracts import GraphOutput
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.regions import saving_is_hooked
from lightning_autoparallel.torch_compat.tracing import is_real

if TYPE_CHECKING:
    from lightning_autoparallel.capture.state import StepState


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a run has left at a place so far, and what was there ``before`` it; of lists, the ids of their entries."""

    text: str
    now: Any
    before: Any
    is_list: bool = False


def check_whole_calls(name: str, outputs: Sequence[GraphOutput], state: StepState) -> None:
    """A module that is called in a region of its caller's; where that runs again, it may end within the graph.

    Raises:
        CaptureError: the module changes something, which is done behind its graph.
    """
    if not saving_is_hooked():
        return
    changed = [f"buffer {item.name!r}" for item in outputs if item.kind == "buffer"]
    changed += ["what lives longer than the call"] if state.changes_anything else []
    if changed:
        raise CaptureError(
            f"{name} changes {changed[0]} in an activation-checkpoint region: torch runs that again in the backward, "
            "and ends where its last tensor is saved, in a graph or behind it"
        )


class RegionWrites:
    """Opened ``around`` each region of a step."""

    def __init__(self, module: nn.Module, state: StepState) -> None:
        self._module, self._state = module, state

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A region that nobody differentiates runs once.

        Raises:
            CaptureError: the region has changed a buffer, counted, added up, or changed a list.
        """
        if not torch.is_grad_enabled():
            yield
            return
        buffers, places = self._buffers(), self._places()
        yield
        changed = [f"buffer {name!r}" for name, now in self._buffers().items() if buffers.get(name, now) != now]
        for identity, found in self._places().items():
            known = places.get(identity)
            if self._goes_on(identity, found, found.before if known is None else known.now):
                changed.append(found.text)
        if changed:
            raise self._state.watcher.refuse(
                f"{user_line()} checkpoints activations of what changes {changed[0]}: torch runs that again in the "
                "backward, which changes it a second time, as a captured step does not"
            )

    def _buffers(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._module.named_buffers()}

    def _places(self) -> dict[Any, _Found]:
        """Every attribute, entry and list that the run has changed so far."""
        reads = self._state.reads
        found = {
            identity: _Found(text=written.place.text, now=written.place.read(), before=written.before)
            for identity, written in reads.written.items()
        }
        for container, _ in reads.changed.values():
            if container.place is None:
                continue
            if not isinstance(container, DictStandIn):
                entries = tuple(map(id, list.__getitem__(container, slice(None))))
                found[container.place.identity] = _Found(
                    text=container.place.text, now=entries, before=MISSING, is_list=True
                )
                continue
            for key, value in container.written.items():
                place, before = container.place_of(key), dict(container.real).get(key, MISSING)
                found[place.identity] = _Found(text=place.text, now=value, before=before)
        return found

    def _goes_on(self, identity: Any, found: _Found, then: Any) -> bool:
        """Whether a second run, which begins with what the first has left, would leave something else."""
        if found.now is then or (found.is_list and found.now == then):
            return False
        if found.is_list:
            return True
        if is_watched(found.now):
            return is_watched(then) or identity in self._state.reads.numbers
        if not isinstance(then, Tensor):
            return False
        return not is_real(then) or id(then) in self._state.reads.tensors
