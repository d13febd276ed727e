"""Ranks that several files share."""

from collections.abc import Iterator

import pytest

from distributed.ranks import Ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks, started once for all tests that ask for them."""
    with Ranks(4) as ranks:
        yield ranks
