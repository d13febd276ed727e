"""Nothing locks up, nothing grows, and who is gone or different is named."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.ranks import Ranks
from overlap.faults import die_in_the_middle, different_tokens, train_late


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def test_ranks_that_dawdle_neither_lock_each_other_nor_grow(ranks: Ranks) -> None:
    """500 steps of every method, with random delays around every message of each rank."""
    for found in ranks.run(train_late, 500, 0.002, timeout=300):
        assert found["steps"] == 500
        assert found["tensors late"] <= found["tensors early"] + 8, found
        assert found["late"] - found["early"] < 8.0, found


@pytest.mark.parametrize("method", ["ring", "pipeline"])
def test_ranks_with_different_numbers_of_tokens_are_refused_by_name(ranks: Ranks, method: str) -> None:
    for rank, said in enumerate(ranks.run(different_tokens, method)):
        assert f"rank {1 - rank} sends" in said and "different numbers of tokens" in said and "pad" in said, said


@pytest.mark.parametrize("method", ["ring", "pipeline"])
def test_a_killed_rank_ends_the_others_with_its_name(method: str, tmp_path: Path) -> None:
    size, victim, timeout_s = 4, 1, 30.0
    context = multiprocessing.get_context("forkserver")
    pipes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        args = (theirs, rank, size, str(tmp_path / "store"), method, victim, timeout_s)
        context.Process(target=die_in_the_middle, args=args, daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for rank, pipe in enumerate(pipes):
        if rank == victim:
            continue
        assert pipe.poll(120), f"rank {rank} hangs"
        said, seconds = pipe.recv()
        assert seconds < timeout_s, (rank, seconds, said)
        assert said.startswith("RankLost") and f"rank {victim} was lost" in said, (rank, said)
