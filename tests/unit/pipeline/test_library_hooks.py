"""Hooks that an installed library hangs into the step's modules at its first call, with a flag that says so."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_autoparallel.errors import CaptureError
from tests.unit.pipeline._steps import Net, Told, assert_equal, run_captured, run_plainly

LIBRARY = """
def double(module, args, output):
    return output * 2

def once(net, x):
    if not getattr(net, "_hooked", False):
        net.linear.register_forward_hook(double)
        net._hooked = True
    return net.loss(x)

def once_and_count(net, x):
    net.calls += 1
    return once(net, x) * net.calls

def before_use(net, x):
    if not net.hooked:
        net.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        net.hooked = True
    return net.loss(x)

def at_every_call(net, x):
    net.linear.register_forward_hook(double)
    return net.loss(x)

def after_use(net, x):
    loss = net.loss(x)
    once(net, x)
    return loss

def otherwise_at_first(net, x):
    first = not getattr(net, "_hooked", False)
    return once(net, x) * (3.0 if first else 1.0)

def once_with_a_note(net, x):
    if not getattr(net, "_hooked", False):
        net.calls = 7
    return once(net, x)

def once_with_an_entry(net, x):
    if not getattr(net, "_hooked", False):
        net.notes.append("hooked")
    return once(net, x)

def with_a_tensor(net, x):
    if not getattr(net, "_hooked", False):
        factor = x.detach().mean()
        net.linear.register_forward_hook(lambda module, args, output: output * factor)
        net._hooked = True
    return net.loss(x)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "hooking.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("hooking")
    del sys.modules["hooking"]


class Hooked(Net):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.hooked, self.calls = name, False, 0
        self.notes: list[str] = []

    def step(self, x: Any, i: int) -> Any:
        import hooking

        return getattr(hooking, self.name)(self, x)

    def hooks(self) -> tuple[int, int, Any]:
        flag = vars(self).get("_hooked", self.hooked)
        return len(self.linear._forward_hooks), len(self.linear._forward_pre_hooks), flag


@pytest.mark.parametrize("name", ["once", "once_and_count", "before_use"])
def test_hooks_of_the_first_call_stay_and_the_step_is_captured(name: str, library: ModuleType) -> None:
    module, told = Hooked(name), Told()
    captured, plain = copy.deepcopy(module), copy.deepcopy(module)
    assert_equal(run_captured(captured, told), run_plainly(plain))
    assert captured.hooks() == plain.hooks() and sum(plain.hooks()[:2]) == 1
    assert told.captures == 1
    assert captured.calls == plain.calls


OTHERWISE = [
    "at_every_call",
    "after_use",
    "otherwise_at_first",
    "once_with_a_note",
    "once_with_an_entry",
    "with_a_tensor",
]


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_makes_the_first_call_another_step_is_refused_and_forgotten(name: str, library: ModuleType) -> None:
    module = Hooked(name)
    before = module.hooks()
    with pytest.raises(CaptureError, match=r"changes .*_forward_hooks in place \(or what it calls does\)"):
        run_captured(module, Told())
    assert module.hooks() == before and "_hooked" not in vars(module)
    assert module.calls == 0 and module.notes == []


def test_hooks_of_the_users_own_are_not_taken_for_a_librarys(library: ModuleType) -> None:
    class HooksItself(Hooked):
        def step(self, x: Any, i: int) -> Any:
            if not self.hooked:
                self.linear.register_forward_hook(lambda module, args, output: output * 2)
                self.hooked = True
            return self.loss(x)

    module = HooksItself("none")
    with pytest.raises(CaptureError, match=r"changes .*_forward_hooks in place"):
        run_captured(module, Told())
    assert module.hooks() == (0, 0, False)
