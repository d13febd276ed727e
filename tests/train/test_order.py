"""The keyed permutation that decides the order of samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ottava.train.order import Permutation


@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_every_element_appears_once(size, seed):
    assert np.array_equal(np.sort(Permutation(size, (seed,))(np.arange(size))), np.arange(size))


def test_the_order_is_the_same_in_every_release():
    # A run that is resumed after an upgrade must not see a sample twice: these numbers may never change.
    assert Permutation(10, ("order", 1234, 0, 0))(range(10)).tolist() == [9, 2, 4, 6, 8, 1, 3, 0, 7, 5]
    assert Permutation(10**12, ("order", 7))([0, 1, 10**12 - 1]).tolist() == [954822089294, 850276887493, 163091577443]


def test_another_key_is_another_order():
    orders = {tuple(Permutation(50, ("order", seed))(range(50))) for seed in range(200)}
    assert len(orders) == 200


def test_places_are_even():
    # Where element 0 of 8 goes, and where element 1 goes given that, over many keys.
    pairs = np.array([Permutation(8, (k,))([0, 1]) for k in range(4000)])
    counts = np.bincount(pairs[:, 0] * 8 + pairs[:, 1], minlength=64).reshape(8, 8)
    assert np.all(np.diag(counts) == 0)
    off = counts[~np.eye(8, dtype=bool)]
    expected = 4000 / 56
    assert ((off - expected) ** 2 / expected).sum() < 93.2  # chi-square of 55 degrees of freedom: 1 in 1,000 is above


def test_neighbours_do_not_stay_neighbours():
    order = Permutation(100_000, ("order", 3))(np.arange(100_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02


def test_nothing_is_held_in_memory():
    assert Permutation(2**60, (1,))([2**60 - 1])[0] < 2**60


def test_what_is_outside_is_refused():
    with pytest.raises(ValueError, match="no element 10"):
        Permutation(10, (1,))([10])
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, (1,))
