"""Steps whose Python runs at every step: what its modules compute is captured, call by call.

A module that is called is captured with everything inside of it. Where that fails its own code runs as it is, with
whole parameters, and the modules that it calls are captured instead, down to those that call none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.errors import (
    BrokenGraphError,
    CaptureError,
    ConfigError,
    OtherRankError,
    RanksDifferError,
    TooManyCapturesError,
    UnsupportedOpError,
    did_you_mean,
)
from lightning_autoparallel.pipeline.engine import StepCall, StepEngine, StepResult
from lightning_autoparallel.pipeline.synced_norms import SyncedNorms
from lightning_autoparallel.pipeline.whole_parameters import COLLECTIVE, WholeParameters
from lightning_autoparallel.torch_compat.interception import (
    Original,
    given_to_functions,
    inside_of,
    intercepted_calls,
    is_transformed,
    without_kept_parametrizations,
    wrapped_backwards_of_functions,
    wrapped_for_backwards,
)

# What says that one call cannot be captured; other errors are the user's to mend. A pass that leaves a broken graph is
# at fault itself: training goes on without it, and the warning names it.
NOT_CAPTURED = (BrokenGraphError, CaptureError, UnsupportedOpError)


class CallHost(Protocol):
    """Who runs the step: makes captured calls of its modules, and replays what they did besides computing."""

    def module_call(self, path: str, module: nn.Module) -> StepCall:
        """The call of the submodule at ``path``, as the engine captures it."""

    def counters(self) -> Mapping[str, int]:
        """Numbers of the step that runs, by name."""

    def replay(self, result: StepResult) -> None:
        """Make the recorded effects happen."""

    def warn(self, message: str) -> None:
        """Tell the user."""


class ModuleCalls:
    """Runs the calls of one module's submodules through its engine, while ``running``.

    Args:
        names: paths of the submodules that are captured; all of them, outermost first, where None.
        syncs_norms: whether batch norms that train take the statistics of all ranks' rows.

    Raises:
        ConfigError: a name is no submodule's.
    """

    def __init__(
        self, engine: StepEngine, host: CallHost, names: Sequence[str] | None = None, syncs_norms: bool = False
    ) -> None:
        self._engine, self._host, self._names = engine, host, names
        self._paths = _captured_paths(engine.module, names)
        self._eager: set[str] = set()  # modules whose own code runs, and may call captured ones
        self._never: set[str] = set()  # those that call none either
        self._said: set[str] = set()
        self._inside = self._captures = False
        context = engine.context
        self.parameters = WholeParameters(
            engine.module, context.mesh, context.control, engine.deferred.addend, context.own_writes
        )
        engine.backwards = backwards = self.parameters.backwards
        self._norms = SyncedNorms(engine.module, context.mesh, context.control, backwards) if syncs_norms else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the step, and around its backward, which may call modules again."""
        self.parameters.forget()  # an optimizer may have stepped since, whoever ran it
        applies, regions = given_to_functions(self._given), wrapped_for_backwards(self._seen)
        backwards = wrapped_backwards_of_functions(self._differentiating)
        with self.parameters, intercepted_calls(self._call), applies, regions, backwards:
            yield

    def meet(self, collective: str) -> None:
        """Ahead of one that all ranks start, of their own accord: those on the way may compute with parameters.

        Raises:
            OtherRankError: some rank does not come.
        """
        while not self.parameters.agree(f"{COLLECTIVE}{collective}"):
            pass

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, every module's own code runs."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        before, self._captures = self._captures, True
        try:
            with self.eager(), without_kept_parametrizations():
                yield
        finally:
            self._captures = before

    def _synced_norm(
        self, norms: SyncedNorms, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._captures:
            raise CaptureError(
                f"{norms.name_of(module)} takes the statistics of all ranks' rows (sync_batchnorm=True), and what is "
                "captured in forward mode is what a rank does with its own"
            )
        with self.eager():
            return norms.run(original, module, args, kwargs)

    def _call(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._norms is not None and self._norms.concerns(module):
            return self._synced_norm(self._norms, original, module, args, kwargs)
        known = self._paths.get(id(module))
        if self._inside or known is None or known[0] in self._eager:
            with self._whole():
                return original(module, *args, **kwargs)
        path = known[0]
        if is_transformed() or not all(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return self._run_eagerly(original, module, args, kwargs)  # torch.func puts other tensors into it
        if path in self._never:
            return self._run_eagerly(original, module, args, kwargs)
        try:
            with self._capturing(), self.parameters.paused():
                call = self._host.module_call(path, module)
                result = self._engine.execute(call, (args, kwargs), self._host.counters())
        except OtherRankError as elsewhere:
            if not self.parameters.take_part(elsewhere.places):
                raise
            self._say(path, "runs uncaptured where only some ranks call it: all have gathered it")
            return self._run_eagerly(original, module, args, kwargs)
        except RanksDifferError as difference:
            self._say(path, f"runs uncaptured where {difference}")
            return self._run_eagerly(original, module, args, kwargs)
        except TooManyCapturesError as error:
            # Its parts would meet as many kinds of arguments.
            self._never.add(path)
            self._host.warn(f"{self._shown(path)} and what it calls run uncaptured from here on: {error}")
            return self._run_eagerly(original, module, args, kwargs)
        except NOT_CAPTURED as error:
            self._eager.add(path)
            shown = f"{self._shown(path)} ({type(module).__name__})"
            self._host.warn(f"{shown} is not captured, its own code runs at every step: {error}")
            return original(module, *args, **kwargs)
        self._host.replay(result)
        return result.output

    def _given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """To a function with a backward of its own, which computes with whole parameters."""
        return args if self._captures else self.parameters.whole(args)

    def _seen(self, function: Original) -> Original:
        """What a backward calls."""
        return function if self._captures else self.parameters.seen_in(function)

    def _differentiating(self, backward: Original, leaves: Sequence[Tensor]) -> Original:
        """The backward of a function, which may compute with the parameters that it was given, and ask for gradients
        of them: its modules compute with the same tensors, uncaptured.
        """
        given = [] if self._captures else self.parameters.owed.among(leaves)

        def run(*args: Any) -> Any:
            with self.eager(), self.parameters.given(given):
                return backward(*args)

        return run if given else backward

    def _run_eagerly(self, original: Original, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.eager(), self._whole():
            return original(module, *args, **kwargs)

    def _whole(self) -> contextlib.AbstractContextManager[Any]:
        """Own code sees whole parameters, also where torch runs a checkpoint region again: in a backward, which their
        mode has called.
        """
        return contextlib.nullcontext() if self._captures else inside_of(self.parameters)

    def _say(self, path: str, message: str) -> None:
        """Once for each module."""
        if path not in self._said:
            self._said.add(path)
            self._host.warn(f"{self._shown(path)} {message}")

    def _shown(self, path: str) -> str:
        return f"module '{path}'" if path else type(self._engine.module).__name__


def _captured_paths(root: nn.Module, names: Sequence[str] | None) -> dict[int, tuple[str, nn.Module]]:
    """Paths of the modules whose calls are captured, by identity; the modules are kept, so that no id is used again."""
    modules = dict(root.named_modules())
    for name in names or ():
        if name not in modules:
            raise ConfigError(f"capture names '{name}', which is no submodule{did_you_mean(name, modules)}")
    wanted = modules if names is None else {name: modules[name] for name in names}
    return {
        id(module): (path, module) for path, module in wanted.items() if next(module.parameters(), None) is not None
    }
