"""Llama against `transformers`, which knows nothing of Ottava, and what the model promises by itself."""

from __future__ import annotations

import pytest
import torch
import transformers

import ottava
from ottava.models import Llama, LlamaConfig, hf_llama
from ottava.nn.initialize import materialize_

SMALL = LlamaConfig(
    vocab_size=100, hidden_size=64, ffn_hidden_size=96, layers=2, heads=4, kv_heads=2, max_length=64, init_std=0.1
)


def with_(config: LlamaConfig, **changes) -> LlamaConfig:
    return LlamaConfig(**{**vars(config), **changes})


def built(config: LlamaConfig, seed: int = 0, **options) -> Llama:
    model = materialize_(Llama(config, device="meta", **options), seed=seed, device="cpu")
    with torch.no_grad():  # gains of 1 would hide a swap of two norms
        for name, p in model.named_parameters():
            if "norm" in name and p.dim() == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def theirs(config: LlamaConfig) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_llama.hf_config(config)))


def tokens(config: LlamaConfig, batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": True}, {"kv_heads": 4}, {"kv_heads": 1, "pad_vocab_to": 64}],
    ids=["gqa", "tied", "mha", "mqa, padded vocabulary"],
)
def test_logits_and_gradients_equal_transformers(changes):
    config = with_(SMALL, **changes)
    model, hf = built(config), theirs(config)
    hf.load_state_dict(hf_llama.to_hf(model.state_dict(), config), strict=not config.tie_embeddings)
    x = tokens(config)
    inputs, targets = x[:, :-1], x[:, 1:]
    torch.testing.assert_close(model(inputs), hf(inputs).logits, rtol=1e-5, atol=1e-5)
    loss = model.loss(inputs, targets)
    want = torch.nn.functional.cross_entropy(hf(inputs).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    loss.backward()
    want.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    back = hf_llama.from_hf({name: p.grad for name, p in hf.named_parameters()}, config)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, back[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_weights_go_to_hugging_face_and_back_unchanged():
    config = with_(SMALL, pad_vocab_to=64)
    state = built(config).state_dict()
    back = hf_llama.from_hf(hf_llama.to_hf(state, config), config)
    assert set(back) == {name for name in state if "rotary" not in name and "delayed" not in name}
    for name, tensor in back.items():
        assert torch.equal(tensor, state[name]), name


def test_weights_come_from_hugging_face():
    hf = theirs(SMALL)
    model = Llama(SMALL, device="cpu")
    model.load_state_dict(hf_llama.from_hf(hf.state_dict(), SMALL), strict=False)
    x = tokens(SMALL)
    torch.testing.assert_close(model(x), hf(x).logits, rtol=1e-5, atol=1e-5)


def test_shapes_in_the_table_are_those_of_transformers():
    for config in (SMALL, with_(SMALL, tie_embeddings=True)):
        shapes = {name: tuple(p.shape) for name, p in theirs(config).named_parameters()}
        assert hf_llama.hf_shapes(config) == shapes


def test_wrong_hugging_face_weights_are_named():
    state = hf_llama.to_hf(built(SMALL).state_dict(), SMALL)
    fewer = {n: t for n, t in state.items() if n != "model.norm.weight"}
    with pytest.raises(ValueError, match="model.norm.weight"):
        hf_llama.from_hf(fewer, SMALL)
    with pytest.raises(ValueError, match=r"unknown \['score.weight'\]"):
        hf_llama.from_hf({**state, "score.weight": state["model.norm.weight"]}, SMALL)
    with pytest.raises(ValueError, match=r"k_proj.weight must have the shape \(32, 64\)"):
        hf_llama.from_hf({**state, "model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)}, SMALL)


def test_config_goes_to_hugging_face_and_back():
    for config in (SMALL, LlamaConfig(), with_(SMALL, tie_embeddings=True, rope_theta=1e4)):
        assert hf_llama.config_from_hf(hf_llama.hf_config(config), init_std=config.init_std) == config
        as_saved = theirs(SMALL).config.to_dict()  # newer releases keep rope_theta in rope_parameters
        assert hf_llama.config_from_hf(as_saved, init_std=SMALL.init_std) == SMALL


def test_a_config_that_is_not_offered_is_refused():
    found = hf_llama.hf_config(SMALL)
    with pytest.raises(ValueError, match="rope type 'llama3'"):
        hf_llama.config_from_hf({**found, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
    with pytest.raises(ValueError, match="attention_bias True"):
        hf_llama.config_from_hf({**found, "attention_bias": True})


def test_documents_in_one_row_do_not_see_each_other():
    model = built(SMALL).eval()
    x = tokens(SMALL, 1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    packed = model(x, documents=documents)
    apart = torch.cat([model(x[:, :5]), model(x[:, 5:])], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)
    assert (model(x)[:, 5:] - apart[:, 5:]).abs().max() > 1e-2


def test_a_loss_in_pieces_is_the_loss():
    results = []
    for options in ({}, {"max_logits": 2 * 100 * 3}, {"max_logits": 1}):
        model = built(SMALL)
        x = tokens(SMALL)
        targets = x[:, 1:].clone()
        targets[0, 3:9] = -100
        loss = model.loss(x[:, :-1], targets, z_loss=1e-3, **options)
        loss.backward()
        results.append((loss.detach(), model.head.weight.grad, model.embedding.weight.grad))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


def test_a_loss_in_pieces_never_holds_all_logits():
    model, x = built(SMALL), tokens(SMALL)

    def most_rows(**options) -> int:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            model.loss(x[:, :-1], x[:, 1:], **options)
        return max([shape[0] for shape in kept if len(shape) == 2 and shape[1] == 100], default=0)

    assert most_rows() == 32
    assert most_rows(max_logits=800) <= 8


def test_sum_and_mean_and_ignored_targets():
    model, x = built(SMALL), tokens(SMALL)
    targets = x[:, 1:].clone()
    targets[:, ::2] = -100
    count = (targets != -100).sum()
    total = model.loss(x[:, :-1], targets, reduction="sum")
    torch.testing.assert_close(model.loss(x[:, :-1], targets), total / count)
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        model.loss(x[:, :-1], targets, reduction="none")
    with pytest.raises(ValueError, match="z_loss belong to a loss"):
        model(x, z_loss=0.1)


def test_output_layers_start_smaller_with_depth():
    config = with_(SMALL, hidden_size=256, ffn_hidden_size=512, layers=8, heads=4, init_std=0.02)
    layer = materialize_(Llama(config, device="meta"), device="cpu").layers[3]
    assert layer.layernorm_mlp.fc1_weight.std().item() == pytest.approx(0.02, rel=0.02)
    for weight in (layer.layernorm_mlp.fc2_weight, layer.self_attention.proj.weight):
        assert weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.02)


def test_a_tied_model_keeps_one_weight_through_meta():
    model = built(with_(SMALL, tie_embeddings=True))
    assert model.head.weight is model.embedding.weight
    assert model.num_parameters(tables=False) == model.num_parameters()


def test_llama_3_8b_has_its_parameters_and_flops():
    config = LlamaConfig()
    model = Llama(config, device="meta")
    assert model.num_parameters() == 8_030_261_248
    norms = (2 * 32 + 1) * 4096
    multiplied = model.num_parameters(tables=False) - norms
    flops = model.flops_per_token(8192)
    assert flops.layers + flops.head == 6 * multiplied
    assert flops.attention == 12 * 32 * 4096 * 8192
    assert flops.full - flops.causal == flops.attention / 2


def test_flops_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    config = with_(SMALL, kv_heads=4)  # transformers repeats keys, which changes nothing in the count
    hf, x = theirs(config), tokens(config, 2, 32)
    hf.config._attn_implementation = "eager"  # whole squares
    with FlopCounterMode(display=False) as counter:
        hf(x).logits.sum().backward()
    assert counter.get_total_flops() == pytest.approx(config.flops_per_token(32).full * 64, rel=0.01)


def test_a_quantized_step_learns():
    config = with_(SMALL, vocab_size=96, init_std=0.02)
    model = built(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = tokens(config, 4, 17)
    losses = []
    for _ in range(12):
        with ottava.autocast(recipe=ottava.recipe.Float8CurrentScaling()):
            loss = model.loss(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"heads": 3}, "hidden_size .64. must be a multiple of heads .3."),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"layers": 0}, "layers must be positive"),
        ({"heads": 64, "kv_heads": 64}, "is odd"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        with_(SMALL, **changes)
