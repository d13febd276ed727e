"""How near a run comes to its device: model FLOPs, the device's peak, and MFU.

MFU is the shortest possible time over the time taken. With products in two precisions the shortest time of a token is

    F_quantized / P_quantized + F_plain / P_plain

F from the model (`FlopsPerToken`: 6 N and attention, nothing that is recomputed), P the peak of the device for dense products.
The layers' products are quantized, the head's by choice, attention's are not. `mfu` counts the half of attention that a causal mask
leaves, `mfu_full` the whole square, as many papers do. A device that is not in the table has no MFU rather than a wrong one.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from ottava.exchange import travels
from ottava.models import FlopsPerToken
from ottava.quant.quantization import Quantization
from ottava.recipe import Recipe

# Vendors' figures for dense products in TFLOP/s, first match wins. Names as torch.cuda.get_device_name gives them.
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bGH200\b", {"bf16": 989, "fp8": 1979}),
    (r"\bH[12]00 NVL\b", {"bf16": 835, "fp8": 1671}),
    (r"\bH100 PCIe\b", {"bf16": 756, "fp8": 1513}),
    (r"\bH200\b", {"bf16": 989, "fp8": 1979}),
    (r"\bH[18]00\b", {"bf16": 989, "fp8": 1979}),
    (r"\bB200\b", {"bf16": 2250, "fp8": 4500, "fp4": 9000}),
    (r"\bA[18]00\b", {"bf16": 312}),
    (r"\bL40S\b", {"bf16": 362, "fp8": 733}),
    (r"\bL4\b", {"bf16": 121, "fp8": 242}),
)


@travels
@dataclass(frozen=True)
class Peak:
    """What a device can do, in TFLOP/s by precision ("bf16", "fp8", "fp4", "float32"), and where that is known from.

    >>> device_peak("NVIDIA H200").tflops["fp8"]
    1979
    """

    tflops: dict[str, float]
    source: str


def device_peak(name: str) -> Peak | None:
    """The peak of a device by its name; None if it is not known.

    >>> device_peak("AMD EPYC") is None
    True
    """
    if " MIG " in name:  # a slice of a GPU: nobody says how much of it
        return None
    for pattern, tflops in PEAKS:
        if re.search(pattern, name):
            return Peak(tflops, name)
    return None


def quantized_precision(recipe: Recipe | None) -> str | None:
    """The precision in which a recipe's products run on a device that has it."""
    return None if recipe is None else Quantization.of(recipe).precision


@dataclass(frozen=True)
class Bound:
    """The shortest time a token can take on a device: what MFU is measured against.

    >>> bound = Bound(device_peak("NVIDIA H200"), plain="bf16", quantized="fp8")
    >>> flops = FlopsPerToken(layers=1.979e12, head=0.0, attention=0.0)
    >>> bound.mfu(flops, tokens_per_s_per_gpu=400.0)  # of 1,000 possible
    0.4
    """

    peak: Peak | None
    plain: str
    quantized: str | None = None
    plain_share: float = 0.0
    """Of the layers: those that are not quantized."""
    quantized_head: bool = False

    def seconds_per_token(self, flops: FlopsPerToken, causal: bool = True) -> float | None:
        """At the peak; None if that is not known."""
        layers, plain = self.quantized or self.plain, self.plain
        if self.peak is None or layers not in self.peak.tflops or plain not in self.peak.tflops:
            return None
        attention = flops.attention / 2 if causal else flops.attention
        kept = self.plain_share * flops.layers + attention
        fast = (1 - self.plain_share) * flops.layers
        if self.quantized_head:
            fast += flops.head
        else:
            kept += flops.head
        return (fast / self.peak.tflops[layers] + kept / self.peak.tflops[plain]) * 1e-12

    def mfu(self, flops: FlopsPerToken, tokens_per_s_per_gpu: float, causal: bool = True) -> float | None:
        """Share of the peak that is reached."""
        shortest = self.seconds_per_token(flops, causal)
        return None if shortest is None else shortest * tokens_per_s_per_gpu

    def basis(self) -> str:
        """What MFU means here, in words: goes with every number."""
        layers = self.quantized or self.plain
        if self.peak is None or layers not in self.peak.tflops or self.plain not in self.peak.tflops:
            known = "not known" if self.peak is None else f"not known in {layers} and {self.plain}"
            return f"none: the peak of this device is {known}; --metrics.measure-peak measures it"
        figures = {layers: self.peak.tflops[layers], self.plain: self.peak.tflops[self.plain]}
        peaks = " and ".join(f"{name} {value:g}" for name, value in figures.items())
        share, rest = "layers", "attention" if self.quantized_head else "head and attention"
        if self.plain_share:
            share, rest = f"{1 - self.plain_share:.0%} of the layers", f"the others, {rest}"
        share += " and head" if self.quantized_head else ""
        how = f"{share} in {layers}, {rest} in {self.plain}" if layers != self.plain else f"all in {layers}"
        return f"6N + causal attention, {how}; peak {peaks} TFLOP/s ({self.peak.source})"


def measure_peak(device: torch.device, plain: str, quantized: str | None, seconds: float = 1.0) -> Peak:
    """The best rate of a large product on this device: what software reaches, which is less than a vendor's figure.

    Quantized products on a device that has none are emulated in float32, and so is their peak.

        >>> measure_peak(torch.device("cpu"), plain="float32", quantized="fp8").tflops["fp8"] > 0
        True
    """
    size = 8192 if device.type == "cuda" else 1024
    rates = {plain: _rate_plain(device, plain, size, seconds)}
    if quantized is not None:
        rates[quantized] = _rate_quantized(device, quantized, size, seconds)
    return Peak(rates, f"measured with products of {size}x{size}x{size}")


def _rate_plain(device: torch.device, precision: str, size: int, seconds: float) -> float:
    dtype = {"bf16": torch.bfloat16, "float32": torch.float32}[precision]
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    return _best_rate(lambda: torch.mm(a, b), device, size, seconds)


def _rate_quantized(device: torch.device, precision: str, size: int, seconds: float) -> float:
    if device.type != "cuda":
        return _rate_plain(device, "float32", size, seconds)
    if precision != "fp8":
        raise ValueError(f"measure_peak can measure fp8 products on a GPU, not {precision}.")
    one = torch.ones(1, dtype=torch.float32, device=device)
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    tensorwise = torch.nn.functional.ScalingType.TensorWise

    def product() -> None:
        torch.nn.functional.scaled_mm(a, b.t(), one, tensorwise, one, tensorwise, output_dtype=torch.bfloat16)

    return _best_rate(product, device, size, seconds)


def _best_rate(product, device: torch.device, size: int, seconds: float) -> float:  # type: ignore[no-untyped-def]
    """TFLOP/s of the fastest run in about `seconds`."""
    product()  # the first call sets things up
    _wait(device)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:  # once at least, on however busy a machine
        start = time.perf_counter()
        product()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best * 1e-12


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
