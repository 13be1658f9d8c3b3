"""Which of Lightning's two packages is chosen, and what those read who mix them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_autoparallel.lightning_compat import OTHER_FLAVOUR, check_flavour, mixed_flavours
from lightning_autoparallel.lightning_compat.flavour import STANDALONE, UNIFIED, choose

REPOSITORY = Path(__file__).parents[3]
OURS = ("MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "PL_", "TORCHELASTIC")
BOTH = ("lightning", STANDALONE)
needs_both = pytest.mark.skipif(find_spec(STANDALONE) is None, reason="pytorch_lightning is not installed")

TRAINING = """
import sys

import torch
from pytorch_lightning import LightningModule, Trainer
import lightning_autoparallel

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        loss = self.linear(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

OPTIONS = dict(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
               enable_model_summary=False)
strategy = lightning_autoparallel.AutoParallelStrategy(compile=False, mesh={"dp_shard": -1})
trainer = Trainer(strategy=strategy, devices=2, **OPTIONS)
data = torch.arange(32.0).view(8, 4) / 32
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=4))
if trainer.is_global_zero:
    print(f"<loss {trainer.callback_metrics['loss']:.6f}>", flush=True)
assert "lightning" not in sys.modules
"""


def run(script: str) -> str:
    """What a script prints that ends well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    environment.update(PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, script],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("imported", "installed", "flavour"),
    [
        ((), BOTH, UNIFIED),
        ((), ("lightning",), UNIFIED),
        ((), (STANDALONE,), STANDALONE),
        ((), (), UNIFIED),
        ((STANDALONE,), BOTH, STANDALONE),
        ((STANDALONE,), (STANDALONE,), STANDALONE),
        ((UNIFIED,), BOTH, UNIFIED),
        ((STANDALONE, UNIFIED), BOTH, UNIFIED),
    ],
)
def test_the_flavour_is_what_only_was_imported_or_only_is_installed(imported, installed, flavour):
    assert choose(imported, lambda package: package in installed) == flavour


def test_what_is_of_neither_flavour_or_of_the_chosen_one_passes():
    check_flavour(object())
    check_flavour(None)
    assert mixed_flavours(int) is None


def test_the_sentence_names_the_class_both_packages_and_the_order_of_imports():
    other = type("Other", (), {"__module__": f"{OTHER_FLAVOUR}.core.module"})
    sentence = mixed_flavours(type("Net", (other,), {}))
    assert sentence is not None
    for part in ("Net is of", UNIFIED, STANDALONE, "before lightning_autoparallel"):
        assert part in sentence
    assert mixed_flavours(type("Net", (), {"__module__": f"{OTHER_FLAVOUR}ish"})) is None


@needs_both
def test_a_module_of_pytorch_lightning_trains_on_two_processes_as_plain_torch_does(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    assert float(run(str(script)).split("<loss ")[1].split(">")[0]) == pytest.approx(_plain_loss(), abs=2e-6)


def _plain_loss() -> float:
    """The loss of the second of two steps on the whole batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = linear(torch.arange(32.0).view(8, 4) / 32).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


MIXED = """
import pytest
from lightning_autoparallel.errors import ConfigError
SENTENCE = "^OTHER is of {other}, but lightning_autoparallel was imported with {chosen}, and the two cannot be mixed"

def refused(what, action):
    with pytest.raises(ConfigError, match=SENTENCE.replace("OTHER", what)):
        action()
"""


@needs_both
@pytest.mark.parametrize(
    ("chosen", "other"), [(UNIFIED, STANDALONE), pytest.param(STANDALONE, UNIFIED, marks=pytest.mark.matrix)]
)
def test_who_mixes_them_reads_so(chosen, other, tmp_path):
    # pytorch_lightning is chosen only where lightning comes later, too late for its registry
    imports = [f"import {chosen}", "import lightning_autoparallel", f"import {other}"]
    if chosen == UNIFIED:
        imports[1:] = reversed(imports[1:])
    script = tmp_path / "mixed.py"
    script.write_text(
        "\n".join(imports)
        + MIXED.format(other=other, chosen=chosen)
        + f"""
from {other} import LightningModule, Trainer
import torch
strategy = lightning_autoparallel.AutoParallelStrategy(compile=False)
refused("this Trainer", lambda: Trainer(strategy=strategy, accelerator="cpu"))
refused("this Trainer", lambda: Trainer(strategy="autoparallel", accelerator="cpu"))
class Net(LightningModule):
    pass
refused("Net", lambda: lightning_autoparallel.plan(Net(), torch.zeros(2, 4), world_size=2))
"""
    )
    run(str(script))


@pytest.mark.matrix
@needs_both
def test_the_command_line_says_so_of_a_model(tmp_path):
    (tmp_path / "other_flavour_net.py").write_text(
        "from pytorch_lightning import LightningModule\nclass Net(LightningModule): pass\n"
    )
    script = tmp_path / "command.py"
    script.write_text(
        "import sys\nfrom lightning_autoparallel.cli.main import main\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "for argument in ('--model', '--model.class_path'):\n"
        "    try:\n        main(['fit', argument, 'other_flavour_net.Net'])\n"
        "    except SystemExit as end:\n        assert end.code == 2\n"
    )
    output = run(str(script))
    assert "Net is of pytorch_lightning, but lightning_autoparallel was imported with lightning.pytorch" in output, (
        output
    )
