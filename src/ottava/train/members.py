"""Who belongs to a run now: generations of ranks, agreed on through the store ([design note 9] has the alternatives).

A generation is one set of ranks with one process group. When a rank dies, its launcher writes the plan of the next generation; every
rank that lives leaves its groups and comes to the new one, and the launcher puts a new rank on the empty seat, or nobody.

    plan/G          {"seats": [0, 1, 3], "cause": ...}: who belongs to generation G, in order of rank; written once, never changed
    here/G/SEAT     the rank on this seat has come to generation G
    step/G/SEAT     if it has survived: how far it had come before
    here/G          how many have come
    over/G          how many of them have ended well

A seat is what the launcher counts: it keeps its number, its GPU and its launcher when the rank on it changes.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from ottava import torch_private
from ottava.checkpoint.errors import RankLost
from ottava.train.sever import own_ports, sever

PREFIX = "ottava/members"
POLL_S, POLL_RANK_S = 0.02, 1e-4
"""Seconds between two looks at the store, and more of them for every rank: it answers some ten thousand questions a second."""
WAIT_S = 15.0
"""How long a rank whose connections broke waits to be told that another one died. Otherwise the failure is its own."""


@dataclass(frozen=True)
class Plan:
    """Who belongs to a generation."""

    seats: tuple[int, ...]
    """In order of rank."""
    cause: str = ""
    """Why there is a new generation; empty for the first."""

    def encode(self) -> str:
        """As it stands in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes | str) -> Plan:
        """What `encode` has made."""
        found = json.loads(text)
        return cls(tuple(found["seats"]), found["cause"])


class Released(Exception):
    """The new generation has no place for this rank."""


class Members:
    """In a rank: comes to generations, and learns when there is a new one.

    >>> members = Members(store, seat=3, kept_ports=[store.port])
    >>> plan = members.come()                # waits for all others
    >>> members.call_up(error)               # after a failure: whether another rank's death explains it
    """

    def __init__(self, store: dist.Store, seat: int, kept_ports: tuple[int, ...]) -> None:
        self._origin, self._store = store, dist.PrefixStore(PREFIX, store)
        self._seat, self._kept = seat, kept_ports
        self._cut: set[int] = set()  # our ports of connections to the store that end with the generation
        self._severed, self._lock = threading.Event(), threading.Lock()
        self.generation = -1
        self.plan = Plan(())

    def come(self, step: int | None = None) -> Plan:
        """To the newest generation, as soon as all its ranks are there. Released if this one is not among them.

        step: how far a rank that has survived had come.
        """
        while True:
            self.generation, self.plan = newest(self._store, max(self.generation, 0))
            if self._seat not in self.plan.seats:
                raise Released(self.plan.cause)
            self._listen()
            if step is not None:
                self._store.set(f"step/{self.generation}/{self._seat}", str(step))
            self._store.set(f"here/{self.generation}/{self._seat}", "")
            here = self._store.add(f"here/{self.generation}", 1)
            while here < len(self.plan.seats) and not self._severed.is_set():
                time.sleep(POLL_S + POLL_RANK_S * len(self.plan.seats))
                here = self._store.add(f"here/{self.generation}", 0)
            if not self._severed.is_set():
                return self.plan

    def connection(self) -> dist.Store:
        """To the store, for the groups of this generation: whoever makes one waits there for the others, and a rank that has died would be
        waited for until the timeout. Like all connections of the groups it ends when there is a new generation."""
        with self._lock:
            before = own_ports()
            store = self._origin.clone()  # type: ignore[attr-defined]
            self._cut = own_ports() - before  # one that another thread has opened meanwhile is made again by it
            if self._severed.is_set():
                sever(self._kept, self._cut)
        return store

    def call_up(self, error: BaseException) -> bool:
        """Whether `error` is a broken connection, and there is a new generation: then this rank has no connections any more."""
        return is_lost(error) and self._severed.wait(WAIT_S)

    def _listen(self) -> None:
        severed = self._severed = threading.Event()
        work = threading.Thread(target=self._wait, args=(self.generation + 1, severed), daemon=True)
        work.name = "ottava members"
        work.start()

    def _wait(self, generation: int, severed: threading.Event) -> None:
        """Until there is a newer generation: then nobody may wait for this rank any more, nor this rank for anybody."""
        connection = None
        while True:
            try:
                connection = connection or self._store.clone()  # type: ignore[attr-defined]
                connection.wait([f"plan/{generation}"], timedelta(hours=1))
                break
            except dist.DistStoreError:  # an hour is over
                continue
            except Exception:  # the store is gone, and with it the launcher; or another connection may do better
                connection = None
                time.sleep(1.0)
        torch_private.abort_device_groups()
        with self._lock:  # a connection is there, or will find that there is a new generation
            sever(self._kept, self._cut)
            severed.set()


def is_lost(error: BaseException) -> bool:
    """Whether `error` says that another rank could not be reached, and not that something is wrong here.

    >>> is_lost(RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:1234"))
    True
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, RankLost | dist.DistError):
            return True
        if isinstance(found, RuntimeError) and any(word in str(found) for word in ("gloo", "NCCL", "c10d")):
            return True
        found = found.__cause__ or found.__context__
    return False


def newest(store: dist.Store, known: int) -> tuple[int, Plan]:
    """The newest generation, which is `known` or later, and its plan."""
    while store.check([f"plan/{known + 1}"]):
        known += 1
    return known, Plan.decode(store.get(f"plan/{known}"))


def found(store: dist.Store, size: int) -> None:
    """Writes the plan of the first generation, unless it is there already. In every launcher."""
    dist.PrefixStore(PREFIX, store).compare_set("plan/0", "", Plan(tuple(range(size))).encode())
