"""Random bits that are a function of (seed, tensor, step, element): for stochastic rounding that repeats itself.

Integer arithmetic on 32 bits only, so a CPU, a GPU and every mesh draw the same: the element is counted in the whole tensor, whoever holds
it. The Triton twins are in `adam_triton.py`. (torch has no unsigned 32-bit arithmetic: here the words travel in int64, masked.)

>>> key = step_key(seed=0, number=3, step=torch.tensor(7.0))
>>> random_bits(torch.arange(2), key, stream=0)
tensor([3084809737, 1640094403])
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: multiples of it are spread evenly


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the input moves about half of the output's bits."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def step_key(seed: int, number: int, step: Tensor) -> Tensor:
    """The word of tensor `number` in step `step` (a float count, on any device), as int64 of no dimensions."""
    first = (seed + GOLDEN * number) & MASK
    return mix(mix(torch.full_like(step, first, dtype=torch.int64)) ^ step.to(torch.int64))


def random_bits(index: Tensor, key: Tensor, stream: int) -> Tensor:
    """32 bits for each element of `index` (int64, counted in the whole tensor), as int64. stream: what they are for."""
    key = (key + GOLDEN * (stream + 1)) & MASK
    return mix((index & MASK) ^ mix((index >> 32) ^ key))


def round_to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """float32 `x` as one of its two bf16 neighbours, the nearer one more often: right on average. bits: of `random_bits`.

    The low 16 bits of the float are how far it lies above the lower neighbour: they carry if a random number is at least the distance to
    the upper one. A value that bf16 holds stays.
    """
    raised = (x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)) & -0x10000
    return torch.where(x.isfinite(), raised.view(torch.float32), x).to(torch.bfloat16)
