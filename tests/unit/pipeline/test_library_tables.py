"""Tables in which an installed library remembers what it has found out: a first run fills them, the next ones read."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from lightning_autoparallel.errors import CaptureError
from tests.unit.pipeline._steps import Net, Told, assert_equal, run_captured, run_plainly

LIBRARY = """
class Backend:
    scale = 0.5

class Holder:
    def __init__(self, tensor):
        self.tensor = tensor

by_class, by_name, numbers, kept, taken = {}, {}, {}, {}, {"first": True}

def backend(tensor):
    kind = type(tensor)
    if kind not in by_class:
        by_class[kind] = by_name.setdefault("torch", Backend())
    return by_class[kind]

def count(tensor):
    numbers["seen"] = numbers.get("seen", 0) + 1
    return numbers["seen"]

def grow(tensor):
    numbers[len(numbers)] = True
    return len(numbers)

def keep(tensor):
    kept["last"] = tensor * 2
    return 1.0

def begin(tensor):
    if "begun" not in numbers:
        numbers["begun"] = True
        return 2.0
    return 1.0

def warm(tensor):
    if type(tensor) not in by_class:
        by_class[type(tensor)] = 2.0
        return 3.0
    return by_class[type(tensor)]

def hold(tensor):
    if "held" not in kept:
        kept["held"] = Holder(tensor.detach().new_ones(()))
    return kept["held"].tensor

def chain(tensor):
    if "chained" not in kept:
        last = Holder(tensor.detach().new_ones(()))
        for _ in range(3000):
            last = Holder(last)
        kept["chained"] = last
    return 1.0

def close(tensor):
    if "closed" not in kept:
        one = tensor.detach().new_ones(())
        kept["closed"] = lambda: one
    return kept["closed"]()

def take(tensor):
    return 2.0 if taken.pop("first", False) else 1.0
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "remembering.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("remembering")
    del sys.modules["remembering"]


class AsksForABackend(Net):
    def step(self, x, i):
        import remembering

        return self.loss(x) * remembering.backend(x).scale


class LooksUpAnother(AsksForABackend):
    """Code that is not captured fills the tables, too."""

    def between(self, i):
        import remembering

        if i == 3:
            remembering.by_name["another"] = remembering.Backend()
            remembering.backend(nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize("kind", [AsksForABackend, LooksUpAnother])
def test_what_the_first_run_adds_is_found_by_the_next(kind: type[Net], library: ModuleType) -> None:
    module, told = kind(), Told()
    results = run_captured(copy.deepcopy(module), told)
    assert told.captures == 1
    assert "torch" in library.by_name
    library.by_class.clear()
    library.by_name.clear()
    assert_equal(results, run_plainly(module))


_TABLES = ("by_class", "by_name", "numbers", "kept", "taken")


@pytest.mark.parametrize("name", ["count", "grow", "keep", "take", "begin", "warm", "hold", "chain", "close"])
def test_what_tells_runs_apart_is_refused_and_forgotten(name: str, library: ModuleType) -> None:
    """What every run changes, what the first one does otherwise, and tensors of a run."""
    before = {table: dict(getattr(library, table)) for table in _TABLES}

    class Changes(Net):
        def step(self, x, i):
            return self.loss(x) * getattr(library, name)(x)

    with pytest.raises(CaptureError, match=r"changes .* in place \(or what it calls does\)"):
        run_captured(Changes(), Told())
    assert {table: getattr(library, table) for table in _TABLES} == before
