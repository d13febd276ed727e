"""`Team`: the ranks of an examination, and what they tell each other through a store.

A collective that one rank never joins waits for all of its timeout and names nobody. So the ranks answer by keys in a store first:
rank 0 sees who has not, and says so to the others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ottava.train.listen import serve_store
from ottava.train.world import Place

POLL_S = 0.02
LEAVE_S = 5.0
GRACE_S = 10.0
"""That other ranks wait for rank 0's word, beyond its own timeout."""


class MissingRanks(RuntimeError):
    """Some ranks did not answer in time."""

    def __init__(self, ranks: list[int], what: str, seconds: float) -> None:
        super().__init__(f"ranks {ranks} did not answer within {seconds:g} s ({what}): stopped, hung or never started")
        self.ranks = ranks


class Team:
    """The ranks. One process alone is a team too, and needs no store.

    >>> team = Team(Place.from_torchrun(), timeout=20.0)
    >>> hosts = team.gather("hosts", socket.gethostname())
    """

    def __init__(self, place: Place | None, timeout: float, variables: Mapping[str, str] = os.environ) -> None:
        self.place = place or Place(0, 1, 0, 1)
        self.rank, self.size, self.timeout = self.place.rank, self.place.size, timeout
        self.store: dist.Store | None = None
        if self.size > 1:
            self.store = _store(self.place, timeout, variables)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, in every rank. Raises MissingRanks if some do not answer."""
        if self.store is None:
            return [value]
        try:
            return self._gather(self.store, what, value)
        except dist.DistError as error:  # the store went with the rank that serves it
            raise MissingRanks([0], f"{what}: {str(error).splitlines()[0]}", self.timeout) from error

    def _gather(self, store: dist.Store, what: str, value: Any) -> list[Any]:
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(value))
        if self.rank == 0:
            missing = self._wait(keys)
            there = None if missing else [json.loads(store.get(key)) for key in keys]
            store.set(f"{what}/all", json.dumps({"missing": missing, "values": there}))
        if not self._appears(f"{what}/all", self.timeout + GRACE_S):
            raise MissingRanks([0], what, self.timeout + GRACE_S)
        answer = json.loads(store.get(f"{what}/all"))
        if answer["missing"]:
            raise MissingRanks(answer["missing"], what, self.timeout)
        return answer["values"]

    def share(self, what: str, value: Any) -> Any:
        """Rank 0's value."""
        return self.gather(what, value if self.rank == 0 else None)[0]

    def instant(self, what: str) -> float:
        """Every rank's clock at one moment, to within a round trip: when rank 0 says so. Seconds since 1970."""
        self.gather(f"{what}/ready", None)
        if self.store is not None:
            if self.rank == 0:
                self.store.set(f"{what}/go", "now")
            else:
                self.store.wait([f"{what}/go"], timedelta(seconds=self.timeout))
        return time.time()

    def leave(self, without: Sequence[int] = ()) -> None:
        """Rank 0 serves the store, so it goes last. without: ranks that are missing."""
        if self.store is None or 0 in without:
            return
        if self.rank != 0:
            self.store.set(f"left/{self.rank}", "")
            return
        self._wait([f"left/{rank}" for rank in range(1, self.size) if rank not in without], LEAVE_S)

    def _wait(self, keys: list[str], seconds: float | None = None) -> list[int]:
        """Ranks (the numbers at the end of keys) that have not answered when the time is over."""
        assert self.store is not None
        deadline = time.monotonic() + (self.timeout if seconds is None else seconds)
        waiting = keys
        while waiting:
            waiting = [key for key in waiting if not self.store.check([key])]
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        return [int(key.rpartition("/")[2]) for key in waiting]

    def _appears(self, key: str, seconds: float) -> bool:
        assert self.store is not None
        deadline = time.monotonic() + seconds
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def _store(place: Place, timeout: float, variables: Mapping[str, str]) -> dist.Store:
    """The launcher's store, or one that rank 0 serves where the launcher's variables say."""
    if "MASTER_ADDR" not in variables or "MASTER_PORT" not in variables:
        raise ValueError(
            f"RANK and WORLD_SIZE say that there are {place.size} ranks, but MASTER_ADDR or MASTER_PORT is missing: start them with "
            "torchrun, or set both."
        )
    address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    serves = place.rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=timeout)
    try:
        store = (
            serve_store(address, port, limit, place.local)
            if serves
            else dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise ValueError(
            f"rank {place.rank} does not reach the store of rank 0 at {address}:{port} within {timeout:g} s: is rank 0 running, is the "
            f"port open, does the name resolve? ({str(error).splitlines()[0]})"
        ) from error
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"ottava-doctor-{attempt}", store)
