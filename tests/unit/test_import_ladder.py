"""Imports go up the ladder of the design only, and the doors to lightning and to private torch are the named ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.support.sources import PACKAGE, Import, Source, imports_of, package_sources, torch_attributes_of

STAGES = {"capture", "plan", "apply", "passes", "compile"}
LADDER: list[set[str]] = [
    {"errors"},
    {"config"},
    {"contracts"},
    {"torch_compat", "lightning_compat", "artifacts", "fx", "mesh"},
    {"cost"},
    STAGES,
    {"pipeline"},
    {"checkpoint"},
    {"models"},
    {"precision", "strategy"},
    {"callbacks"},
    {"cli"},
]
RUNG = {part: height for height, parts in enumerate(LADDER) for part in parts}
STAGES_WITH_COST = {"plan", "passes"}
PARTS_WITH_LIGHTNING = {"strategy", "precision", "checkpoint", "callbacks", "cli"}
# The package registers its strategy with Lightning; nothing else happens when it is imported.
FILES_WITH_LIGHTNING = {
    f"{PACKAGE}/{name}.py" for name in ("__init__", "models/module", "models/data", "models/context_report")
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
DOOR = "lightning_compat"
PUBLIC_DESPITE_UNDERSCORE = ("torch.ops.",)  # operators are named so, such as torch.ops._c10d_functional

Rule = Callable[[Source], Iterable[str]]


def off_the_ladder(source: Source) -> Iterable[str]:
    """The file is none of the ladder's parts."""
    if source.part not in RUNG and source.part != "__init__":
        yield f"{source.path}: {source.part} is not on the ladder"


def upward_imports(source: Source) -> Iterable[str]:
    """Imports of a part that stands above the file's own; the package's own __init__ may import all."""
    for line, target in _own_parts(source):
        if RUNG[target] > RUNG.get(source.part, len(LADDER)):
            yield f"{source.path}:{line}: {source.part} imports {target}, which stands above it"


def stages_that_meet(source: Source) -> Iterable[str]:
    """Imports of one stage by another."""
    for line, target in _own_parts(source):
        if {source.part, target} <= STAGES and source.part != target:
            yield f"{source.path}:{line}: the stage {source.part} imports the stage {target}"


def stages_that_price(source: Source) -> Iterable[str]:
    """Imports of cost by a stage that should be handed its cost functions."""
    for line, target in _own_parts(source):
        if target == "cost" and source.part in STAGES - STAGES_WITH_COST:
            yield f"{source.path}:{line}: the stage {source.part} imports cost"


def lightning_elsewhere(source: Source) -> Iterable[str]:
    """Imports of lightning outside the door to it."""
    if source.part == DOOR:
        return
    for found in imports_of(source):
        if found.name.split(".")[0] in LIGHTNING:
            yield f"{source.path}:{found.line}: {found.name}"


def parts_without_lightning(source: Source) -> Iterable[str]:
    """Imports of the door to lightning by parts that do not speak to it."""
    if source.part in {DOOR, *PARTS_WITH_LIGHTNING} or source.path in FILES_WITH_LIGHTNING:
        return
    for line, target in _own_parts(source):
        if target == DOOR:
            yield f"{source.path}:{line}: {source.part} imports {DOOR}"


def private_torch_elsewhere(source: Source) -> Iterable[str]:
    """Private torch modules and names outside torch_compat, imported or spelt out."""
    if source.part == "torch_compat":
        return
    for found in [*imports_of(source), *torch_attributes_of(source)]:
        if _is_private_torch(found):
            yield f"{source.path}:{found.line}: {found.name}"


def _own_parts(source: Source) -> Iterable[tuple[int, str]]:
    for found in imports_of(source):
        names = found.name.split(".")
        if names[0] == PACKAGE and len(names) > 1 and names[1] in RUNG:
            yield found.line, names[1]


def _is_private_torch(found: Import) -> bool:
    names = found.name.split(".")
    if names[0] != "torch" or found.name.startswith(PUBLIC_DESPITE_UNDERSCORE):
        return False
    return any(name.startswith("_") and not name.endswith("__") for name in names)


RULES = [
    off_the_ladder,
    upward_imports,
    stages_that_meet,
    stages_that_price,
    lightning_elsewhere,
    parts_without_lightning,
    private_torch_elsewhere,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule):
    assert [place for source in package_sources() for place in rule(source)] == []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (off_the_ladder, "utils.py", ""),
        (off_the_ladder, "helpers/thing.py", ""),
        (upward_imports, "config.py", "from lightning_autoparallel.contracts import ShardingPlan"),
        (upward_imports, "mesh.py", "import lightning_autoparallel.cost.hardware"),
        (upward_imports, "capture/step.py", "from lightning_autoparallel import pipeline"),
        (upward_imports, "fx/nodes.py", "def f():\n    from ..strategy import AutoParallelStrategy"),
        (upward_imports, "errors.py", "if TYPE_CHECKING:\n    from .config import PlanConfig"),
        (stages_that_meet, "plan/candidates.py", "from lightning_autoparallel.capture.step import capture"),
        (stages_that_meet, "apply/__init__.py", "from ..compile import backend"),
        (stages_that_meet, "passes/runner.py", "from .. import plan"),
        (stages_that_price, "apply/lower.py", "from lightning_autoparallel.cost import collective"),
        (lightning_elsewhere, "pipeline.py", "import lightning.pytorch as pl"),
        (lightning_elsewhere, "strategy/strategy.py", "from pytorch_lightning import LightningModule"),
        (lightning_elsewhere, "cli/main.py", "def f():\n    from lightning_fabric import Fabric"),
        (parts_without_lightning, "models/llama3.py", "from lightning_autoparallel.lightning_compat import Callback"),
        (parts_without_lightning, "capture/step.py", "from ..lightning_compat.cli import LightningCLI"),
        (private_torch_elsewhere, "plan/candidates.py", "from torch.distributed.tensor._op_schema import OpSchema"),
        (private_torch_elsewhere, "capture/step.py", "import torch._functorch.aot_autograd"),
        (private_torch_elsewhere, "mesh.py", "from torch import _C"),
        (private_torch_elsewhere, "apply/lower.py", "from torch.utils import _pytree as pytree"),
        (private_torch_elsewhere, "apply/lower.py", "x = torch._C._get_tracing_state()"),
    ],
)
def test_each_rule_can_fail(rule: Rule, path: str, text: str):
    assert len(list(rule(Source(path=f"{PACKAGE}/{path}", text=text)))) >= 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("__init__.py", "from lightning_autoparallel.strategy import AutoParallelStrategy"),
        ("mesh.py", "from lightning_autoparallel.fx import nodes"),
        ("capture/step.py", "from .recorder import Recorder\nfrom ..torch_compat import fake_mode"),
        ("plan/local_search.py", "from lightning_autoparallel.cost.collective import time_us"),
        ("pipeline.py", "from lightning_autoparallel import apply, capture, compile, cost, passes, plan"),
        ("lightning_compat/cli.py", "from pytorch_lightning.cli import LightningCLI"),
        ("models/data.py", "from lightning_autoparallel.lightning_compat import LightningDataModule"),
        ("cli/main.py", "from lightning_utilities.core.rank_zero import rank_zero_only"),
        ("torch_compat/modes.py", "from torch._guards import TracingContext"),
        ("fx/nodes.py", "wait = torch.ops._c10d_functional.wait_tensor.default\nx = torch.__version__"),
    ],
)
def test_what_is_allowed_passes_every_rule(path: str, text: str):
    source = Source(path=f"{PACKAGE}/{path}", text=text)
    assert [place for rule in RULES for place in rule(source)] == []
