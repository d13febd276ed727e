"""Bytes of many weights at once, and transposed bytes: the same as the CPU reference, wherever a part begins in its matrix."""

from __future__ import annotations

import pytest
import torch

import ottava
from ottava import recipe
from ottava.kernels import many
from ottava.quant.scheme import Scheme

pytestmark = pytest.mark.gpu
ops = torch.ops.ottava
SHAPES = [(128, 256), (48, 64), (300, 160), (7, 32), (4096, 14336), (1000, 4096), (1, 16)]
OFFSETS = [0, 0, 128, 0, 64, 32, 5, 16, 0, 128, 896, 0, 127, 112]


def values(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made[1][3, 5], made[2][4, 4], made[3][0] = float("nan"), float("inf"), 0.0
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [[], [128, 128], [1, 128]])
@pytest.mark.parametrize("scheme", ["e4m3:tensor", "e5m2:tensor"])
def test_amax_and_bytes_are_those_of_the_reference(dtype: torch.dtype, blocks: list[int], scheme: str) -> None:
    on_cpu = values(dtype)
    on_gpu = [x.cuda() for x in on_cpu]
    expected = ops.amax_many(on_cpu, blocks, OFFSETS)
    assert torch.equal(ops.amax_many(on_gpu, blocks, OFFSETS).cpu(), expected)
    shapes = many.amax_shapes(on_cpu, blocks, OFFSETS)
    factors = [torch.rand(shape, generator=torch.Generator().manual_seed(i)) * 3 for i, shape in enumerate(shapes)]
    out = [torch.zeros(shape, dtype=torch.uint8) for shape in SHAPES]
    found = [x.cuda() for x in out]
    ops.encode_many_(out, on_cpu, factors, scheme, blocks, OFFSETS)
    ops.encode_many_(found, on_gpu, [f.cuda() for f in factors], scheme, blocks, OFFSETS)
    for i, (a, b) in enumerate(zip(out, found, strict=True)):
        assert torch.equal(a, b.cpu()), SHAPES[i]


@pytest.mark.parametrize("shape", [(4, 4), (128, 128), (260, 132), (4096, 14336), (6, 8), (5, 7), (1024, 516)])
def test_transposed_bytes(shape: tuple[int, int]) -> None:
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    assert torch.equal(ops.transpose(data, "e4m3:tensor"), data.t())
    assert torch.equal(ops.transpose(data[1:], "e4m3:tensor"), data[1:].t())


@pytest.mark.parametrize(
    "chosen", [recipe.Float8CurrentScaling(), recipe.Float8BlockScaling(), recipe.DelayedScaling()]
)
def test_a_stored_weight_is_written_in_few_launches(chosen: recipe.Recipe) -> None:
    """By the optimizer, and to the bytes that a quantizer gives."""
    with ottava.quantized_model_init(recipe=chosen):
        layers = [ottava.Linear(512, 384, bias=False, params_dtype=torch.bfloat16) for _ in range(8)]
    weights = [layer.weight for layer in layers]
    masters = [torch.randn(384, 512, device="cuda") for _ in weights]
    type(weights[0]).requantize_together_(weights, masters)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        type(weights[0]).requantize_together_(weights, masters)
    on_gpu = [event for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    launches = sum(event.count for event in on_gpu)
    assert launches <= 40, launches  # not one a weight and step of the arithmetic
    scheme = Scheme.of(chosen, "weight")
    for weight, master in zip(weights, masters, strict=True):
        expected = ops.quantize(master, str(scheme), None, None, True, False)
        if not isinstance(chosen, recipe.DelayedScaling):
            assert torch.equal(weight.rowwise_data, expected[0])
