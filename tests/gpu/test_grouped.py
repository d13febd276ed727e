"""Grouped products on a GPU: one launch for all groups, close to float64, for every pair of formats that training multiplies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import ottava
from ottava import recipe
from ottava.kernels import grouped_gemm, grouped_gemm_triton
from ottava.kernels.cast import Buffers

pytestmark = pytest.mark.gpu

SIZES = [([64, 0, 208, 17], 256, 384), ([128, 256], 640, 128), ([5, 3, 130], 208, 80), ([16], 128, 128)]
"""(tokens of each group, input features, output features)."""
PAIRS = [
    ("e4m3:tensor", "e4m3:tensor"),
    ("e5m2:tensor", "e4m3:tensor"),
    ("e5m2:tensor", "e5m2:tensor"),
    ("e4m3:1x128:pow2", "e4m3:128x128:pow2"),
    ("e4m3:1x128", "e4m3:1x128"),
    ("e5m2:1x128:pow2", "e4m3:128x128"),
    ("e5m2:1x128:pow2", "e4m3:1x128:pow2"),
]


@pytest.fixture(autouse=True)
def one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over groups on the GPU is not what these tests are about."""
    for name in ("mm", "scaled_mm"):
        original = getattr(grouped_gemm, name)

        def on_cpu_only(a: Tensor, *args: Any, original: Any = original) -> Tensor:
            assert not a.is_cuda, "went group by group"
            return original(a, *args)

        monkeypatch.setattr(grouped_gemm, name, on_cpu_only)


def operands(
    shapes: list[tuple[int, int]], scheme: str, columnwise: bool, seed: int
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """([data, scale_inv, amax] of each group, their values in float64)."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = [[], [], []]
    values = []
    for shape in shapes:
        x = torch.randn(shape, generator=generator) * (1 + torch.arange(shape[1]) % 7)
        q = Buffers(*torch.ops.ottava.quantize(x.bfloat16().cuda(), scheme, None, None, not columnwise, columnwise))
        one = (q[2], q[3], q[5]) if columnwise else (q[0], q[1], q[4])
        for part, tensor in zip(parts, one, strict=True):
            part.append(tensor)
        values.append(torch.ops.ottava.dequantize(*one, scheme, torch.float32).double())
    return parts, values


def check(out: Tensor, a: list[Tensor], b: list[Tensor], bias: list[Tensor], note: object) -> None:
    expected = torch.cat(
        [x @ y.t() + (bias[g].double() if bias else 0.0) for g, (x, y) in enumerate(zip(a, b, strict=True))]
    )
    assert out.shape == expected.shape
    error = float((out.double() - expected).norm() / expected.norm().clamp(min=1e-30))
    # The bars of `test_gemm_is_close_to_float64`.
    assert error < (3e-3 if out.dtype == torch.bfloat16 else 5e-4), (note, error)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS)
def test_fp8_groups_are_close_to_float64(pair: tuple[str, str], out_dtype: torch.dtype) -> None:
    for tokens, k, n in SIZES:
        for kind in ("tokens in groups", "contraction in groups"):
            if kind == "tokens in groups":
                a, exact_a = operands([(m, k) for m in tokens], pair[0], False, 1)
                b, exact_b = operands([(n, k)] * len(tokens), pair[1], False, 2)
            elif "128x128" in pair[1]:
                continue  # no recipe has both operands of a weight gradient in such blocks
            else:
                a, exact_a = operands([(m, n) for m in tokens], pair[0], True, 1)
                b, exact_b = operands([(m, k) for m in tokens], pair[1], True, 2)
            for bias in ([], [torch.randn(b[0][0].shape[0], device="cuda").bfloat16() for _ in tokens]):
                for split in (True, False):
                    out = torch.ops.ottava.grouped_scaled_mm(*a, *b, *pair, bias, out_dtype, split)
                    if split or "128" in pair[0]:
                        check(out, exact_a, exact_b, bias, (tokens, k, n, kind, bool(bias)))


@pytest.mark.parametrize("triton_alone", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unquantized_groups_are_close_to_float64(
    dtype: torch.dtype, triton_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton_alone:
        monkeypatch.setattr(grouped_gemm, "_GROUPED_MM", None)
    for tokens, k, n in SIZES:
        x, dy = (torch.randn(sum(tokens), width, device="cuda").to(dtype) for width in (k, n))
        weights = [torch.randn(n, k, device="cuda").to(dtype) for _ in tokens]
        products = {
            "fprop": (list(x.split(tokens)), weights),
            "dgrad": (list(dy.split(tokens)), [w.t() for w in weights]),
            "wgrad": ([p.t() for p in dy.split(tokens)], [p.t() for p in x.split(tokens)]),
        }
        for name, (a, b) in products.items():
            bias = [torch.randn(b[0].shape[0], device="cuda").to(dtype) for _ in tokens] if name == "fprop" else []
            for out_dtype in (dtype, torch.float32):
                for added in ([], bias) if bias else ([],):
                    out = torch.ops.ottava.grouped_mm(a, b, added, out_dtype)
                    wide = torch.bfloat16 if out_dtype != torch.float32 else torch.float32
                    check(out.to(wide), [t.double() for t in a], [t.double() for t in b], added, (name, tokens, k, n))


def test_torchs_grouped_product_and_the_triton_kernel_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = operands([(64, 256), (0, 256), (208, 256)], "e4m3:tensor", False, 1)
    b, _ = operands([(384, 256)] * 3, "e4m3:tensor", False, 2)
    arguments = (*a, *b, "e4m3:tensor", "e4m3:tensor", [], torch.bfloat16, True)
    by_torch = torch.ops.ottava.grouped_scaled_mm(*arguments)
    monkeypatch.setattr(grouped_gemm, "_SCALED_GROUPED_MM", None)
    by_triton = torch.ops.ottava.grouped_scaled_mm(*arguments)
    assert float((by_torch.float() - by_triton.float()).norm() / by_triton.float().norm()) < 3e-3


def test_operands_at_odd_addresses_are_not_read_as_they_lie() -> None:
    x = torch.zeros(64 * 33, dtype=torch.bfloat16, device="cuda")
    assert grouped_gemm_triton.fits(x[: 64 * 32].view(32, 64))
    assert not grouped_gemm_triton.fits(x[1 : 1 + 64 * 32].view(32, 64))
    assert not grouped_gemm_triton.fits(x[: 32 * 33].view(32, 33))


RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_layer_of_experts_is_close_to_itself_on_the_cpu(name: str) -> None:
    splits = [48, 0, 144, 16]
    torch.manual_seed(0)
    on_cpu = ottava.GroupedLinear(4, 256, 128, bias=True, params_dtype=torch.bfloat16, device="cpu")
    on_gpu = copy.deepcopy(on_cpu).cuda()
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(sum(splits), n, generator=generator).bfloat16() for n in (256, 128))
        found = []
        for module, device in ((on_cpu, "cpu"), (on_gpu, "cuda")):
            module.zero_grad()
            inp = x.detach().clone().to(device).requires_grad_()
            with ottava.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
                y = module(inp, splits)
            y.backward(dy.to(device))
            found.append([y, inp.grad, *(p.grad for p in module.parameters())])
        for one, other in zip(*found, strict=True):
            assert one is not None and other is not None
            error = (one.double() - other.cpu().double()).norm() / one.double().norm().clamp(min=1e-30)
            assert error < 1e-2, (step, float(error))  # bf16 results, each rounded once, of equal bytes
