"""A real run's communication is watched: a slow rank is named, sums in bfloat16 are measured, and what nothing hides is said once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distributed.ranks import Ranks
from ottava.detect.fabric import gather_rate
from ottava.detect.reduction import LARGE, ReductionProbe
from ottava.train import loop
from ottava.train.communication import LOOKS, CommunicationWatch
from train import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def sums_in_bfloat16() -> list[Any]:
    """Rank 0 has gradients of 1, rank 1 of 1/512 (and a few of 3/512): bfloat16 rounds 1 + 1/512 to 1."""
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    exact = fully_shard(nn.Linear(8, 8, bias=False), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    probe = ReductionProbe.of(model)
    assert probe is not None and ReductionProbe.of(exact) is None
    size = 1.0 if dist.get_rank() == 0 else 1 / 512
    errors = [probe.error()]
    with probe.look():
        (model(torch.ones(1, 8)) * size).sum().backward()
    errors.append(probe.error())
    kept = model.weight.grad.to_local().clone()  # type: ignore[union-attr]
    model.zero_grad()
    (model(torch.ones(1, 8)) * size).sum().backward()
    same = torch.equal(kept, model.weight.grad.to_local())  # type: ignore[union-attr]
    return [*errors, same, gather_rate(dist.group.WORLD, torch.device("cpu"))]


def test_the_error_of_a_sum_in_bfloat16_is_measured(ranks: Ranks) -> None:
    for before, error, same, rate in ranks.run(sums_in_bfloat16):
        assert before is None and same and rate > 0
        assert error == pytest.approx((1 / 512) / (1 + 1 / 512))
    probe = ReductionProbe(nn.Linear(1, 1), torch.bfloat16, 64)
    assert probe.finding(LARGE / 2) is None
    found = probe.finding(0.013)
    assert found is not None and found.mode == "bf16 gradient sum"
    assert "gradients of 64 ranks, summed in bfloat16, are 1.30% off" in found.message and "float32" in found.message


def slow_run(config: Any, port: int) -> tuple[int, str]:
    """Rank 1 takes four times as long for every micro-batch as it needs."""
    plain, rank = loop.Loop._microbatch, dist.get_rank()

    def slowly(self: Any, *given: Any) -> torch.Tensor:
        start = time.perf_counter()
        result = plain(self, *given)
        if rank == 1:
            with self.clock("forward"):
                time.sleep(max(4 * (time.perf_counter() - start), 0.02))
        return result

    loop.Loop._microbatch = slowly  # type: ignore[method-assign]
    try:
        return runs.train(config, port)
    finally:
        loop.Loop._microbatch = plain  # type: ignore[method-assign]


def test_a_slow_rank_holds_the_others_up(ranks: Ranks, tmp_path: Path) -> None:
    config = runs.tiny(
        tmp_path,
        train={"steps": 26, "evaluate_every": 0},
        checkpoint={"every": 0},
        metrics={"fp8_every": 0},
        precision={"reduce": "bfloat16"},
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    answers = ranks.run(slow_run, config, store.port, timeout=200.0)
    assert [code for code, _ in answers] == [0, 0], answers
    lines = runs.lines(config)
    assert [line["step"] for line in lines if "reduction_error" in line] == [6]
    assert 0 < lines[5]["reduction_error"] < 0.02
    assert [line.get("slow_rank") for line in lines if line["step"] in (10, 20)] == [1, 1]
    told = [line["event"] for line in lines if "nothing hides" in line.get("event", "")]
    assert len(told) == 1 and "the others wait for rank 1, whose own work takes" in told[0], lines


class FakeWorld:
    """Two ranks of which this is one; `work` is what both have computed."""

    size, rank, leads, device = 2, 0, True, torch.device("cpu")

    def __init__(self, *work: list[float]) -> None:
        self.work = list(work)

    def gather(self, value: float) -> list[float]:
        return self.work.pop(0)


@pytest.mark.parametrize(
    "work, named",
    [
        ([[1.0, 4.0]] * 3, (1, 4.0)),
        ([[1.0, 4.0], [4.0, 1.0], [1.0, 4.0]], None),  # now one, now the other: that is other work on the machine
        ([[1.0, 1.0], [1.0, 4.0], [1.0, 4.0]], None),
        ([[1.0, 1.0]] * 3, None),
    ],
)
def test_a_rank_is_the_reason_only_if_it_is_slow_every_time(work: list[list[float]], named: Any) -> None:
    watch = object.__new__(CommunicationWatch)
    watch.world, watch.measured, watch._work, watch._steps = FakeWorld(*work), True, 0.0, 0  # type: ignore[assignment]
    watch._looks = deque(maxlen=LOOKS)
    for step in range(1, 24):
        watch._slow_rank(step, 1.0)
    assert watch._straggler() == named
