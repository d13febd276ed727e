"""MFU: peaks by name, the blended bound, and no number where none is known."""

from __future__ import annotations

import pytest
import torch

from ottava import recipe
from ottava.models import FlopsPerToken, LlamaConfig
from ottava.train.flops import Bound, device_peak, measure_peak, quantized_precision

FLOPS = FlopsPerToken(layers=4e12, head=1e12, attention=2e12)


@pytest.mark.parametrize(
    "name, bf16, fp8",
    [
        ("NVIDIA H200", 989, 1979),
        ("NVIDIA H100 80GB HBM3", 989, 1979),
        ("NVIDIA H100 PCIe", 756, 1513),
        ("NVIDIA H100 NVL", 835, 1671),
        ("NVIDIA GH200 480GB", 989, 1979),
        ("NVIDIA A100-SXM4-80GB", 312, None),
        ("NVIDIA B200", 2250, 4500),
        ("NVIDIA L40S", 362, 733),
        ("NVIDIA L4", 121, 242),
    ],
)
def test_peaks_by_the_name_that_torch_gives(name, bf16, fp8):
    peak = device_peak(name)
    assert peak is not None and peak.tflops["bf16"] == bf16 and peak.tflops.get("fp8") == fp8


@pytest.mark.parametrize(
    "name", ["NVIDIA L40", "NVIDIA H300", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA B2000", "cpu", ""]
)
def test_an_unknown_device_has_no_mfu(name):
    bound = Bound(device_peak(name), "bf16", "fp8")
    assert bound.mfu(FLOPS, 100.0) is None
    assert bound.basis().startswith("none: the peak of this device is not known; --metrics.measure-peak")


def test_a_precision_that_the_device_does_not_have_has_no_mfu():
    bound = Bound(device_peak("NVIDIA A100-SXM4-80GB"), "bf16", "fp8")
    assert bound.mfu(FLOPS, 100.0) is None and "not known in fp8 and bf16" in bound.basis()
    assert Bound(device_peak("NVIDIA H200"), "float32").mfu(FLOPS, 1.0) is None


def test_the_bound_is_blended():
    bound = Bound(device_peak("NVIDIA H200"), "bf16", "fp8")
    # 4/1979 + (1 + 2/2)/989 seconds at the peak
    assert bound.seconds_per_token(FLOPS) == pytest.approx(4 / 1979 + 2 / 989)
    assert bound.seconds_per_token(FLOPS, causal=False) == pytest.approx(4 / 1979 + 3 / 989)
    assert bound.mfu(FLOPS, 100.0) == pytest.approx(100 * (4 / 1979 + 2 / 989))
    assert bound.basis() == (
        "6N + causal attention, layers in fp8, head and attention in bf16; peak fp8 1979 and bf16 989 TFLOP/s (NVIDIA H200)"
    )


def test_layers_that_stay_unquantized_count_as_such():
    bound = Bound(device_peak("NVIDIA H200"), "bf16", "fp8", plain_share=0.25)
    assert bound.seconds_per_token(FLOPS) == pytest.approx(3 / 1979 + 3 / 989)
    assert "75% of the layers in fp8, the others, head and attention in bf16" in bound.basis()


def test_without_quantization_it_is_the_ordinary_mfu():
    bound = Bound(device_peak("NVIDIA H200"), "bf16")
    assert bound.mfu(FLOPS, 50.0) == pytest.approx(FLOPS.causal * 50.0 / 989e12)
    assert "all in bf16; peak bf16 989" in bound.basis()


def test_llama_3_8b_on_an_h200_by_hand():
    # 6 x 7.50e9 multiplied weights (of which the head 0.53e9), 12 x 32 x 4096 x 8192 of attention
    flops = LlamaConfig().flops_per_token(8192)
    layers, head, attention = 6 * 32 * 218_103_808, 6 * 128256 * 4096, 12 * 32 * 4096 * 8192
    assert (flops.layers, flops.head, flops.attention) == (layers, head, attention)
    mfu = Bound(device_peak("NVIDIA H200"), "bf16").mfu(flops, 8000.0)
    assert mfu == pytest.approx(8000 * (layers + head + attention / 2) / 989e12)


def test_precision_of_recipes():
    assert quantized_precision(None) is None
    assert quantized_precision(recipe.DelayedScaling()) == "fp8"
    assert quantized_precision(recipe.NVFP4BlockScaling()) == "fp4"


@pytest.mark.parametrize("seconds", [0.0, 0.05], ids=["no time for a second product", "time"])
def test_a_peak_can_be_measured_on_a_cpu(seconds):
    peak = measure_peak(torch.device("cpu"), "float32", "fp8", seconds=seconds)
    assert set(peak.tflops) == {"float32", "fp8"} and all(0.001 < rate < 100 for rate in peak.tflops.values())
    bound = Bound(peak, "float32", "fp8")
    assert bound.mfu(FlopsPerToken(1e6, 1e5, 1e5), 10.0) is not None and "measured" in bound.basis()
