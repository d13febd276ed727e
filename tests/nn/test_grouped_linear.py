"""GroupedLinear is num_gemms Linears on consecutive rows, bit for bit, for every recipe."""

from __future__ import annotations

import copy

import pytest
import torch

import ottava
from ottava import recipe
from ottava.nn.product import watching

RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "high_precision": recipe.Float8BlockScaling(backward_override="high_precision"),
    "dequantized": recipe.Float8BlockScaling(backward_override="dequantized"),
}


def pair(splits: list[int], bias: bool = True, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    grouped = ottava.GroupedLinear(len(splits), 64, 96, bias=bias, params_dtype=dtype, device="cpu")
    singles = [ottava.Linear(64, 96, bias=bias, params_dtype=dtype, device="cpu") for _ in splits]
    with torch.no_grad():
        for g, single in enumerate(singles):
            if bias:
                getattr(grouped, f"bias{g}").normal_()
                single.bias.copy_(getattr(grouped, f"bias{g}"))
            single.weight.copy_(getattr(grouped, f"weight{g}"))
    return grouped, singles


@pytest.mark.parametrize("name", list(RECIPES))
@pytest.mark.parametrize("bias", [True, False])
def test_equals_separate_linears_for_three_steps(name, bias):
    splits = [16, 0, 48, 32]
    grouped, singles = pair(splits, bias)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(sum(splits), 64, generator=generator).bfloat16()
        dy = torch.randn(sum(splits), 96, generator=generator).bfloat16()
        together, apart = x.clone().requires_grad_(), x.clone().requires_grad_()
        with ottava.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = grouped(together, splits)
            expected = torch.cat([m(p) for m, p in zip(singles, apart.split(splits), strict=True)])
        assert torch.equal(y, expected)
        grouped.zero_grad()
        for single in singles:
            single.zero_grad()
        y.backward(dy)
        expected.backward(dy)
        assert torch.equal(together.grad, apart.grad)
        for g, single in enumerate(singles):
            assert torch.equal(getattr(grouped, f"weight{g}").grad, single.weight.grad)
            if bias:
                assert torch.equal(getattr(grouped, f"bias{g}").grad, single.bias.grad)
    if name == "delayed":
        scales = torch.cat([s.delayed.fwd_scale for s in singles])
        assert torch.equal(grouped.delayed.fwd_scale, scales)


def test_microbatches_reuse_the_quantized_weights():
    splits = [16, 32]
    grouped, _ = pair(splits)
    x = torch.randn(48, 64, dtype=torch.bfloat16)
    with ottava.autocast(recipe=recipe.Float8CurrentScaling()):
        first = grouped(x, splits, is_first_microbatch=True)
        with torch.no_grad():
            grouped.weight0.zero_()
        assert torch.equal(grouped(x, splits, is_first_microbatch=False), first)


def test_stored_weights_and_returned_bias():
    with ottava.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        grouped = ottava.GroupedLinear(2, 128, 128, return_bias=True, params_dtype=torch.bfloat16, device="cpu")
    assert isinstance(grouped.weight1, ottava.QuantizedTensor)
    with ottava.autocast(recipe=recipe.Float8BlockScaling()):
        y, biases = grouped(torch.randn(32, 128, dtype=torch.bfloat16), [8, 24])
    assert y.shape == (32, 128)
    assert len(biases) == 2


def test_wrong_splits_are_named():
    grouped, _ = pair([8, 8])
    for splits in ([16], [8, 9], [20, -4]):
        with pytest.raises(ValueError, match="m_splits must have 2 numbers, none negative, that add up to 16"):
            grouped(torch.randn(16, 64, dtype=torch.bfloat16), splits)
    with pytest.raises(ValueError, match=r"m_splits are numbers of rows, which are integers, got \[8.0, 8.0\]"):
        grouped(torch.randn(16, 64, dtype=torch.bfloat16), [8.0, 8.0])
    with pytest.raises(ValueError, match="num_gemms"):
        ottava.GroupedLinear(0, 64, 64)


def test_splits_may_be_a_tensor():
    grouped, _ = pair([4, 12])
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    assert torch.equal(grouped(x, torch.tensor([4, 12])), grouped(x, [4, 12]))


@pytest.mark.parametrize("name", ["none", "current"])
def test_weight_gradients_accumulate_into_main_grad(name):
    splits = [16, 32]
    plain, _ = pair(splits, dtype=torch.float32)
    fused = ottava.GroupedLinear(2, 64, 96, params_dtype=torch.float32, device="cpu", fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    for g in range(2):
        getattr(fused, f"weight{g}").main_grad = torch.ones(96, 64)
    x = torch.randn(48, 64)
    for module in (plain, fused):
        with ottava.autocast(enabled=name != "none", recipe=RECIPES[name]):
            module(x, splits).sum().backward()
    for g in range(2):
        assert getattr(fused, f"weight{g}").grad is None
        assert torch.equal(getattr(fused, f"weight{g}").main_grad, getattr(plain, f"weight{g}").grad + 1.0)


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_one_graph_for_all_experts(name):
    splits = [16, 0, 80]
    torch._dynamo.reset()
    eager, _ = pair(splits)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(96, 64, dtype=torch.bfloat16)
    found = []
    for call in (eager, compiled):
        inp = x.clone().requires_grad_()
        with ottava.autocast(recipe=RECIPES[name]):
            y = call(inp, splits)
        y.sum().backward()
        found.append((y, inp.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found))
    assert torch.equal(eager.weight2.grad, module.weight2.grad)


def test_operands_of_every_expert_can_be_looked_at():
    splits = [16, 32]
    grouped, _ = pair(splits)
    seen = []
    with (
        ottava.autocast(recipe=recipe.Float8CurrentScaling()),
        watching(lambda a, b: seen.append((a.data.shape[0], str(a.scheme), str(b.scheme)))),
    ):
        grouped(torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True), splits).sum().backward()
    forward, dgrad, wgrad = seen[:2], seen[2:4], seen[4:]
    assert forward == [(16, "e4m3:tensor", "e4m3:tensor"), (32, "e4m3:tensor", "e4m3:tensor")]
    assert dgrad == [(16, "e5m2:tensor", "e4m3:tensor"), (32, "e5m2:tensor", "e4m3:tensor")]
    assert wgrad == [(96, "e5m2:tensor", "e4m3:tensor")] * 2
