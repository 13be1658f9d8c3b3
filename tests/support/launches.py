"""How many collectives the clipping of gradients launches."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_autoparallel.torch_compat.collectives import launched_collectives


class Launches(Callback):
    """Collectives between the end of the backward and the end of the optimizer step, by step."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._before: int | None = None

    def _launched(self, trainer) -> int:
        mesh = getattr(trainer.strategy, "mesh", None)
        return 0 if mesh is None else sum(launched_collectives(group) for group in mesh.groups)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self._before = self._launched(trainer)

    def on_train_batch_end(self, trainer, *args):
        if self._before is not None:
            self.counts.append(self._launched(trainer) - self._before)
            self._before = None
