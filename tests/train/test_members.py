"""Generations of ranks: written once, come to by all, and waited for by nobody who is not meant."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ottava import overlap
from ottava.checkpoint.errors import RankLost
from ottava.train import exits, keeper, launch, members
from ottava.train.config import Config, HealthSection, ParallelSection, TrainSection
from ottava.train.keeper import Keeper, allowed, name_of
from ottava.train.members import PREFIX, Members, Plan, Released, found, is_lost, newest
from train.test_launch import Late


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    """Ranks are threads here: they would sever each other's stores."""
    monkeypatch.setattr(members, "sever", lambda kept, cut: 0)


@pytest.fixture
def store():
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield served
    for generation in range(
        1, 9
    ):  # nobody waits in native code when the process ends: ranks leave by os._exit, tests do not
        dist.PrefixStore(PREFIX, served).compare_set(f"plan/{generation}", "", Plan(()).encode())
    for thread in threading.enumerate():
        if thread.name == "ottava members":
            thread.join(10)


def come(store: Any, seat: int, met: dict[int, Any]) -> threading.Thread:
    """A rank that comes to the newest generation."""

    def work() -> None:
        rank = Members(store.clone(), seat, (store.port,))
        try:
            met[seat] = rank, rank.come()
        except Released as released:
            met[seat] = rank, str(released)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def config(**health: Any) -> Config:
    return Config(health=HealthSection(**health), train=TrainSection(global_batch=8, micro_batch=2))


class Ranks(dict):
    """Stands for processes: the started ones are alive."""

    def __init__(self, seats: int) -> None:
        super().__init__({seat: SimpleNamespace(is_alive=lambda: True, kill=lambda: None) for seat in range(seats)})
        self.started: list[int] = []

    def start(self, seat: int) -> Any:
        self.started.append(seat)
        return self[seat]


WAITS_FOR_A_DEAD_RANK = """
import os, sys, threading, time
import torch.distributed as dist
from ottava.train.members import Members, Plan, PREFIX, found

served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
own = dist.TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)
found(own, 1)
members = Members(own, 0, (served.port,))
members.come()

def die():  # the launcher says that there is a new generation
    time.sleep(0.5)
    dist.PrefixStore(PREFIX, served).set("plan/1", Plan((0,), "rank 1 ended").encode())

def wait(late):
    store = members.connection()
    if not late:
        threading.Thread(target=die, daemon=True).start()
    start = time.monotonic()
    try:  # as by init_process_group and new_group: for the address of a rank that will not come
        dist.init_process_group("gloo", store=dist.PrefixStore("g", store), rank=0, world_size=2)
    except RuntimeError as error:
        print(late, members.call_up(error), time.monotonic() - start < 20, flush=True)

wait(late=False)
wait(late=True)  # a connection that is made after the news is cut at once
print(own.check(["anything"]), flush=True)  # the others to the store stay
os._exit(0)
"""


