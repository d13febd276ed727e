"""What a forward pass keeps for backward: FP8 copies, one byte an element, and never both precisions.

tests/nn/test_transformer_layer.py has the same for a whole Llama-shaped layer, with its bars.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava import recipe, torch_private
from ottava.kernels import registry
from quant_cases import RECIPES, casting

TOKENS, HIDDEN, FFN = 384, 128, 512
U = TOKENS * HIDDEN  # bytes for one byte an element of an activation
FP8 = ["delayed", "current", "block", "mxfp8"]


def kept_by(
    module: torch.nn.Module, scheme: str, chosen: recipe.Recipe | None = None, grad: bool = True
) -> dict[tuple, int]:
    """{(shape, dtype): bytes} of what autograd saved, parameters, buffers and FP8 copies of weights apart."""
    saved: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=grad)
    apart = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    weights = {tuple(p.shape) for p in module.parameters() if p.dim() == 2}
    weights |= {tuple(reversed(s)) for s in weights}
    weights |= {(rows, columns // 2) for rows, columns in weights}  # four bits: two a byte
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        ottava.autocast(recipe=chosen) if chosen is not None else casting(scheme),
    ):
        y = module(x)
    del y
    result: dict[tuple, int] = {}
    for address, t in saved.items():
        if address in apart or tuple(t.shape) in weights or t.numel() <= TOKENS:  # statistics of rows, scales
            continue
        key = (tuple(t.shape), t.dtype)
        result[key] = result.get(key, 0) + t.untyped_storage().nbytes()
    return result


def large(kept: dict[tuple, int]) -> dict[tuple, int]:
    """Without the scales of blocks."""
    return {key: size for key, size in kept.items() if size >= U // 2}


def linear(**options: Any) -> ottava.Linear:
    return ottava.Linear(HIDDEN, FFN, params_dtype=torch.bfloat16, device="cpu", **options)


def mlp(**options: Any) -> ottava.LayerNormMLP:
    return ottava.LayerNormMLP(
        HIDDEN,
        FFN,
        activation="swiglu",
        normalization="RMSNorm",
        bias=False,
        params_dtype=torch.bfloat16,
        device="cpu",
        **options,
    )


@pytest.mark.parametrize("scheme", FP8)
def test_linear_keeps_the_columnwise_copy_and_nothing_else(scheme: str) -> None:
    kept = kept_by(linear(), scheme)
    assert large(kept) == {((HIDDEN, TOKENS), torch.uint8): U}
    assert sum(kept.values()) < 1.15 * U  # MXFP8 has a scale byte for every 32, of the weight's copy too


def test_unquantized_linear_keeps_its_input() -> None:
    assert kept_by(linear(), "none") == {((TOKENS, HIDDEN), torch.bfloat16): 2 * U}


@pytest.mark.parametrize("scheme", FP8)
def test_linear_that_keeps_its_input_has_no_copy_of_it(scheme: str) -> None:
    assert large(kept_by(linear(recompute="selective"), scheme)) == {((TOKENS, HIDDEN), torch.bfloat16): 2 * U}


def test_packed_four_bit_copies_take_half_a_byte() -> None:
    assert large(kept_by(linear(), "nvfp4")) == {((HIDDEN, TOKENS // 2), torch.uint8): U // 2}


@pytest.mark.parametrize("scheme", FP8)
def test_layernorm_mlp(scheme: str) -> None:
    """x and fc1's output in bf16, since norm and activation have derivatives; fc1's operand in FP8. The activation's backward makes fc2's
    operand on the way, and in bf16 makes it again."""
    kept = large(kept_by(mlp(), scheme))
    wide = FFN // HIDDEN
    assert kept == {
        ((TOKENS, HIDDEN), torch.bfloat16): 2 * U,
        ((HIDDEN, TOKENS), torch.uint8): U,
        ((TOKENS, 2 * FFN), torch.bfloat16): 2 * 2 * wide * U,
    }
    plain = sum(large(kept_by(mlp(), "none")).values())
    assert plain == (2 + 2 + 4 * wide) * U and sum(kept.values()) == (2 + 1 + 4 * wide) * U


@pytest.mark.parametrize("scheme", FP8)
def test_layernorm_mlp_with_recompute_keeps_inputs_only(scheme: str) -> None:
    kept = large(kept_by(mlp(recompute="selective"), scheme))
    assert kept == {
        ((TOKENS, HIDDEN), torch.bfloat16): 2 * U,
        ((TOKENS, 2 * FFN), torch.bfloat16): 4 * FFN // HIDDEN * U,
    }


@pytest.mark.parametrize("kind", ["current", "block"])
def test_backward_overrides_keep_what_they_say(kind: str) -> None:
    high = type(RECIPES[kind])(backward_override="high_precision")
    assert large(kept_by(linear(), "", high)) == {((TOKENS, HIDDEN), torch.bfloat16): 2 * U}
    dequantized = type(RECIPES[kind])(backward_override="dequantized")
    assert large(kept_by(linear(), "", dequantized)) == {((TOKENS, HIDDEN), torch.uint8): U}


@pytest.mark.parametrize("scheme", FP8)
def test_frozen_weight_and_input_without_gradient_keep_less(scheme: str) -> None:
    module = linear(bias=False)
    module.weight.requires_grad_(False)
    assert kept_by(module, scheme, grad=False) == {}


@pytest.mark.parametrize("scheme", [*FP8, "none"])
def test_backward_lets_go_of_what_it_has_used(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the norm's gradient is made, fc1's output and all that fc2 kept are gone. Memory is highest in the last layer's backward."""
    refs: list[Any] = []
    alive: list[int] = []
    function = registry.FUNCTIONS["cpu"].norm_backward

    def looking(*args: Any) -> Any:
        alive.append(sum(not ref.expired() for ref in refs))
        return function(*args)

    monkeypatch.setattr(registry.FUNCTIONS["cpu"], "norm_backward", looking)
    module, x = mlp(), torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), x)}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own and t.numel() >= TOKENS * HIDDEN:
            refs.append(torch_private.weak_storage(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), casting(scheme):
        y = module(x)
    y.float().sum().backward()
    assert refs and alive == [0]


@pytest.mark.parametrize("scheme", [*FP8, "none"])
def test_a_graph_that_is_kept_can_go_back_twice(scheme: str) -> None:
    module, x = mlp(), torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with casting(scheme):
        y = module(x).float().square().sum()
    first = torch.autograd.grad(y, [x, *module.parameters()], retain_graph=True)
    second = torch.autograd.grad(y, [x, *module.parameters()])
    assert scheme == "delayed" or all(map(torch.equal, first, second))  # whose gradients have another scale by then
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("scheme", [*FP8, "none"])
def test_no_grad_keeps_nothing(scheme: str) -> None:
    with torch.no_grad():
        assert kept_by(mlp(), scheme) == {}
