"""Communication that nothing hides is said once, with its cause: a slow rank, slow links, or an order of work that can be changed."""

from __future__ import annotations

from typing import Any

import pytest

from ottava.detect import ExposedCommunication, Fabric, Setup
from ottava.detect.exposed import changes, explain, slow_rank
from ottava.detect.fabric import nvlink_rate, should_carry

SOUND = Fabric((40e9, 41e9, 39e9, 40e9), 50e9)


def test_it_is_said_once_and_only_if_it_lasts() -> None:
    watch = ExposedCommunication(window=4, warmup=2)
    told = [watch.see(1.0, exposed) for exposed in (0.9, 0.9, 0.1, 0.9, 0.1, 0.1, 0.1, 0.5, 0.5, 0.5, 0.5)]
    assert told == [None] * 8 + [0.3, None, None]  # the first two are warming up; one slow step is none


def test_a_share_below_the_threshold_is_nothing_to_say() -> None:
    watch = ExposedCommunication(window=4, warmup=0)
    assert [watch.see(1.0, 0.2) for _ in range(10)] == [None] * 10


def test_with_sound_links_it_says_what_to_change() -> None:
    found = explain(0.41, 2.0, Setup(dp_shard=8, prefetch=0), SOUND, variables={})
    assert found.mode == "no overlap"
    assert (
        "41% of a step (0.82 of 2 s) is communication that nothing hides, and the links are sound (40 GB/s a rank)"
        in found.message
    )
    assert "parallel.prefetch = 1" in found.message
    host = explain(0.41, 2.0, Setup(dp_shard=8, prefetch=0, device="cpu"), SOUND, variables={}).message
    assert "prefetch" not in host and "reshard_after_forward = false" in host and "A CPU has no streams" in host


@pytest.mark.parametrize(
    "fabric, said",
    [
        (Fabric((40e9, 41e9, 3e9, 40e9)), "rank 2 gathers at 3 GB/s, others at 40"),
        (Fabric((4e9,) * 4, should=50e9), "ranks gather at 4 GB/s, and these links carry 50"),
    ],
)
def test_slow_links_are_no_matter_of_overlap(fabric: Fabric, said: str) -> None:
    found = explain(0.5, 1.0, Setup(dp_shard=4), fabric)
    assert found.mode is None and said in found.message and "`ottava doctor` names the link" in found.message


def test_a_slow_rank_is_named_before_anything_else() -> None:
    found = explain(0.5, 1.0, Setup(dp_shard=4), Fabric((1e9, 9e9, 9e9)), straggler=(2, 1.6))
    assert found.mode is None and "wait for rank 2, whose own work takes 1.6 times as long" in found.message
    assert slow_rank([1.0, 1.02, 1.6, 0.99]) == (2, 1.6)
    assert slow_rank([1.0, 1.1, 1.05, 1.0]) is None
    assert slow_rank([1.0, 1.4], "cpu") is None and slow_rank([1.6, 1.0], "cpu") == (0, 1.6)
    assert slow_rank([0.0, 0.0]) is None


@pytest.mark.parametrize(
    "setup, variables, said",
    [
        ({"dp_shard": 8, "prefetch": 1}, {}, "parallel.prefetch = 2"),
        ({"dp_shard": 8, "prefetch": 4}, {}, "parallel.reshard_after_forward = false"),
        ({"dp_shard": 8, "prefetch": 4, "micro_batches": 4}, {}, "a larger train.micro_batch"),
        ({"dp_shard": 16, "beyond_island": True}, {}, "HSDP"),
        ({"tp": 8}, {}, 'parallel.overlap = "auto" with parallel.sequence_parallel = true'),
        ({"tp": 8, "sequence_parallel": True}, {}, 'parallel.overlap = "auto", so that'),
        ({"dp_shard": 8}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "unset CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"dp_shard": 8}, {"CUDA_LAUNCH_BLOCKING": "1"}, "unset CUDA_LAUNCH_BLOCKING=1"),
        ({"dp_shard": 8, "moved": 80e9}, {}, "the links need 2 s for what a step moves and it computes for 0.5 s"),
        ({"dp_replicate": 8}, {}, "more to compute for the same bytes"),
    ],
)
def test_the_likeliest_change_comes_first(setup: dict[str, Any], variables: dict[str, str], said: str) -> None:
    assert said in changes(Setup(**setup), 0.5, 1.0, SOUND, variables)[0]


def test_what_links_should_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = "".join(
        f"GPU {n}: NVIDIA H200 (UUID: x)\n" + "".join(f"\t Link {k}: 26.562 GB/s\n" for k in range(18))
        for n in range(8)
    )
    assert nvlink_rate(eight) == pytest.approx(478.116e9)
    assert nvlink_rate("GPU 0: NVIDIA H200\n\t Link 0: <inactive>\n") is None and nvlink_rate("") is None
    monkeypatch.setattr("ottava.detect.fabric.run_command", lambda words: eight)
    assert should_carry(range(8), 8) == pytest.approx(478.116e9)
    from ottava.detect.cards import Card

    cards = [Card(f"mlx5_{n}", 1, True, 400.0) for n in range(8)] + [Card("mlx5_8", 1, True, 100.0)]
    monkeypatch.setattr("ottava.detect.fabric.read_cards", lambda: cards)
    assert should_carry(range(16), 8) == pytest.approx(50e9)
    monkeypatch.setattr("ottava.detect.fabric.read_cards", list)
    assert should_carry(range(16), 8) is None
