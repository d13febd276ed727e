"""Random bits that follow from (seed, tensor, step, element)."""

from __future__ import annotations

import torch

from ottava.kernels.random_bits import mix, random_bits, round_to_bfloat16, step_key


def words(seed: int = 0, number: int = 0, step: int = 0, stream: int = 0, count: int = 4096) -> torch.Tensor:
    return random_bits(torch.arange(count), step_key(seed, number, torch.tensor(float(step))), stream)


def test_bits_are_those_that_were_fixed() -> None:
    """Runs repeat themselves across versions and devices."""
    assert mix(torch.tensor([1, 0xFFFFFFFF])).tolist() == [1753845952, 1734902346]
    assert words(number=3, step=7, count=2).tolist() == [3084809737, 1640094403]


def test_every_bit_is_set_half_of_the_time_and_others_do_not_follow() -> None:
    found = [words(), words(seed=1), words(number=1), words(step=1), words(stream=1)]
    for word in found:
        share = torch.stack([(word >> bit & 1).double().mean() for bit in range(32)])
        assert (share - 0.5).abs().max() < 0.04
    for i, a in enumerate(found):
        for b in found[:i]:
            same = torch.stack([(~(a ^ b) >> bit & 1).double().mean() for bit in range(32)])
            assert (same - 0.5).abs().max() < 0.04


def test_elements_beyond_32_bits_have_bits_of_their_own() -> None:
    key = step_key(0, 0, torch.tensor(1.0))
    low = torch.arange(100)
    assert not torch.equal(random_bits(low, key, 0), random_bits(low + 2**32, key, 0))


def test_rounding_to_bfloat16_keeps_what_fits_and_is_right_on_average() -> None:
    exact = torch.tensor([1.0, -2.5, 0.0, float("inf"), float("nan"), 3.3895313892515355e38])
    kept = round_to_bfloat16(exact, torch.full((6,), 0xFFFF))
    torch.testing.assert_close(kept.float(), exact, equal_nan=True, rtol=0, atol=0)
    x = torch.full((20000,), 1.001)
    rounded = round_to_bfloat16(x, words(count=20000)).double()
    assert set(rounded.unique().tolist()) == {1.0, 1.0078125}
    assert abs(rounded.mean().item() - 1.001) < 1e-4
