"""The network against the published sizes and against independent formulations of its parts."""

import math

import pytest
import torch
from torch import nn

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.models.llama3 import LLAMA3_SIZES, Attention, Llama3, Llama3Config, RMSNorm, llama3_config
from lightning_autoparallel.models.rope import apply_rope, rope_frequencies, rope_table

TINY = Llama3Config(
    dim=48, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=64, multiple_of=8, rope_scaling=False, max_seq_len=32
)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_parameter_counts_are_the_published_ones(size, count):
    with torch.device("meta"):
        model = Llama3(LLAMA3_SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == count


def test_parameter_names():
    names = {name for name, _ in Llama3(TINY).named_parameters()}
    block = ["attention.wq", "attention.wk", "attention.wv", "attention.wo", "attention_norm", "ffn_norm"]
    block += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3"]
    in_layers = {f"layers.{i}.{name}.weight" for i in range(2) for name in block}
    assert names == in_layers | {"tok_embeddings.weight", "norm.weight", "output.weight"}


def test_meta_model_runs_once_its_parameters_are_reset():
    with torch.device("meta"):
        model = Llama3(TINY)
    model.to_empty(device="cpu")
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()
    assert not list(model.buffers())
    assert model(torch.zeros(2, 5, dtype=torch.int64)).isfinite().all()


def test_residual_layers_start_smaller():
    torch.manual_seed(0)
    attention = Attention(llama3_config("debug", {"n_layers": 8}))
    assert attention.wq.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert attention.wo.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_rms_norm_follows_its_formula():
    norm = RMSNorm(16, eps=1e-3)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 16, dtype=torch.float64)
    expected = x / torch.sqrt((x**2).sum(-1, keepdim=True) / 16 + 1e-3) * norm.weight
    torch.testing.assert_close(norm(x.float()), expected.float())


def test_rms_norm_keeps_low_precision_and_large_values():
    x = torch.full((2, 8), 3e4, dtype=torch.bfloat16)
    out = RMSNorm(8, eps=1e-5).bfloat16()(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, torch.ones_like(out))


def test_rope_turns_complex_numbers():
    cos, sin = rope_table(TINY, 7, torch.device("cpu"))
    x = torch.randn(2, 7, 3, 8)
    pairs = torch.view_as_complex(x.double().reshape(2, 7, 3, 4, 2))
    angles = torch.tensor([[t * 500000.0 ** (-i / 4) for i in range(4)] for t in range(7)], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None, :]
    torch.testing.assert_close(apply_rope(x, cos, sin), torch.view_as_real(turned).reshape_as(x).float())


@pytest.mark.parametrize("size", ["8B", "1B"])
def test_rope_scaling_has_three_ranges(size):
    config = LLAMA3_SIZES[size]
    expected = []
    for i in range(0, config.head_dim, 2):
        frequency = 500000.0 ** (-i / config.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= config.rope_factor
        elif wavelength >= 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / config.rope_factor + smooth * frequency
        expected.append(frequency)
    torch.testing.assert_close(rope_frequencies(config, torch.device("cpu")), torch.tensor(expected))


def test_attention_equals_one_head_at_a_time():
    torch.manual_seed(0)
    attention = Attention(TINY).double()
    for weight in attention.parameters():
        nn.init.normal_(weight, std=0.2)
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    cos, sin = (table.double() for table in rope_table(TINY, 5, torch.device("cpu")))
    heads = []
    for head in range(6):
        rows, shared = slice(8 * head, 8 * head + 8), slice(8 * (head // 3), 8 * (head // 3) + 8)
        query, key = x @ attention.wq.weight[rows].T, x @ attention.wk.weight[shared].T
        query, key = (apply_rope(t[:, :, None], cos, sin)[:, :, 0] for t in (query, key))
        scores = query @ key.mT / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ (x @ attention.wv.weight[shared].T))
    expected = torch.cat(heads, -1) @ attention.wo.weight.T
    # rotary embedding is computed in float32, and its two paths here differ by that rounding only
    torch.testing.assert_close(attention(x, cos, sin), expected, rtol=1e-5, atol=1e-6)


def test_no_position_sees_a_later_token():
    model = Llama3(TINY)
    tokens = torch.randint(64, (2, 9))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_tied_embeddings_are_one_parameter_used_twice():
    tied, untied = (Llama3(llama3_config("debug", {"tie_embeddings": tie})) for tie in (True, False))
    difference = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert difference == 256 * 128
    tied.load_state_dict(untied.state_dict(), strict=False)
    untied.output.weight.data.copy_(untied.tok_embeddings.weight)
    tokens = torch.randint(256, (1, 6))
    torch.testing.assert_close(tied(tokens), untied(tokens))


def test_longer_sequence_than_configured_is_refused():
    with pytest.raises(ConfigError, match=r"33 tokens.*max_seq_len=32"):
        Llama3(TINY)(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dim": 0}, "dim is 0"),
        ({"dim": "128"}, "dim is '128'"),
        ({"dim": 130}, "dim=130 does not split"),
        ({"n_kv_heads": 3}, "n_kv_heads=3"),
        ({"dim": 12, "n_heads": 4}, "is odd"),
        ({"rope_high_freq_factor": 1.0}, "rope_high_freq_factor"),
        ({"width": 3}, "has no width"),
    ],
)
def test_impossible_configurations_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        llama3_config("debug", overrides)


def test_unknown_size_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'7B'.*debug, 1B, 3B, 8B, 70B, 405B"):
        llama3_config("7B")


def test_sizes_cannot_be_changed():
    with pytest.raises(TypeError):
        LLAMA3_SIZES["debug"] = TINY
