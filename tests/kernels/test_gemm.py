"""`ottava::scaled_mm` and `ottava::mm` against float64 on the dequantized operands, and the order of sums."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import ottava  # noqa: F401
from ottava.kernels import gemm
from ottava.kernels.cast import Buffers
from ottava.notices import warn_once
from quant_cases import same

ops = torch.ops.ottava
# The pairs of schemes that meet in the three products of a linear layer: (input, weight), (grad, weight), (grad, input).
PAIRS = [
    ("e4m3:tensor", "e4m3:tensor"),
    ("e5m2:tensor", "e4m3:tensor"),
    ("e4m3:1x128:pow2", "e4m3:128x128:pow2"),
    ("e4m3:128x128:pow2", "e4m3:1x128:pow2"),
    ("e5m2:1x128", "e4m3:1x128"),
    ("e4m3:1x32", "e4m3:1x32"),
    ("e5m2:1x32", "e4m3:1x32"),
    ("e2m1:1x16", "e2m1:16x16"),
    ("e2m1:1x16", "e2m1:1x16"),
]


def operand(x: Tensor, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    q = Buffers(*ops.quantize(x, scheme, None, None, True, False))
    return q.rowwise_data, q.rowwise_scale_inv, q.rowwise_amax


def product(
    a: tuple, b: tuple, pair: tuple[str, str], bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    return ops.scaled_mm(*a, *b, *pair, bias, dtype, True)


@pytest.mark.parametrize("pair", PAIRS, ids="*".join)
@pytest.mark.parametrize("m,n,k", [(48, 80, 256), (16, 16, 16), (1, 32, 272), (129, 130, 384)])
def test_against_float64_of_the_dequantized_operands(pair: tuple[str, str], m: int, n: int, k: int) -> None:
    if pair[1] == "e2m1:16x16" and n % 16:
        n = 144
    a, b = operand(torch.randn(m, k) * 3, pair[0]), operand(torch.randn(n, k), pair[1])
    a64, b64 = (ops.dequantize(*o, s, torch.float32).double() for o, s in zip((a, b), pair, strict=True))
    got, want = product(a, b, pair), a64 @ b64.t()
    # k float32 additions, each off by half an ulp of a partial sum that is at most the sum of magnitudes.
    bound = (a64.abs() @ b64.abs().t()) * (k + 4) * 2.0**-24
    assert ((got.double() - want).abs() <= bound).all()


def test_scales_that_are_powers_of_two_round_nothing() -> None:
    """Integers up to 15 are exact in e4m3 and so are their sums in float32."""
    pair = ("e4m3:tensor", "e4m3:tensor")
    a, b = torch.randint(-15, 16, (16, 64)).float(), torch.randint(-15, 16, (32, 64)).float()
    a8, b8 = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (a, b))
    sa, sb, empty = torch.tensor([0.25]), torch.tensor([0.5]), torch.empty(0)
    assert torch.equal(product((a8, sa, empty), (b8, sb, empty), pair), (a @ b.t()) * (sa * sb))


@pytest.mark.strict
@pytest.mark.parametrize("pair", [p for p in PAIRS if "128" in p[0]], ids="*".join)
def test_block_product_adds_slices_of_128(pair: tuple[str, str]) -> None:
    """For each slice of k: a float32 product, times the product of both scales. Slices are added by halves, [Note: sums by halves]."""
    m, n, k = 40, 144, 400  # the last slice is 16 wide
    a, b = operand(torch.randn(m, k), pair[0]), operand(torch.randn(n, k), pair[1])
    formats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    a32, b32 = (o[0].view(formats[s[:4]]).float() for o, s in zip((a, b), pair, strict=True))

    def rows(scale: Tensor, scheme: str, count: int) -> Tensor:
        return scale if ":1x128" in scheme else scale.repeat_interleave(128, 0)[:count]

    sa, sb = rows(a[1], pair[0], m), rows(b[1], pair[1], n)
    torch.set_num_threads(1)
    scaled = []
    for j in range(4):
        product_of_slice = torch.zeros(m, n)
        for start in range(128 * j, min(128 * (j + 1), k), 64):
            part = slice(start, start + 64)
            product_of_slice = product_of_slice + a32[:, part] @ b32[:, part].t()
        scaled.append(product_of_slice * (sa[:, j][:, None] * sb[:, j][None]))
    assert same(product(a, b, pair), (scaled[0] + scaled[1]) + (scaled[2] + scaled[3]))


def test_order_of_slices_shows_in_the_bits() -> None:
    """A guard for the test above: adding the slices backwards gives other bits, so it can tell."""
    pair = ("e4m3:1x128:pow2", "e4m3:128x128:pow2")
    x, w = torch.randn(64, 1024), torch.randn(128, 1024)
    turned = torch.arange(1023, -1, -1)
    forward = product(operand(x, pair[0]), operand(w, pair[1]), pair)
    backward = product(operand(x[:, turned].contiguous(), pair[0]), operand(w[:, turned].contiguous(), pair[1]), pair)
    assert not torch.equal(forward, backward)
    torch.testing.assert_close(forward, backward, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_is_added_in_float32_before_rounding(dtype: torch.dtype) -> None:
    for pair in PAIRS:
        a, b = operand(torch.randn(16, 64), pair[0]), operand(torch.randn(32, 64), pair[1])
        bias = torch.randn(32, dtype=dtype)
        assert torch.equal(product(a, b, pair, bias, dtype), (product(a, b, pair) + bias.float()).to(dtype))


@pytest.mark.parametrize("pair", PAIRS, ids="*".join)
def test_empty_products(pair: tuple[str, str]) -> None:
    w = operand(torch.randn(32, 64), pair[1])
    assert product(operand(torch.randn(0, 64), pair[0]), w, pair).shape == (0, 32)
    if not pair[0].startswith("e2m1"):
        nothing = product(operand(torch.empty(16, 0), pair[0]), operand(torch.empty(32, 0), pair[1]), pair)
        assert nothing.shape == (16, 32) and not nothing.any()


@pytest.mark.parametrize("pair", PAIRS, ids="*".join)
def test_opcheck(pair: tuple[str, str]) -> None:
    a, b = operand(torch.randn(16, 64), pair[0]), operand(torch.randn(32, 64), pair[1])
    torch.library.opcheck(ops.scaled_mm.default, (*a, *b, *pair, torch.randn(32), torch.bfloat16, True))
    torch.library.opcheck(ops.scaled_mm.default, (*a, *b, *pair, None, torch.float32, False))


def test_unquantized_product_accumulates_in_float32_and_rounds_once() -> None:
    a, b = torch.randn(33, 100).bfloat16(), torch.randn(17, 100).bfloat16()
    bias = torch.randn(17).bfloat16()
    want = a.double() @ b.double().t() + bias.double()
    torch.testing.assert_close(ops.mm(a, b, bias, torch.float32).double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(ops.mm(a, b, bias, torch.bfloat16), ops.mm(a, b, bias, torch.float32).bfloat16())
    assert ops.mm(a[:0], b, None, torch.bfloat16).shape == (0, 17)
    torch.library.opcheck(ops.mm.default, (a, b, bias, torch.float32))


def test_nan_spoils_its_row_and_no_other() -> None:
    for pair in PAIRS[:7]:
        x = torch.randn(16, 64)
        x[3, 5] = float("nan")
        got = product(operand(x, pair[0]), operand(torch.randn(32, 64), pair[1]), pair)
        assert got[3].isnan().all() and got.isnan().sum() == 32


def test_a_cpu_says_once_for_all_recipes_that_it_emulates(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for scheme in ("e4m3:1x32", "e4m3:tensor", "e2m1:1x16"):
        for _ in range(2):
            product(operand(torch.randn(16, 64), scheme), operand(torch.randn(32, 64), scheme), (scheme, scheme))
    assert [(r.levelname, r.message) for r in caplog.records] == [("WARNING", gemm.CPU_NOTICE)]


def test_only_the_first_rank_of_many_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(gemm, "leads", lambda: False)
    scheme = "e4m3:tensor"
    product(operand(torch.randn(16, 64), scheme), operand(torch.randn(32, 64), scheme), (scheme, scheme))
    assert not caplog.records


def on_cuda(schemes: tuple[str, str], m: int = 16, n: int = 32, k: int = 128) -> None:
    """The function that CUDA tensors are dispatched to, with CPU tensors; what it hands to cuBLASLt raises `NotImplementedError`."""
    a, b = operand(torch.randn(m, k), schemes[0]), operand(torch.randn(n, k), schemes[1])
    gemm._pair_on.cache_clear()  # no real device changes its capability
    gemm._scaled_mm_cuda(*a, *b, *schemes, None, torch.float32, True)


def test_emulation_on_a_gpu_is_a_warning_that_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(gemm, "leads", lambda: False)  # the CPU's own notice is another test
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A100")
    blocks = ("e4m3:1x128:pow2", "e4m3:128x128:pow2")
    for capability, schemes, rows, why in (
        ((8, 0), ("e4m3:tensor", "e4m3:tensor"), 16, "native per-tensor FP8 products need compute capability 8.9"),
        ((9, 0), ("e4m3:1x32", "e4m3:1x32"), 16, "Ottava has no native MXFP8 product"),
        ((10, 0), ("e2m1:1x16", "e2m1:1x16"), 16, "Ottava has no native NVFP4 product"),
        ((10, 0), blocks, 16, "native 128-block FP8 products need compute capability 9.0, and no later one"),
        ((9, 0), blocks, 15, "wants rows of both operands in multiples of 8"),
    ):
        caplog.clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        for _ in range(2):
            on_cuda(schemes, m=rows)
        (record,) = caplog.records
        assert record.levelname == "WARNING" and re.search(
            f"products run by exact emulation on A100.*{why}", record.message
        )


def test_nothing_is_said_of_a_product_that_is_native(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    warn_once.cache_clear()
    monkeypatch.setattr(gemm, "leads", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    called = []
    monkeypatch.setattr(gemm, "_cublas_tensorwise", lambda *args: called.append("tensor"))
    monkeypatch.setattr(gemm, "_cublas_blockwise", lambda *args: called.append("block"))
    on_cuda(("e5m2:tensor", "e4m3:tensor"))
    on_cuda(("e4m3:1x128:pow2", "e4m3:128x128:pow2"))
    on_cuda(("e4m3:1x32", "e4m3:1x32"), m=0)  # nothing to multiply
    assert called == ["tensor", "block"] and not caplog.records
