"""`fp8_dpa` and `fp8_mha`: where attention runs in FP8, where it does not and says why, and that a model trains with it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ottava
from ottava import recipe
from ottava.attention import DotProductAttention, PackedDocuments
from ottava.kernels.attention_fp8 import fp8_attention
from ottava.models import Llama, LlamaConfig
from ottava.nn.initialize import materialize_
from ottava.notices import warn_once

CURRENT = recipe.Float8CurrentScaling(fp8_dpa=True)
LENGTH = 40


@pytest.fixture
def told(caplog) -> Iterator[list[str]]:
    """Warnings, from the first."""
    warn_once.cache_clear()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage()) if record.levelno == logging.WARNING else None
    logging.getLogger("ottava").addHandler(handler)
    yield lines
    logging.getLogger("ottava").removeHandler(handler)
    warn_once.cache_clear()


def module(**options) -> DotProductAttention:
    return DotProductAttention(4, 32, 2, device="cpu", **options)


def qkv(length: int = LENGTH, keys: int | None = None) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    keys = length if keys is None else keys
    return [torch.randn(n, 2, heads, 32, generator=draw) for n, heads in ((length, 4), (keys, 2), (keys, 2))]


def direct(tensors: list[Tensor], batch_first: bool = False, **options) -> Tensor:
    options = {"causal": True, "scale": 32**-0.5, **options}
    return fp8_attention(*tensors, batch_first=batch_first, **options).flatten(-2)


def test_fp8_runs_inside_autocast_with_a_recipe_that_asks_for_it(told) -> None:
    attend, tensors = module(), qkv()
    plain = attend(*tensors)
    with ottava.autocast(recipe=CURRENT):
        found = attend(*tensors)
        with ottava.autocast(enabled=False):
            assert torch.equal(attend(*tensors), plain)
    assert torch.equal(found, direct(tensors)) and not torch.equal(found, plain)
    for other in (recipe.Float8CurrentScaling(), recipe.DelayedScaling(), recipe.Float8BlockScaling()):
        with ottava.autocast(recipe=other):
            assert torch.equal(attend(*tensors), plain)
    with ottava.autocast(enabled=False, calibrating=True, recipe=CURRENT):
        assert torch.equal(attend(*tensors), plain)
    assert told == []


def test_scales_are_those_of_the_recipe() -> None:
    attend, tensors = module(), qkv()
    for asked, options in (
        (recipe.DelayedScaling(fp8_dpa=True), {}),
        (recipe.DelayedScaling(fp8_dpa=True, margin=2), {"peak": 112.0}),
        (recipe.Float8CurrentScaling(fp8_dpa=True, use_power_2_scales=True), {"power_of_two": True}),
    ):
        with ottava.autocast(recipe=asked):
            assert torch.equal(attend(*tensors), direct(tensors, **options))


def test_layouts_and_packings_give_the_same_bits(told) -> None:
    q, k, v = qkv()
    first = [x.transpose(0, 1) for x in (q, k, v)]
    lengths = torch.tensor([[5, 35], [40, 0]])
    documents = torch.stack([torch.repeat_interleave(torch.arange(2), n) for n in lengths])
    offsets = torch.tensor([0, 5, 40, 80, 80], dtype=torch.int32)
    with ottava.autocast(recipe=CURRENT):
        dense = module()(q, k, v)
        assert torch.equal(module(qkv_format="bshd")(*first), dense.transpose(0, 1))
        whole = module(attn_mask_type="no_mask")(q, k, v)
        by_documents = module(attn_mask_type="arbitrary")(q, k, v, PackedDocuments(documents))
        flat = [torch.cat([x.flatten(0, 1), torch.full((7, *x.shape[2:]), 1e4)]) for x in first]  # whatever lies after
        packed = module(qkv_format="thd", attn_mask_type="padding_causal")(
            *flat, cu_seqlens_q=offsets, cu_seqlens_kv=offsets
        )
    assert torch.equal(whole, direct([q, k, v], causal=False))
    assert torch.equal(by_documents[:, 1], dense[:, 1])  # one document is the whole row
    # Blocks of keys begin elsewhere, so weights are rounded against other maxima.
    difference = packed[:80].view(2, 40, -1).transpose(0, 1) - by_documents
    assert difference.norm() < 0.05 * by_documents.norm() and not packed[80:].any()
    assert told == []


@pytest.mark.parametrize(
    "options,arguments,reason",
    [
        ({"attention_dropout": 0.5}, {}, "attention_dropout is 0.5"),
        ({"softmax_type": "off-by-one"}, {}, "softmax_type is 'off-by-one'"),
        ({"softmax_scale": -1.0}, {}, "softmax_scale is -1.0, not positive"),
        ({}, {"core_attention_bias_type": "alibi"}, "core_attention_bias_type is 'alibi'"),
        ({"window_size": (8, 0)}, {}, "there is a window"),
        (
            {"attn_mask_type": "arbitrary"},
            {"attention_mask": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)},
            "there is a mask of the type 'arbitrary'",
        ),
        (
            {"attn_mask_type": "padding"},
            {"attention_mask": torch.zeros(2, 1, 1, LENGTH, dtype=torch.bool)},
            "there is a mask of the type 'padding'",
        ),
    ],
)  # fmt: skip
def test_what_fp8_does_not_do_runs_unquantized_and_is_named_once(told, options, arguments, reason: str) -> None:
    attend, tensors = module(**options), qkv()
    torch.manual_seed(3)
    expected = attend(*tensors, **arguments)
    with ottava.autocast(recipe=CURRENT):
        for _ in range(2):
            torch.manual_seed(3)
            assert torch.equal(attend(*tensors, **arguments), expected)
    (line,) = told
    assert re.fullmatch(f"ottava: fp8_dpa=True, but attention runs in the activation dtype: {reason}\\.", line)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"core_attention_bias": torch.zeros(1, 1, LENGTH, LENGTH)}, "'no_bias' takes no core_attention_bias"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes are given"),
        ({"cu_seqlens_q": torch.tensor([0, LENGTH, 2 * LENGTH])}, "pass no cu_seqlens_q"),
    ],
)
def test_what_nobody_would_look_at_is_refused_in_fp8_too(arguments: dict, message: str) -> None:
    documents = PackedDocuments(torch.zeros(2, LENGTH, dtype=torch.long))
    with ottava.autocast(recipe=CURRENT), pytest.raises(ValueError, match=message):
        module(attn_mask_type="arbitrary")(*qkv(), attention_mask=documents, **arguments)


def test_dropout_is_no_obstacle_to_an_evaluation(told) -> None:
    attend, tensors = module(attention_dropout=0.5).eval(), qkv()
    with ottava.autocast(recipe=CURRENT):
        assert torch.equal(attend(*tensors), direct(tensors))
    assert told == []


def test_packed_sequences_that_are_not_causal_self_attention_say_so(told) -> None:
    flat = [x.flatten(0, 1) for x in qkv()]
    offsets = torch.tensor([0, 30, 80], dtype=torch.int32)
    with ottava.autocast(recipe=CURRENT):
        module(qkv_format="thd", attn_mask_type="padding")(*flat, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
        module(qkv_format="thd", attn_mask_type="padding_causal")(
            *flat, cu_seqlens_q=offsets, cu_seqlens_kv=offsets.clone()
        )
    assert "have the mask type 'padding'" in told[0] and "are two tensors: pass one for both" in told[1]


def test_wrong_arguments_are_named_as_without_fp8() -> None:
    attend, tensors = module(), qkv()
    with ottava.autocast(recipe=CURRENT):
        with pytest.raises(ValueError, match="takes no core_attention_bias"):
            attend(*tensors, core_attention_bias=torch.zeros(1, 1, LENGTH, LENGTH))
        with pytest.raises(ValueError, match="has no padding"):
            attend(*tensors, cu_seqlens_q=torch.tensor([0, 40, 80]), cu_seqlens_kv=torch.tensor([0, 40, 80]))
        with pytest.raises(ValueError, match="cu_seqlens_q end at 90, but there are 80 tokens"):
            offsets = torch.tensor([0, 90])
            flat = [x.flatten(0, 1) for x in tensors]
            attend(
                *flat, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=offsets, cu_seqlens_kv=offsets
            )


def test_fp8_mha_is_fp8_dpa_and_says_so_once(told) -> None:
    attend, tensors = module(), qkv()
    with ottava.autocast(recipe=recipe.DelayedScaling(fp8_mha=True)):
        for _ in range(2):
            assert torch.equal(attend(*tensors), direct(tensors))
    (line,) = told
    assert "fp8_mha=True does what fp8_dpa=True does" in line


def test_what_is_left_unquantized_attends_unquantized() -> None:
    attend, tensors = ottava.leave_unquantized(module()), qkv()
    plain = attend(*tensors)
    with ottava.autocast(recipe=CURRENT):
        assert torch.equal(attend(*tensors), plain)


@pytest.mark.parametrize("way", ["core", "whole", "whole, reentrant"])
def test_a_recomputation_runs_as_the_forward_did(way: str) -> None:
    def gradients(recomputed: bool) -> list[Tensor]:
        attend, tensors = module(), [x.requires_grad_() for x in qkv()]
        with ottava.autocast(recipe=CURRENT):
            if recomputed and way != "core":
                out = checkpoint(attend, *tensors, use_reentrant=way == "whole, reentrant")
            else:
                out = attend(*tensors, checkpoint_core_attention=recomputed)
        out.square().sum().backward()
        return [out, *(x.grad for x in tensors)]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_a_module_that_has_run_can_be_copied() -> None:
    attend, tensors = module(), qkv()
    with ottava.autocast(recipe=CURRENT):
        expected = attend(*tensors)
        other = copy.deepcopy(attend)
        assert other._last_context == {} and torch.equal(other(*tensors), expected)


def test_compiled_attention_gives_the_same_bits_and_warns_as_well(told) -> None:
    attend, tensors = module(), [x.requires_grad_() for x in qkv()]
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with ottava.autocast(recipe=CURRENT):
        assert torch.equal(compiled(*tensors), attend(*tensors))
        assert told == []
        for size in (8, 5, 3):  # a symbol from the second one on
            compiled(*tensors, window_size=(size, 0))
    assert ["there is a window" in line for line in told] == [True]


@pytest.mark.parametrize(
    "make", [recipe.Float8CurrentScaling, pytest.param(recipe.DelayedScaling, marks=pytest.mark.extra)]
)
def test_a_small_llama_trains_as_it_does_without(make: type) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, ffn_hidden_size=128, layers=2, heads=2, kv_heads=1, max_length=64, init_std=0.05
    )
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(64, (30, 4, 1), generator=draw)
    text = (start + 3 * torch.arange(49)) % 64  # each token follows from the one before

    def losses(asked: recipe.Recipe) -> list[float]:
        model = materialize_(Llama(config, device="meta"), seed=0, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        seen = []
        for batch in text:
            with ottava.autocast(recipe=asked):
                logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    with_, without = losses(make(fp8_dpa=True)), losses(make())
    assert with_ != without and without[-1] < 0.5 * without[0]
    assert abs(sum(with_[-5:]) / sum(without[-5:]) - 1) < 0.02
