"""What a LightningModule's step does besides computing, recorded at capture and replayed with real values."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, nn

from lightning_autoparallel.capture import Watcher, made_again
from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.capture.watch import Watched
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.lightning_compat import LightningModule, Trainer
from lightning_autoparallel.strategy.counted_once import counted_log, weigh_rows
from lightning_autoparallel.strategy.last_rows import RowsOfBatch
from lightning_autoparallel.strategy.logged import ALREADY_GLOBAL, LoggedAs, note_logged
from lightning_autoparallel.strategy.logged_numbers import with_numbers_on
from lightning_autoparallel.strategy.metrics import MetricScopes, outermost_metrics
from lightning_autoparallel.strategy.questions import rank_patches
from lightning_autoparallel.strategy.synced_numbers import LoggedNumber, LoggedNumbers
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_map

Notice = Callable[[str], None]


@dataclass(frozen=True)
class _TensorSlot:
    """Stands for the n-th tensor that effects need at replay."""

    index: int


@dataclass(frozen=True)
class _MetricValue:
    """Stands for what a metric's forward returned; it has a value at real steps only, so it can only be logged."""

    index: int
    line: str

    def __getattr__(self, *_: Any) -> Any:
        raise CaptureError(
            f"{self.line} computes with the value of a torchmetrics metric: it is known at real steps only; log it, or "
            "compute the value from the step's tensors"
        )


for _name in ("add", "sub", "mul", "truediv", "pow", "neg", "float", "bool", "int", "lt", "le", "gt", "ge", "getitem"):
    setattr(_MetricValue, f"__{_name}__", _MetricValue.__getattr__)
    setattr(_MetricValue, f"__r{_name}__", _MetricValue.__getattr__)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One effect: ``function(*args, **kwargs)`` with slots for tensors and metric values."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    metric_value: int | None = None
    updates: nn.Module | None = None
    line: str = "?"

    @functools.cached_property
    def slots(self) -> list[int]:
        """The tensors that it takes."""
        leaves, _ = tree_flatten((self.args, dict(self.kwargs)))
        return [leaf.index for leaf in leaves if isinstance(leaf, _TensorSlot)]

    def is_whole(self, whole: Sequence[bool]) -> bool:
        """Whether all of these are equal on all ranks, as ``whole`` says of each."""
        return all(whole[slot] for slot in self.slots)