def test_who_waits_to_make_a_group_with_a_dead_rank_is_woken():
    ran = subprocess.run([sys.executable, "-c", WAITS_FOR_A_DEAD_RANK], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["False", "True", "True", "True", "True", "True", "False"], ran.stderr


def test_ranks_meet_when_all_are_there_and_meet_again_after_a_death(store):
    found(store, 2)
    met: dict[int, Any] = {}
    first = come(store, 0, met)
    time.sleep(0.2)
    assert not met  # one alone is no generation
    come(store, 1, met).join(20)
    first.join(20)
    assert met[0][1] == met[1][1] == Plan((0, 1), "") and met[0][0].generation == 0
    ranks = Ranks(2)
    kept = Keeper(config(restarts=2), store, ranks, 2, ranks.start)  # type: ignore[arg-type]
    assert kept.revive(1, -9) and ranks.started == [1]
    survivor = met[0][0]
    assert survivor.call_up(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not survivor.call_up(RuntimeError("out of memory"))  # an error of its own
    again: dict[int, Any] = {}
    new = come(store, 1, again)
    assert survivor.come().cause == "rank 1 ended (SIGKILL)" and survivor.generation == 1
    new.join(20)
    assert again[1][0].generation == 1


def test_a_death_on_the_way_to_a_generation_needs_no_other_and_too_many_end_the_run(store):
    found(store, 2)
    met: dict[int, Any] = {}
    for thread in [come(store, seat, met) for seat in range(2)]:
        thread.join(20)
    ranks = Ranks(2)
    kept = Keeper(config(restarts=3), store, ranks, 2, ranks.start)  # type: ignore[arg-type]
    plans = dist.PrefixStore(PREFIX, store)
    assert kept.revive(0, -11) and newest(plans, 0)[0] == 1
    assert kept.revive(0, exits.FAILED) and newest(plans, 0)[0] == 1  # it never came: the others wait for its successor
    assert kept.revive(0, -6) and ranks.started == [0, 0, 0]
    assert not kept.revive(0, -6)  # no new step in all this
    assert not kept.revive(0, exits.NON_FINITE) and not kept.revive(0, exits.STOPPED)


def test_deaths_count_until_there_is_a_step_that_is_new(store):
    found(store, 2)
    met: dict[int, Any] = {}
    for thread in [come(store, seat, met) for seat in range(2)]:
        thread.join(20)
    ranks = Ranks(2)
    kept = Keeper(config(restarts=1), store, ranks, 2, ranks.start)  # type: ignore[arg-type]
    survivor = met[0][0]
    for step in (5, 8, 8):  # how far the survivor has come when the other dies
        assert kept.revive(1, -9)
        again: dict[int, Any] = {}
        assert survivor.call_up(RankLost("a rank was lost"))
        new = come(store, 1, again)
        survivor.come(step)
        new.join(20)
    assert not kept.revive(1, -9)  # twice at step 8


def test_a_run_that_is_asked_to_stop_or_wants_no_restarts_is_not_kept(store):
    found(store, 1)
    ranks = Ranks(1)
    options: dict[str, Any] = {"store": store, "ranks": ranks, "seats": 1, "start": ranks.start}
    assert not Keeper(config(restarts=0), **options).revive(0, -9)
    assert not Keeper(config(), **options, stopping=lambda: True).revive(0, -9)


def test_ranks_that_stand_still_together_are_not_replaced_again(store):
    found(store, 2)
    met: dict[int, Any] = {}
    for thread in [come(store, seat, met) for seat in range(2)]:
        thread.join(20)
    ranks = Ranks(2)
    kept = Keeper(config(), store, ranks, 2, ranks.start)  # type: ignore[arg-type]
    assert kept.revive(0, exits.STALLED)
    assert not kept.revive(1, exits.STALLED)  # it waited for the others in vain: they cannot reach each other


def test_one_who_does_not_come_is_killed(store, monkeypatch):
    monkeypatch.setattr(keeper, "COME_S", 0.0)
    found(store, 2)
    met: dict[int, Any] = {}
    for thread in [come(store, seat, met) for seat in range(2)]:
        thread.join(20)
    ranks, killed = Ranks(2), []
    ranks[1].kill = lambda: killed.append(1)
    ranks[0].is_alive = lambda: False
    kept = Keeper(config(), store, ranks, 2, ranks.start)  # type: ignore[arg-type]
    kept.tend()
    assert not killed  # the first generation is a start, which the watchdog looks at
    assert kept.revive(0, -9)
    kept.tend()
    assert killed == [1]


def test_a_generation_that_never_gets_complete_is_given_up(store, monkeypatch):
    monkeypatch.setattr(keeper, "GIVE_UP_S", 0.3)
    found(store, 2)
    met: dict[int, Any] = {}
    for thread in [come(store, seat, met) for seat in range(2)]:
        thread.join(20)
    mine = Late(0.0, 1)  # a rank that dies, and whose successor waits for one on another machine
    ranks: dict[int, Any] = {0: mine}

    def start(seat: int) -> Any:
        come(store, 0, met)
        return Late(60.0, 0)

    kept = Keeper(config(), store, ranks, 2, start, child=True)
    assert launch.wait_for(ranks, None, kept) == (0, exits.STALLED)
    assert ranks[0] is not mine and ranks[0].process.exitcode == -9


def test_a_rank_is_not_waited_for_after_the_launcher_that_served_the_store_has_ended(monkeypatch):
    monkeypatch.setattr(launch, "ABANDONED_GRACE_S", 0.3)
    serves = "store = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); print(store.port, flush=True)"
    command = [sys.executable, "-c", f"import time, torch.distributed as d; {serves}; time.sleep(60)"]
    other = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )  # the launcher of rank 0
    assert other.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(other.stdout.readline()), wait_for_workers=False)
    found(store, 2)
    stopping: list[bool] = []
    ranks: dict[int, Any] = {1: Late(60.0, 0)}
    kept = Keeper(config(), store, ranks, 2, Ranks(2).start, lambda: bool(stopping), child=True)  # type: ignore[arg-type]
    kept.tend()
    stopping.append(True)
    kept.tend()
    assert not kept.abandoned  # the others may still save together
    other.kill()
    other.wait(20)
    assert launch.wait_for(ranks, None, kept) == (1, 137)


def test_on_fewer_ranks_where_the_plan_allows_it(store):
    found(store, 4)
    met: dict[int, Any] = {}
    for thread in [come(store, seat, met) for seat in range(4)]:
        thread.join(20)
    ranks = Ranks(4)
    kept = Keeper(config(after_death="shrink"), store, ranks, 4, ranks.start)  # type: ignore[arg-type]
    assert kept.revive(1, -9) and not ranks.started and kept.released == {1}
    _, plan = newest(dist.PrefixStore(PREFIX, store), 0)
    assert plan.seats == (0, 2)  # 3 ranks cannot share 8 sequences in microbatches of 2
    late: dict[int, Any] = {}
    come(store, 3, late).join(20)
    assert "rank 1 ended" in late[3][1]  # released: there is no place for it


def test_what_the_plan_allows():
    eight = config()
    # 8 ranks have a sequence each: less than train.micro_batch, which is the most that a rank takes at once.
    assert [ranks for ranks in range(1, 17) if allowed(eight, ranks)] == [1, 2, 4, 8]
    fixed = Config(parallel=ParallelSection(dp_shard=4), train=eight.train)
    assert not any(allowed(fixed, ranks) for ranks in range(1, 9))
    split = Config(parallel=ParallelSection(tp=2), train=eight.train)
    assert [ranks for ranks in range(1, 17) if allowed(split, ranks)] == [2, 4, 8, 16]


def test_what_is_a_lost_connection():
    assert is_lost(RankLost("a rank was lost")) and is_lost(dist.DistNetworkError("gone"))
    assert is_lost(overlap.RankLost("the fused product: rank 3 was lost"))
    assert not is_lost(RuntimeError("a size does not fit")) and not is_lost(ValueError("gloo"))
    outer = RuntimeError("a save failed")
    outer.__cause__ = RuntimeError("gloo/transport/tcp/pair.cc: Connection reset by peer")
    assert is_lost(outer)


def test_exit_codes_in_words():
    assert [name_of(code) for code in (-9, 6, 1)] == ["SIGKILL", "no progress", "exit code 1"]
