"""The generators that captured steps draw from."""

from __future__ import annotations

import pytest
import torch

from lightning_autoparallel.pipeline.seeds import generators_at


def test_generators_are_put_back_and_those_of_other_devices_are_never_touched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("every device of CUDA was seeded"))
    state = torch.get_rng_state()
    drawn = []
    for text in ("one", "other", "one"):
        with generators_at(text, torch.device("cpu")):
            drawn.append(torch.rand(4))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.get_rng_state(), state)
