"""The leak checks see each kind of leak, once, and put it right."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.hermetic import Leak, _modes, no_leaks
from tests.support.sources import ROOT


def leak_a_process_group(folder):
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def leak_a_fake_mode(folder):
    FakeTensorMode().__enter__()


def leak_two_modes(folder):
    TorchDispatchMode().__enter__()
    FakeTensorMode().__enter__()


def leak_a_variable(folder):
    os.environ["MASTER_ADDR"] = "localhost"


def leak_a_deleted_variable(folder):
    del os.environ["PATH"]


def leak_a_dtype(folder):
    torch.set_default_dtype(torch.float64)


def leak_a_patched_log(folder):
    LightningModule.log = lambda *args, **kwargs: None


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (leak_a_process_group, "an initialised process group$"),
        (leak_a_fake_mode, "an active FakeTensorMode$"),
        (leak_two_modes, "an active TorchDispatchMode"),
        (leak_a_variable, "the environment variable MASTER_ADDR$"),
        (leak_a_deleted_variable, "the environment variable PATH$"),
        (leak_a_dtype, "the default dtype torch.float64$"),
        (leak_a_patched_log, r"a patched LightningModule\.log$"),
    ],
)
def test_a_leak_is_named_and_put_right(leak, message, tmp_path):
    with no_leaks():
        with pytest.raises(Leak, match=message), no_leaks():
            leak(tmp_path)
        assert _modes() == ()


def test_a_running_thread_is_named():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    with pytest.raises(Leak, match="the running thread forgotten"), no_leaks():
        thread.start()
    stop.set()
    thread.join()


def test_what_is_cleaned_up_is_no_leak():
    with no_leaks(), FakeTensorMode():
        os.environ["RANK"] = "0"
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)
        del os.environ["RANK"]


def test_seeding_is_put_back_quietly():
    with no_leaks():
        seed_everything(3, workers=True, verbose=False)
    assert "PL_GLOBAL_SEED" not in os.environ


def test_a_daemon_thread_is_no_leak():
    stop = threading.Event()
    with no_leaks():
        threading.Thread(target=stop.wait, daemon=True).start()
    stop.set()


def test_conftest_imports_neither_torch_nor_lightning():
    script = "import sys, tests.conftest; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
