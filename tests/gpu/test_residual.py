"""The residual added by the norm's kernels: the bits of the two kernels that they replace, on shapes that fill no block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava import recipe
from ottava.models import Llama, LlamaConfig, causal_lm

pytestmark = pytest.mark.gpu
ops = torch.ops.ottava
SHAPES = [(1, 96), (33, 272), (300, 2050), (515, 4096)]


def _same(a: Tensor, b: Tensor) -> bool:
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def _random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norms_kernels_add_with_the_bits_of_torchs_addition(kind: str, dtype: torch.dtype) -> None:
    for m, k in SHAPES:
        x, residual, dy, other = (_random(m, k, dtype=dtype, seed=i) for i in range(4))
        gamma, beta = _random(k, dtype=dtype, seed=5), _random(k, dtype=dtype, seed=6) if kind == "LayerNorm" else None
        for amax in (True, False):
            settings = (gamma, beta, kind, 1e-5, False, amax)
            total, mean, rstd, largest = ops.norm_add_stats(x, residual, *settings)
            expected = ops.norm_stats(x + residual, *settings)
            assert _same(total, x + residual), (m, k)
            assert all(map(_same, (mean, rstd, largest), expected)), (m, k)
            norm = (total, gamma, mean, rstd, False, beta is not None)
            dx, dgamma, dbeta = ops.norm_backward(dy, *norm)
            fused = ops.norm_backward_add(dy, *norm, other, amax)
            assert _same(fused[0], dx + other), (m, k)
            assert _same(fused[1], dgamma) and _same(fused[2], dbeta), (m, k)
            if amax:
                assert _same(fused[3], (dx + other).abs().max().float().reshape(1)), (m, k)


def test_a_nan_and_an_infinity_are_added_and_kept_out_of_the_amax() -> None:
    x, residual = (_random(64, 256, dtype=torch.bfloat16, seed=i) for i in range(2))
    x[3, 5], x[7, 8] = float("nan"), float("inf")
    gamma = torch.ones(256, device="cuda", dtype=torch.bfloat16)
    total, *_, amax = ops.norm_add_stats(x, residual, gamma, None, "RMSNorm", 1e-5, False, True)
    assert total[3, 5].isnan() and total[7, 8].isinf()
    assert _same(amax, ops.norm_stats(x + residual, gamma, None, "RMSNorm", 1e-5, False, True)[2]) and amax.isfinite()


def test_strided_rows_are_added_as_they_lie() -> None:
    wide = _random(70, 600, dtype=torch.bfloat16, seed=0)
    x, residual = wide[:, :272], wide[:, 300:572]
    gamma = torch.ones(272, device="cuda", dtype=torch.bfloat16)
    total, *_ = ops.norm_add_stats(x, residual, gamma, None, "RMSNorm", 1e-5, False, False)
    assert _same(total, x + residual) and total.is_contiguous()


RECIPES: dict[str, Any] = {
    "none": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "block": recipe.Float8BlockScaling(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_llama_that_adds_in_its_norms_has_the_bits_of_one_that_adds_apart(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(vocab_size=512, hidden_size=256, ffn_hidden_size=512, layers=3, heads=4, kv_heads=2)
    torch.manual_seed(0)
    model = Llama(config, device="cuda", params_dtype=torch.bfloat16)
    apart = copy.deepcopy(model)
    tokens = torch.randint(512, (2, 257), generator=torch.Generator().manual_seed(0)).cuda()

    def train(model: Llama) -> list[Tensor]:
        losses = []
        for _ in range(3):
            with ottava.autocast(enabled=name != "none", recipe=RECIPES[name]):
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(p.grad for p in model.layers.parameters() if p.grad is not None)]

    fused = train(model)
    monkeypatch.setattr(causal_lm, "_adds_later", lambda layer: False)
    monkeypatch.setattr(ottava.TransformerLayer, "adds_later", lambda self: False)
    # Gradients of queries and keys come from attention, whose kernels may add in any order: the same bits are asked of one forward.
    other = train(apart)
    assert torch.equal(fused[0], other[0])
    for a, b in zip(fused, other, strict=True):
        scale = b.double().norm().clamp(min=1e-12)
        assert (a.double() - b.double()).norm() / scale < 2e-2
