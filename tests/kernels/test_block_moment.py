"""Moments in 8 bits: blocks of 128, signed values and square roots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ottava.kernels.block_moment import decode, encode, scale_shape, scales_at
from ottava.kernels.random_bits import random_bits, step_key

SHAPES = [(1, 1), (3, 5), (2, 128), (5, 300), (2, 3, 130), (0, 4)]


def values(shape: tuple[int, ...], root: bool) -> Tensor:
    """Numbers of very different sizes in every block."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-5, 1, shape, generator=generator).float()
    x = torch.randn(shape, generator=generator) * 10**exponents
    return x.square() if root else x


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_largest_of_a_block_is_exact_and_others_are_near(shape: tuple[int, ...], root: bool) -> None:
    x = values(shape, root)
    stored, scale_inv = encode(x, root)
    assert stored.shape == x.shape and stored.dtype == torch.uint8 and scale_inv.shape == scale_shape(shape)
    got = decode(stored, scale_inv, root)
    if not x.numel():
        return
    # Half a step of 3 (4) mantissa bits; roots double it. Below the smallest normal number steps are equal.
    relative = 2.0**-4 if not root else 2.0**-4 * 1.05
    blocks = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128)).amax(-1)
    floor = blocks.repeat_interleave(128, -1)[..., : x.shape[-1]] * (2.0**-18 if not root else 2.0**-30)
    assert ((got - x).abs() <= x.abs() * relative + floor).all()
    top = got.abs().amax(-1) / x.abs().amax(-1)
    assert (top - 1).abs().max() < 1e-6


def test_a_block_does_not_see_its_neighbours() -> None:
    x = torch.cat([torch.randn(2, 128) * 1e6, torch.randn(2, 128)], dim=1)
    alone = encode(x[:, 128:].contiguous(), False)
    together = encode(x, False)
    assert torch.equal(together[0][:, 128:], alone[0]) and torch.equal(together[1][:, 1:], alone[1])


def test_scales_have_a_place_where_no_block_is_cut() -> None:
    assert scales_at(((4, 256), (4, 256)), (8, 512), (4, 2)) == (4, 2)
    assert scales_at(((0, 256), (8, 44)), (8, 300), (8, 1)) == (0, 2)  # the last block is short in the whole, too
    assert scales_at(((0, 0), (8, 44)), (8, 300), (8, 1)) is None
    assert scales_at(((0, 64), (8, 128)), (8, 512), (8, 1)) is None
    assert scales_at(((0, 0), (8, 128)), (8, 512), (8, 2)) is None


def test_a_positive_root_never_becomes_zero_and_zero_stays() -> None:
    x = torch.tensor([[1.0, 1e-30, 0.0]])
    got = decode(*encode(x, True), True)
    assert got[0, 1] > 0 and got[0, 2] == 0
    assert torch.equal(decode(*encode(torch.zeros(2, 200), True), True), torch.zeros(2, 200))


@pytest.mark.parametrize("root", [False, True])
def test_nan_stays_where_it_is(root: bool) -> None:
    x = torch.tensor([[1.0, float("nan"), 0.25]])
    torch.testing.assert_close(decode(*encode(x, root), root), x, equal_nan=True, rtol=0.07, atol=0.0)


def test_every_code_of_a_root_comes_back() -> None:
    codes = torch.arange(255, dtype=torch.uint8)[None, 127:255]  # one block with the largest code in it
    exact = decode(codes, torch.ones(1, 1), True)
    assert torch.equal(encode(exact, True)[0], codes)


@pytest.mark.parametrize("root", [False, True])
def test_stochastic_rounding_is_right_on_average(root: bool) -> None:
    x = values((4, 128), root)
    index, mean = torch.arange(x.numel()).view(x.shape), torch.zeros(x.shape, dtype=torch.float64)
    for step in range(500):
        bits = random_bits(index, step_key(0, 0, torch.tensor(float(step))), 0)
        got = decode(*encode(x, root, bits), root)
        mean += (got.sqrt() if root else got).double() / 500
    exact = x.sqrt() if root else x
    large = exact.abs() > exact.abs().amax(-1, keepdim=True) * 1e-4
    error = ((mean - exact) / exact)[large]
    assert error.abs().max() < 0.02 and error.mean().abs() < 1e-3