class LightningEffects:
    """Records ``self.log``, ``self.log_dict`` and torchmetrics calls of one run of a step, and replays them.

    Where the step is not of the ``whole_batch`` but of this rank's rows, they are replayed as they were written.
    With ``strict_effects`` a step that prints, or writes to a logger by itself, is refused; else that happens at
    capture only, and is said.
    """

    def __init__(
        self,
        module: LightningModule,
        watcher: Watcher,
        notice: Notice,
        scopes: MetricScopes,
        whole_batch: bool = True,
        strict_effects: bool = True,
        logged_as: LoggedAs | None = None,
        numbers: LoggedNumbers | None = None,
    ) -> None:
        self._module, self._watcher, self._notice, self._scopes = module, watcher, notice, scopes
        self._whole_batch, self._strict = whole_batch, strict_effects
        self.logged_as: LoggedAs = {} if logged_as is None else logged_as
        self._numbers = numbers
        self._calls: list[_Call] = []
        self._tensors: list[Tensor] = []
        self._metric_values = 0

    def tensors(self) -> list[Tensor]:
        """The tensors that the recorded calls take."""
        return self._tensors

    def count(self) -> int:
        """How many calls were recorded so far."""
        return len(self._calls)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Recorders in the place of Lightning's and torchmetrics' methods; forgets an earlier run."""
        self._calls, self._tensors, self._metric_values = [], [], 0
        if self._numbers is not None:
            self._numbers.forget()
        with contextlib.ExitStack() as stack:
            for patch in (
                *self._log_patches(),
                *self._counter_patches(),
                *self._output_patches(),
                *rank_patches(self._watcher, self._module),
            ):
                stack.enter_context(patch)
            for metric in outermost_metrics(self._module):
                stack.enter_context(mock.patch.dict(vars(metric), self._metric_recorders(metric)))
            yield

    def metrics(self) -> list[tuple[nn.Module, bool]]:
        """The metrics that the recorded calls update, and whether with 0-dim tensors only."""
        updates = [(metric, call) for call in self._calls if (metric := call.updates) is not None]
        return [(metric, all(self._tensors[slot].dim() == 0 for slot in call.slots)) for metric, call in updates]

    def check(self, whole: Sequence[bool], rows: RowsOfBatch) -> None:
        """Whether a replay with such values will go through, before anything runs.

        Raises:
            CaptureError: a metric would be updated with rows at one time and with whole values at another.
        """
        alone = not (rows.common and rows.some_own)  # else one rank counts, or metrics cover everything already
        if self._whole_batch and alone:
            updates = [(metric, call) for call in self._calls if (metric := call.updates) is not None]
            covers = ((metric, rows.common or call.is_whole(whole), call.line) for metric, call in updates)
            # Of rows that all ranks hold, one rank counts those that a metric of ranks' own rows meets.
            self._scopes.check(one for one in covers if not (rows.common and self._scopes.has_own_rows(one[0])))

    def replay(
        self,
        values: Sequence[Tensor],
        whole: Sequence[bool],
        counters: Mapping[str, int],
        rows: RowsOfBatch,
    ) -> None:
        """Make the recorded calls with the ``values`` of a real step; ``whole`` ones are equal on all ranks."""
        if self._whole_batch and rows.some_common:
            weigh_rows(self._module.trainer, 1 if rows.common else self._scopes.shards)
        results: dict[int, Any] = {}
        numbers = [] if self._numbers is None else self._numbers.joined(lambda leaf: made_again(leaf, counters))

        def resolve(leaf: Any) -> Any:
            if isinstance(leaf, _TensorSlot):
                return values[leaf.index]
            if isinstance(leaf, _MetricValue):
                return results[object.__getattribute__(leaf, "index")]
            if type(leaf) is LoggedNumber:
                return numbers[leaf.index]
            return made_again(leaf, counters)

        for call in self._calls:
            args, kwargs = tree_map(resolve, call.args), tree_map(resolve, dict(call.kwargs))
            args = with_numbers_on(self._module.device, call.function, args)
            with self._around(call, whole, rows):
                result = self._counting(call, rows)(*args, **kwargs)
            if call.metric_value is not None:
                results[call.metric_value] = result

    def _around(self, call: _Call, whole: Sequence[bool], rows: RowsOfBatch) -> contextlib.AbstractContextManager[None]:
        if call.updates is None:
            return contextlib.nullcontext()
        if rows.common and not (self._whole_batch and self._scopes.covers_all(call.updates)):
            return self._scopes.updating_with_common(call.updates, rows.some_own, call.line)
        if not self._whole_batch:
            return contextlib.nullcontext()
        return self._scopes.updating(call.updates, call.is_whole(whole), call.line)

    def _counting(self, call: _Call, rows: RowsOfBatch) -> Callable[..., Any]:
        """What a module logs where its step runs as it is written."""
        logs = call.function in (LightningModule.log, LightningModule.log_dict)
        if self._whole_batch or not logs or not rows.some_common:
            return call.function
        return counted_log(call.function, rows, self._scopes)

    def _record(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        returns_value: bool = False,
        updates: nn.Module | None = None,
    ) -> Any:
        def slot(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            self._tensors.append(leaf)
            return _TensorSlot(len(self._tensors) - 1)

        index = self._metric_values if returns_value else None
        self._calls.append(
            _Call(
                function=function,
                args=tree_map(slot, args),
                kwargs=tree_map(slot, kwargs),
                metric_value=index,
                updates=updates,
                line=user_line(),
            )
        )
        if not returns_value:
            return None
        self._metric_values += 1
        return _MetricValue(self._metric_values - 1, user_line())

    def _log_patches(self) -> list[Any]:
        # Values are one device's already, equal on every rank: synchronising them again would only scale sums. Without
        # sync_dist Lightning would advise to set it.
        real_log, real_log_dict = LightningModule.log, LightningModule.log_dict
        already_global = {"sync_dist": True, "sync_dist_group": ALREADY_GLOBAL} if self._whole_batch else {}

        def log(module: LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            note_logged(self.logged_as, real_log, (name,), (module, name, value, *args), kwargs)
            if self._numbers is not None:
                value = self._numbers.noted(value, real_log, (module, name, value, *args), kwargs)
            kwargs.update(already_global)
            self._record(real_log, (module, name, value, *args), kwargs)

        def log_dict(module: LightningModule, dictionary: Any, *args: Any, **kwargs: Any) -> None:
            names = dictionary if isinstance(dictionary, Mapping) else ()  # a metric's value has them at real steps
            note_logged(self.logged_as, real_log_dict, names, (module, dictionary, *args), kwargs)
            values = (
                dict(dictionary) if isinstance(dictionary, Mapping) and type(dictionary) is not dict else dictionary
            )
            if self._numbers is not None:
                values = self._numbers.noted(values, real_log_dict, (module, dictionary, *args), kwargs)
            kwargs.update(already_global)
            self._record(real_log_dict, (module, values, *args), kwargs)

        return [
            mock.patch.object(LightningModule, "log", log),
            mock.patch.object(LightningModule, "log_dict", log_dict),
        ]

    def _counter_patches(self) -> list[Any]:
        return [
            mock.patch.object(owner, name, property(functools.partial(self._watched, name)))
            for owner in (LightningModule, Trainer)
            for name in ("global_step", "current_epoch")
        ]

    def _watched(self, name: str, _: Any) -> Watched:
        return self._watcher.value(name)

    def _output_patches(self) -> list[Any]:
        real_print = builtins.print

        def noticed_print(*args: Any, **kwargs: Any) -> None:
            self._only_at_capture(f"print() in {user_line()} runs at capture only: log the value instead")
            real_print(*args, **kwargs)

        logger = property(lambda _: _CaptureOnlyLogger("self.logger", self._only_at_capture))
        loggers = property(lambda _: [_CaptureOnlyLogger("self.loggers[0]", self._only_at_capture)])
        return [
            mock.patch.object(builtins, "print", noticed_print),
            *(
                mock.patch.object(owner, "print", lambda _, *args, **kwargs: noticed_print(*args))
                for owner in (LightningModule, Trainer)
            ),
            *(mock.patch.object(owner, "logger", logger) for owner in (LightningModule, Trainer)),
            *(mock.patch.object(owner, "loggers", loggers) for owner in (LightningModule, Trainer)),
        ]

    def _only_at_capture(self, message: str) -> None:
        if self._strict:
            raise self._watcher.refuse(message)
        self._notice(message)

    def _metric_recorders(self, metric: nn.Module) -> dict[str, Callable[..., Any]]:
        real: dict[str, Callable[..., Any]] = {
            name: getattr(metric, name) for name in ("update", "forward", "compute", "reset")
        }

        def update(*args: Any, **kwargs: Any) -> None:
            self._record(real["update"], args, kwargs, updates=metric)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._record(real["forward"], args, kwargs, returns_value=True, updates=metric)

        def compute() -> Any:
            return self._record(real["compute"], (), {}, returns_value=True)

        def reset() -> None:
            self._record(real["reset"], (), {})

        return {"update": update, "forward": forward, "compute": compute, "reset": reset}


class _CaptureOnlyLogger:
    """Absorbs whatever a step does with a logger's experiment, and says once that it would happen at capture only."""

    def __init__(self, path: str, notice: Notice) -> None:
        self._path, self._notice = path, notice

    def __getattr__(self, name: str) -> Any:
        return _CaptureOnlyLogger(f"{self._path}.{name}", self._notice)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._notice(f"{self._path}() in {user_line()} runs at capture only and writes nothing: use self.log")
