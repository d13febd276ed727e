"""Ranks that disagree, or do not come, are named in every rank within seconds."""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from distributed.ranks import Ranks
from ottava.distributed.agreement import check_agreement, describe
from ottava.distributed.plan import ParallelPlan

CONFIG = {"lr": 3e-4, "model": {"layers": 2, "widths": [8, 16]}}


def model(rows: int = 4, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, rows, bias=bias, dtype=dtype))


class Swapped(nn.Module):
    """The parameters of `model()` in another order."""

    def __init__(self) -> None:
        super().__init__()
        layers = model()
        self.add_module("1", layers[1])  # type: ignore[index]
        self.add_module("0", layers[0])  # type: ignore[index]


def answer(odd: tuple[int, ...], change: str, timeout: float = 20.0) -> tuple[str, float]:
    """This rank's error message ("" for none) and how long it took, when the `odd` ranks have changed something."""
    plan, config, net = ParallelPlan(dp_shard=3), dict(CONFIG), model()
    rank = dist.get_rank()
    if rank in odd:
        if change == "plan":
            plan = ParallelPlan(dp_shard=1, tp=3, reduce_dtype=torch.bfloat16)
        elif change == "config":
            config = {"lr": 3e-4, "model": {"layers": 3, "widths": [8, 32, 1]}, "extra": "yes"}
        elif change == "shape":
            net = model(rows=5)
        elif change == "dtype":
            net = model(dtype=torch.bfloat16)
        elif change == "missing":
            net = model(bias=False)
        elif change == "order":
            net = Swapped()
        elif change == "frozen":
            net.requires_grad_(False)
        elif change == "each its own":
            config["lr"] = rank
        elif change == "absent":
            return "", 0.0
        elif change == "late":
            time.sleep(timeout + 2)
    start = time.monotonic()
    try:
        check_agreement(None, plan, config, net, timeout)
    except ValueError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "odd, change, words",
    [
        (
            (1,),
            "plan",
            [
                "Rank 1 of 3 differs",
                "plan.dp_shard: 3 on ranks 0, 2; 1 on rank 1",
                "plan.tp: 1 on ranks 0, 2; 3 on rank 1",
                'plan.reduce_dtype: "float32" on ranks 0, 2; "bfloat16" on rank 1',
            ],
        ),
        (
            (0,),  # the first rank compares, and may itself be the odd one
            "config",
            [
                "Rank 0 of 3 differs",
                "config.model.layers: 2 on ranks 1, 2; 3 on rank 0",
                "config.model.widths.1: 16 on ranks 1, 2; 32 on rank 0",
                "config.model.widths.2: missing on ranks 1, 2; 1 on rank 0",
                'config.extra: missing on ranks 1, 2; "yes" on rank 0',
            ],
        ),
        (
            (2,),
            "shape",
            [
                'parameter 1.weight: "float32 [4, 4]" on ranks 0, 1; "float32 [5, 4]" on rank 2',
                'parameter 1.bias: "float32 [4]" on ranks 0, 1; "float32 [5]" on rank 2',
            ],
        ),
        ((1,), "dtype", ['parameter 1.bias: "float32 [4]" on ranks 0, 2; "bfloat16 [4]" on rank 1']),
        ((1,), "missing", ['parameter 1.bias: "float32 [4]" on ranks 0, 2; missing on rank 1']),
        (
            (2,),
            "order",
            ["order of parameters", "'parameter 0.weight' comes first on ranks 0, 1", "'parameter 1.weight' on rank 2"],
        ),
        ((1,), "frozen", ['parameter 0.bias: "float32 [4]" on ranks 0, 2; "float32 [4] frozen" on rank 1']),
        (
            (1, 2),
            "shape",
            ["Rank 0 of 3 differs", 'parameter 1.bias: "float32 [5]" on ranks 1, 2; "float32 [4]" on rank 0'],
        ),
        ((1, 2), "each its own", ["Ranks 1, 2 of 3 differ", "config.lr: 0.0003 on rank 0; 1 on rank 1; 2 on rank 2"]),
    ],
)
def test_every_rank_names_the_rank_and_the_difference(three: Ranks, odd: Any, change: str, words: list[str]) -> None:
    answers = three.run(answer, odd, change)
    assert len({message for message, _ in answers}) == 1  # all ranks say the same
    for word in words:
        assert word in answers[0][0], answers[0][0]
    assert max(seconds for _, seconds in answers) < 10


