"""Networks of transformers that are asked for more than logits, for which a first call hangs hooks into layers."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.worlds import Worlds

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
}


class HiddenStates(Net):
    strategy: ClassVar[dict[str, Any]] = {"capture": "step"}

    def __init__(self) -> None:
        super().__init__()
        self.net = LlamaForCausalLM(LlamaConfig(**SIZES))

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(0, 32, (self.rows, 6), generator=generator) for _ in range(self.steps)]

    def loss(self, batch: Any) -> Tensor:
        out = self.net(input_ids=batch, labels=batch, output_hidden_states=True, output_attentions=True)
        assert len(out.hidden_states) == 3 and len(out.attentions) == 2  # each is kept once
        return out.loss + sum(state.square().mean() for state in out.hidden_states) + out.attentions[0].square().mean()


class RouterLogits(HiddenStates):
    def __init__(self) -> None:
        super().__init__()
        self.net = MixtralForCausalLM(
            MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
        )

    def loss(self, batch: Any) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss


@pytest.mark.parametrize(("kind", "mesh"), [(HiddenStates, MESH), (RouterLogits, {"tp": 2})])
def test_a_step_that_asks_for_them_is_captured_whole(kind: type[Net], mesh: dict[str, int], worlds: Worlds):
    outcomes = worlds(2).run(train, kind, mesh)
    assert_equals_one_device(outcomes, train(kind, None))
