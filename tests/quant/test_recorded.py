"""Quantized bytes and scales against TransformerEngine's and torchao's, all of them, through `ottava.quantize`.

tests/make_golden.py says what is in tests/data: inputs in full, and a digest of every recorded array.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import ottava
from make_golden import digest
from ottava import recipe
from ottava.recipe import Format, QParams
from quant_cases import same

DATA = Path(__file__).parents[1] / "data"
DIGESTS: dict[str, dict[str, str]] = json.loads((DATA / "quant.json").read_text())


@functools.cache
def recorded() -> dict[str, Tensor]:
    with safe_open(DATA / "quant.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def how(case: str) -> tuple[recipe.Recipe, str, float | None]:
    """(recipe, role, scale) that do what the recorded quantizer did. Gradients have e5m2 under Format.HYBRID."""
    _, *middle, quantizer = case.split("/")
    grad = middle == ["e5m2"]
    role = "grad" if grad else "input"
    float32_scales = quantizer.endswith("_fp32")
    block_format = Format.HYBRID if grad else Format.E4M3
    match quantizer.removesuffix("_fp32"):
        case "delayed_s1":
            return recipe.DelayedScaling(), role, 1.0
        case "delayed_s37":
            return recipe.DelayedScaling(), role, 37.5
        case "current":
            return recipe.Float8CurrentScaling(), role, None
        case "current_pow2":
            return recipe.Float8CurrentScaling(use_power_2_scales=True), role, None
        case "current_eps":
            q = QParams(amax_epsilon=0.5)
            return recipe.Float8CurrentScaling(fp8_quant_fwd_inp=q, fp8_quant_bwd_grad=q), role, None
        case "block1d":
            return recipe.Float8BlockScaling(use_f32_scales=float32_scales, fp8_format=block_format), role, None
        case "block2d" if not grad:
            return recipe.Float8BlockScaling(use_f32_scales=float32_scales), "weight", None
        case "block2d":
            square = {"w_block_scaling_dim": 1, "grad_block_scaling_dim": 2}
            return (
                recipe.Float8BlockScaling(use_f32_scales=float32_scales, fp8_format=block_format, **square),
                role,
                None,
            )
        case "mxfp8":
            return recipe.MXFP8BlockScaling(fp8_format=block_format), role, None
        case "nvfp4" | "nvfp4_te":
            return recipe.NVFP4BlockScaling(disable_rht=True), role, None
    raise AssertionError(quantizer)


def quantized(case: str) -> ottava.QuantizedTensor:
    chosen, role, scale = how(case)
    return ottava.quantize(recorded()[f"{case.split('/')[0]}/x"], chosen, role=role, scale=scale)


def tensor_scale(q: ottava.QuantizedTensor) -> Tensor:
    """NVFP4's second level: torchao records it, TransformerEngine records the amax it is made of."""
    return q.rowwise_amax / torch.full_like(q.rowwise_amax, 448.0 * 6.0)


@pytest.mark.strict
@pytest.mark.parametrize("case", [c for c in DIGESTS if c != "allzero/nvfp4"])
def test_every_recorded_array_is_equal(case: str) -> None:
    q = quantized(case)
    for name, want in DIGESTS[case].items():
        got = tensor_scale(q) if name == "tensor_scale" else getattr(q, "rowwise_amax" if name == "amax" else name)
        assert digest(got) == want, f"{case}/{name} differs from the recording"


def test_there_are_as_many_recordings_as_were_made() -> None:
    """A digest that gets lost would pass unnoticed."""
    count = {
        kind: sum(kind in case.split("/") for case in DIGESTS)
        for kind in ("e4m3", "e5m2", "mxfp8", "nvfp4", "nvfp4_te")
    }
    assert count == {"e4m3": 68 + 7, "e5m2": 54 + 7, "mxfp8": 14, "nvfp4": 7, "nvfp4_te": 2}
    assert sum(len(case) for case in DIGESTS.values()) == 424


@pytest.mark.strict
def test_the_arrays_kept_in_full_are_equal() -> None:
    """The same comparison with the values at hand: shows which bytes differ, where a digest only says that some do."""
    kept = [key for key in recorded() if not key.endswith("/x")]
    assert len(kept) == 4 + 2 + 3
    for key in kept:
        case, name = key.rsplit("/", 1)
        q = quantized(case)
        got = tensor_scale(q) if name == "tensor_scale" else getattr(q, "rowwise_amax" if name == "amax" else name)
        assert same(got, recorded()[key]), f"{key}: {int((got != recorded()[key]).sum())} elements differ"


def test_nvfp4_of_zeros_is_zero() -> None:
    """The one departure from the recording: torchao divides by a tensor scale of 0 and gets NaN block scales and codes of 6.

    An all-zero tensor is ordinary (a fresh bias gradient, a padded batch) and must stay zero.
    """
    q = quantized("allzero/nvfp4")
    assert digest(q.rowwise_scale_inv) != DIGESTS["allzero/nvfp4"]["rowwise_scale_inv"]
    assert not q.dequantize().any() and q.nan_count() == 0


@pytest.mark.strict
@pytest.mark.parametrize("case", [c for c in DIGESTS if "columnwise_data" not in DIGESTS[c] and "nvfp4" not in c])
def test_unrecorded_columnwise_copies_are_transposes(case: str) -> None:
    """Per-tensor and 128x128: the recording holds the row copy only, because the other is its transpose."""
    q = quantized(case)
    assert torch.equal(q.columnwise_data, q.rowwise_data.t())
    want = q.rowwise_scale_inv if q.rowwise_scale_inv.dim() == 1 else q.rowwise_scale_inv.t()
    assert torch.equal(q.columnwise_scale_inv, want)


@pytest.mark.parametrize("case", list(DIGESTS))
def test_shapes_are_those_of_the_interface(case: str) -> None:
    q = quantized(case)
    m, k = q.shape

    def scale_shape(rows: int, columns: int) -> tuple[int, ...]:
        block = q.scheme.block
        return (1,) if block is None else (-(-rows // block[0]), -(-columns // block[1]))

    packed = 2 if "nvfp4" in case else 1
    assert q.rowwise_data.shape == (m, k // packed) and q.rowwise_data.dtype == torch.uint8
    assert q.columnwise_data.shape == (k, m // packed) and q.columnwise_data.dtype == torch.uint8
    assert q.rowwise_scale_inv.shape == scale_shape(m, k)
    assert q.columnwise_scale_inv.shape == scale_shape(k, m)
    byte_scales = "mxfp8" in case or "nvfp4" in case
    assert q.rowwise_scale_inv.dtype == q.columnwise_scale_inv.dtype == (torch.uint8 if byte_scales else torch.float32)