def test_ranks_that_agree_pass_again_and_again(three: Ranks) -> None:
    for message, seconds in three.run(answer, (), "nothing"):
        assert message == "" and seconds < 10
    assert three.run(agree_twice_then_not) == [["", "", "config.lr"]] * 3


def agree_twice_then_not() -> list[str]:
    """Every check is its own: an earlier answer is not taken for a later one."""
    told = []
    for lr in (1, 2, dist.get_rank()):
        try:
            check_agreement(None, ParallelPlan(), {"lr": lr}, model())
            told.append("")
        except ValueError as error:
            told.append("config.lr" if "config.lr" in str(error) else str(error))
    return told


@pytest.mark.parametrize("absent", [0, 1])  # 0: the one that would compare
def test_a_rank_that_never_comes_is_named(three: Ranks, absent: int) -> None:
    answers = three.run(answer, (absent,), "absent", 2.0)
    for rank, (message, seconds) in enumerate(answers):
        if rank != absent:
            assert f"Rank {absent} of 3 did not reach the check" in message and "within 2 s" in message
            assert seconds < 8


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_comes_too_late_is_told_too(three: Ranks, late: int) -> None:
    messages = {message for message, _ in three.run(answer, (late,), "late", 2.0)}
    assert len(messages) == 1 and f"Rank {late} of 3 did not reach" in messages.pop()


def in_a_subgroup() -> str:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the group"):
            check_agreement(group, ParallelPlan(), {}, model())
        return ""
    try:
        check_agreement(group, ParallelPlan(), {"lr": dist.get_rank()}, model())
    except ValueError as error:
        return str(error)
    return ""


def stopped_host(rank: int, folder: Path, results: Any) -> None:
    """Rank 0 hosts a TCP store and stops (SIGSTOP) once the group exists; rank 1 checks."""
    port, ready = folder / "port", folder / "ready"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, 2, True, wait_for_workers=False)
        (folder / "writing").write_text(str(store.port))
        (folder / "writing").rename(port)
    else:
        wait_for(port)
        store = dist.TCPStore("localhost", int(port.read_text()), 2, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 0:
        wait_for(ready)
        os.kill(os.getpid(), signal.SIGSTOP)
    ready.touch()
    time.sleep(1)  # rank 0 looks for the file every 0.05 s
    results.put(answer((), "nothing", 1.0))
    os._exit(0)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_no_hang(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=stopped_host, args=(rank, tmp_path, results)) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        processes[1].join(120)
        assert processes[1].exitcode == 0
        message, seconds = results.get()
        assert "store" in message and "gone or stopped" in message and seconds < 12
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_subgroup(three: Ranks) -> None:
    messages = three.run(in_a_subgroup)
    assert messages[1] == "" and messages[0] == messages[2] and "Rank 2 of 2 differs" in messages[0]


def test_one_process_has_nobody_to_disagree_with() -> None:
    check_agreement(None, ParallelPlan(), {}, model())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        check_agreement(None, ParallelPlan(), {}, model())
    finally:
        dist.destroy_process_group()


class Color(enum.Enum):
    RED = 1


def test_describe_is_flat_json() -> None:
    config = {
        "b": {"dtype": torch.bfloat16, "color": Color.RED},
        "a": [Path("x"), None],
        "empty": {},
        "plan": ParallelPlan(),
    }
    found = describe(ParallelPlan(tp=2), config, model())
    assert found["plan.tp"] == 2 and found["plan.param_dtype"] == "bfloat16"
    assert found["config.b.dtype"] == "torch.bfloat16" and found["config.b.color"] == "Color.RED"
    assert found["config.a.0"] == "x" and found["config.a.1"] is None and found["config.empty"] == []
    assert found["config.plan.dp_shard"] == -1
    assert found["parameter 1.weight"] == "float32 [4, 4]"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"config": {"a": {"b": object()}}}, "config.a.b is a object, which ranks cannot compare"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0, got 0"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], words: str) -> None:
    arguments = SimpleNamespace(**({"config": {}, "timeout": 1.0} | change))
    with pytest.raises(ValueError, match=words):
        check_agreement(None, ParallelPlan(), arguments.config, model(), arguments.timeout)
