"""GPT against `transformers`' GPT-2."""

from __future__ import annotations

import pytest
import torch
import transformers

from ottava.models import GPT, GPTConfig
from ottava.nn.initialize import materialize_

SMALL = GPTConfig(
    vocab_size=90, hidden_size=48, ffn_hidden_size=192, layers=2, heads=3, max_length=32, dropout=0.0, init_std=0.1
)


def built(config: GPTConfig) -> GPT:
    model = materialize_(GPT(config, device="meta"), device="cpu")
    with torch.no_grad():  # biases of 0 and gains of 1 would hide a swap
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def as_gpt2(state: dict[str, torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """GPT-2 stores matrices transposed and queries, keys, values of all heads behind one another."""

    def qkv(x: torch.Tensor) -> torch.Tensor:  # [heads, (q, k, v), channels, ...] -> [(q, k, v), heads, channels, ...]
        return x.unflatten(0, (config.heads, 3, config.head_channels)).transpose(0, 1).flatten(0, 2)

    out = {
        "transformer.wte.weight": state["embedding.weight"],
        "transformer.wpe.weight": state["positions.weight"],
        "transformer.ln_f.weight": state["norm.weight"],
        "transformer.ln_f.bias": state["norm.bias"],
        "lm_head.weight": state["embedding.weight"],
    }
    for n in range(config.layers):
        a, m = f"layers.{n}.self_attention", f"layers.{n}.layernorm_mlp"
        h = f"transformer.h.{n}"
        for kind in ("weight", "bias"):
            out[f"{h}.ln_1.{kind}"] = state[f"{a}.layernorm_qkv.layer_norm_{kind}"]
            out[f"{h}.ln_2.{kind}"] = state[f"{m}.layer_norm_{kind}"]
            out[f"{h}.attn.c_attn.{kind}"] = qkv(state[f"{a}.layernorm_qkv.{kind}"]).t()
            out[f"{h}.attn.c_proj.{kind}"] = state[f"{a}.proj.{kind}"].t()
            out[f"{h}.mlp.c_fc.{kind}"] = state[f"{m}.fc1_{kind}"].t()
            out[f"{h}.mlp.c_proj.{kind}"] = state[f"{m}.fc2_{kind}"].t()
    return out


def test_logits_and_gradients_equal_transformers():
    model = built(SMALL)
    hf = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=90, n_positions=32, n_embd=48, n_layer=2, n_head=3, n_inner=192,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=1e-5,
        )
    )  # fmt: skip
    missing, unexpected = hf.load_state_dict(as_gpt2(model.state_dict(), SMALL), strict=False)
    assert not unexpected and not [name for name in missing if "attn.bias" not in name]
    x = torch.randint(90, (2, 17), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), hf(x).logits, rtol=1e-5, atol=1e-5)
    model.loss(x[:, :-1], x[:, 1:]).backward()
    torch.nn.functional.cross_entropy(hf(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten()).backward()
    gradients = as_gpt2({name: p.grad for name, p in model.named_parameters()}, SMALL)
    for name, p in hf.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_positions_restart_with_each_document():
    model = built(SMALL)
    x = torch.randint(90, (1, 9), generator=torch.Generator().manual_seed(0))
    packed = model(x, documents=torch.tensor([[7] * 4 + [8] * 5]))
    apart = torch.cat([model(x[:, :4]), model(x[:, 4:])], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


def test_a_sequence_beyond_the_learned_positions_is_refused():
    with pytest.raises(ValueError, match="learned 32 positions, got a sequence of 33"):
        built(SMALL)(torch.zeros(1, 33, dtype=torch.long))


def test_dropout_acts_in_training_only():
    model = built(GPTConfig(**{**vars(SMALL), "dropout": 0.5}))
    x = torch.arange(8)[None]
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_gpt_2_has_its_parameters():
    model = GPT(GPTConfig(), device="meta")
    assert model.num_parameters() == 124_439_808
    assert model.num_parameters(tables=False) == 124_439_808 - 1024 * 768
    assert model.flops_per_token(1024).head == 6 * 50257 * 768
