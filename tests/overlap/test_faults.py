"""Nothing locks up, nothing grows, and who is gone or different is named."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed.ranks import Ranks
from overlap.faults import (
    die_in_the_middle,
    different_tokens,
    group_that_ends,
    idle_expert,
    no_tokens,
    train_late,
    two_open_at_once,
)


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


def test_a_transport_ends_with_its_group(ranks: Ranks) -> None:
    """A restart in place makes new groups: the mailboxes of the old ones must not stay on the GPU."""
    for outlives, said in ranks.run(group_that_ends):
        assert not outlives and "process group has been destroyed" in said


def test_exchanges_that_are_open_at_once_do_not_mix(ranks: Ranks) -> None:
    assert ranks.run(two_open_at_once) == [[1.0, 11.0], [0.0, 10.0]]


@pytest.mark.parametrize("method", ["bulk", "ring", "pipeline"])
def test_layers_without_tokens(ranks: Ranks, method: str) -> None:
    for shapes in ranks.run(no_tokens, method):
        assert shapes == [(0, 16), (0, 32), (0, 32), (0, 16)]


@pytest.mark.parametrize("kind", ["grouped column", "grouped row"])
@pytest.mark.parametrize("method", ["bulk", "ring", "pipeline"])
def test_an_expert_without_tokens(ranks: Ranks, method: str, kind: str) -> None:
    for name in ("none", "block"):
        assert ranks.run(idle_expert, kind, method, name) == [[], []]
