"""Head and loss as one op, on a CPU: the loss and the gradients of torch in float64, whatever the chunks, the ranks and the recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

import ottava
from distributed.ranks import Ranks
from ottava import recipe
from ottava.distributed.vocabulary import VocabParallelHead
from ottava.models import Llama, LlamaConfig
from ottava.models.head_loss import chunk_of, head_loss

TOKENS, HIDDEN, WORDS, PADDED = 24, 32, 90, 96
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "ignoring a word": {"ignore_index": 3, "label_smoothing": 0.2, "z_loss": 1e-3},
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[VocabParallelHead, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(WORDS, (TOKENS // 2, 2), generator=generator)
    targets[1, 0], targets[0, 1] = 3, WORDS - 1
    head = VocabParallelHead(WORDS, HIDDEN, pad_to_multiple=32, device="cpu", params_dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(PADDED, HIDDEN, generator=generator) * 0.3)
        head.weight[WORDS:] = 5.0  # whatever padding holds, it has no part in a loss
    return head, x, targets


def in_float64(head: VocabParallelHead, x: Tensor, targets: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    x, weight = x.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    ignore = options.get("ignore_index", -100)
    logits, flat = (x @ weight[:WORDS].t()).flatten(0, 1), targets.flatten()
    smoothing = options.get("label_smoothing", 0.0)
    losses = functional.cross_entropy(logits, flat, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    losses = losses + options.get("z_loss", 0.0) * logits.logsumexp(-1).square() * (flat != ignore)
    (losses.sum() * 0.25).backward()
    assert x.grad is not None and weight.grad is not None
    return losses.sum().detach(), x.grad, weight.grad


def made(head: VocabParallelHead, x: Tensor, targets: Tensor, max_logits: int, options: dict[str, Any]) -> tuple:
    loss = head_loss(head, x, targets, max_logits, **options)
    (loss * 0.25).backward()
    return loss.detach(), x.grad, head.weight.grad


def close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bar: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b.double()).norm() <= bar * b.double().norm()


@pytest.mark.parametrize("max_logits", [2**20, 7 * PADDED, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_torchs_in_float64(name, max_logits):
    head, x, targets = inputs()
    wanted = in_float64(head, x, targets, OPTIONS[name])
    close(made(head, x, targets, max_logits, OPTIONS[name]), wanted, 1e-6)
    assert not head.weight.grad[WORDS:].any()


def test_bf16_gradients_have_the_weights_dtype_and_are_added_up_in_float32():
    for max_logits in (2**20, PADDED):  # one chunk, one token a chunk
        head, x, targets = inputs(torch.bfloat16)
        found = made(head, x, targets, max_logits, {})
        assert found[0].dtype == torch.float32 and found[1].dtype == found[2].dtype == torch.bfloat16
        close(found, in_float64(head, x, targets, {}), 8e-3)


def test_a_frozen_weight_or_input_costs_no_gradient():
    head, x, targets = inputs()
    wanted = in_float64(head, x, targets, {})
    head.weight.requires_grad_(False)
    (head_loss(head, x, targets, 300) * 0.25).backward()
    close((x.grad,), wanted[1:2], 1e-6)
    assert head.weight.grad is None
    head.weight.requires_grad_(True)
    (head_loss(head, x.detach(), targets, 300) * 0.25).backward()
    close((head.weight.grad,), wanted[2:], 1e-6)
    with torch.no_grad():
        loss = head_loss(head, x, targets, 300)
    close((loss,), wanted[:1], 1e-6)
    assert not loss.requires_grad


def test_backward_runs_once_and_says_so():
    head, x, targets = inputs()
    loss = head_loss(head, x, targets, 2**20)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="goes back once"):
        loss.backward()


def test_ignored_tokens_may_hold_nan():
    head, x, targets = inputs()
    targets[2, 0] = -100
    with torch.no_grad():
        x[2, 0] = float("nan")
    loss, dx, _ = made(head, x, targets, 2**20, {})
    assert loss.isfinite() and not dx[2, 0].any()


def test_chunks_are_few_and_whole_tiles():
    assert chunk_of(16384, 4186) == 4096 and chunk_of(8192, 4186) == 4096
    assert chunk_of(100, 4186) == 100 and chunk_of(100, 60) == 50 and chunk_of(5, 0) == 1 and chunk_of(0, 5) == 1


def test_mistakes_are_named():
    head, x, targets = inputs()
    with pytest.raises(ValueError, match="Target 90 is outside"):
        head_loss(head, x, torch.full_like(targets, WORDS), 100)
    with pytest.raises(ValueError, match="22 targets for 24 hidden states"):
        head_loss(head, x, targets[1:], 100)
    with pytest.raises(ValueError, match="between 0 and 1"):
        head_loss(head, x, targets, 100, label_smoothing=2.0)


# ---------------------------------------------------------------------------------------------------------------------- ranks


def on_ranks(sequence_parallel: bool, max_logits: int, options: dict[str, Any], quantized: bool) -> list[list]:
    head, x, targets = inputs()
    head.set_tensor_parallel_group(dist.group.WORLD)
    head.sequence_parallel, head.quantized = sequence_parallel, quantized
    if sequence_parallel:
        x = x.detach().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    with ottava.autocast(enabled=quantized, recipe=recipe.Float8CurrentScaling()):
        return [t.tolist() for t in made(head, x, targets, max_logits, options)]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2) as started:
        yield started


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_vocabulary_over_two_ranks_gives_the_same(ranks, sequence_parallel):
    for name, max_logits in (("ignoring a word", 2**20), ("plain", 5 * PADDED // 2)):
        head, x, targets = inputs()
        wanted = in_float64(head, x, targets, OPTIONS[name])
        found = ranks.run(on_ranks, sequence_parallel, max_logits, OPTIONS[name], False)
        dx = torch.tensor(found[0][1] + found[1][1]) if sequence_parallel else torch.tensor(found[1][1])
        dweight = torch.tensor(found[0][2] + found[1][2])
        close((torch.tensor(found[0][0]), dx, dweight), wanted, 1e-6)
        assert found[0][0] == found[1][0]


# -------------------------------------------------------------------------------------------------------------------- recipes

RECIPES = [
    recipe.DelayedScaling(),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.NVFP4BlockScaling(),
]


def quantized_inputs() -> tuple[VocabParallelHead, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    head = VocabParallelHead(250, 64, pad_to_multiple=128, device="cpu", params_dtype=torch.float32)
    head.quantized = True
    x = torch.randn(150, 64, generator=generator).requires_grad_()
    return head, x, torch.randint(250, (150,), generator=generator)


@pytest.mark.parametrize("chosen", RECIPES, ids=lambda r: type(r).__name__)
def test_a_quantized_head_is_close_and_quantized(chosen):
    head, x, targets = quantized_inputs()
    with torch.no_grad():
        head.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    plain = made(head, x, targets, 2**20, {})  # outside of autocast
    x.grad = head.weight.grad = None
    with ottava.autocast(recipe=chosen):
        loss = head_loss(head, x, targets, 130 * 256)  # two chunks
    (loss * 0.25).backward()
    found = (loss.detach(), x.grad, head.weight.grad)
    bar = 0.5 if isinstance(chosen, recipe.NVFP4BlockScaling) else 0.1
    close(found, plain, bar)
    assert not torch.equal(found[2], plain[2]) and not head.weight.grad[250:].any()


def test_a_quantized_head_has_the_scales_of_one_process_on_two_ranks(ranks):
    head, x, targets = inputs()
    head.quantized = True
    with ottava.autocast(recipe=recipe.Float8CurrentScaling()):
        wanted = made(head, x, targets, 2**20, {})
    found = ranks.run(on_ranks, True, 2**20, {}, True)
    dx, dweight = torch.tensor(found[0][1] + found[1][1]), torch.tensor(found[0][2] + found[1][2])
    close((torch.tensor(found[0][0]), dx, dweight), wanted, 1e-5)


def test_what_a_quantized_head_cannot_do_is_named():
    head, x, targets = inputs()
    head.quantized = True
    for chosen, message in (
        (recipe.Float8BlockScaling(), "96 rows a rank and 32 columns: pad the vocabulary with pad_vocab_to=128"),
        (recipe.Float8CurrentScaling(backward_override="high_precision"), "asks for 'high_precision' in backward"),
    ):
        with pytest.raises(ValueError, match=message), ottava.autocast(recipe=chosen):
            head_loss(head, x, targets, 2**20)


def test_models_quantize_their_head_by_choice():
    config = LlamaConfig(60, 32, 64, layers=1, heads=2, kv_heads=1, max_length=16, pad_vocab_to=64, tie_embeddings=True)
    tokens = torch.randint(60, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for fp8_head in (False, True):
        torch.manual_seed(0)
        model = Llama(config, device="cpu", fp8_head=fp8_head)
        with ottava.autocast(recipe=recipe.Float8CurrentScaling()):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        assert model.head.weight.grad is not None
        losses.append(loss.item())
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_gradient_has_the_dtype_that_its_parameter_asks_for():
    for max_logits in (2**20, PADDED):
        head, x, targets = inputs()
        head.weight.grad_dtype = torch.bfloat16
        found = made(head, x, targets, max_logits, {})
        assert found[2].dtype == torch.bfloat16
        close(found[2:], in_float64(head, x, targets, {})[2:], 8e-3)
