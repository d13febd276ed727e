"""`World`: all ranks of a run, what this one is, and the few numbers they tell each other each step."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ottava import exchange
from ottava.train.listen import LOOPBACK, serve_store, stay_on_this_machine
from ottava.train.members import Members

LEAST_TIMEOUT_S = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a process stands among the ranks, and where their store is.

    >>> Place.from_torchrun({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", ...})
    Place(rank=3, size=8, local_rank=3, local_size=8, host=None, port=None)
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str | None = None
    """Of the store that the launcher serves. None: where torchrun's variables say."""
    port: int | None = None
    kept: bool = False
    """Whether a launcher of ours keeps the run alive: when a rank dies, the others meet again in a new generation (members.py). `rank` is
    the seat then, and `size` the number of seats."""

    @property
    def local(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.size == self.local_size

    @classmethod
    def from_torchrun(cls, variables: Mapping[str, str] = os.environ) -> Place | None:
        """What torchrun tells its processes; None for a process that torchrun has not started."""
        if "RANK" not in variables or "WORLD_SIZE" not in variables:
            return None
        rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        local_rank, local_size = variables.get("LOCAL_RANK", rank), variables.get("LOCAL_WORLD_SIZE", size)
        return cls(rank, size, int(local_rank), int(local_size))


class World:
    """The ranks of a run, connected. Use it in a `with` block: the process group ends with it.

    timeout: seconds that a collective may take. connected: gets a store of ours before all ranks are there. came: is called when they are.

        >>> with World(place, timeout=600.0) as world:
        ...     total, stops = world.sum([loss, float(stop_requested)])
    """

    def __init__(
        self,
        place: Place,
        timeout: float,
        connected: Callable[[dist.Store], None] = lambda store: None,
        came: Callable[[Sequence[int]], None] = lambda seats: None,
    ) -> None:
        self.rank, self.size = place.rank, place.size
        self.device = _device(place)
        self.local_size = place.local_size
        """Ranks of this machine."""
        self._came = came
        self._place, self._timeout = place, timedelta(seconds=max(timeout, LEAST_TIMEOUT_S))
        if place.local:
            stay_on_this_machine()
        self._store = _store(place)
        self._members: Members | None = None
        if self._store is not None:
            connected(self._store)
            if place.kept:
                self._members = Members(self._store, place.rank, (place.port,) if place.port else ())
        self._meet()

    def _meet(self, step: int | None = None) -> None:
        while True:
            try:
                return self._connect(step)
            except RuntimeError as error:  # one died meanwhile
                if not self.survives(error):
                    raise
                _leave_groups()

    def _connect(self, step: int | None = None) -> None:
        """All ranks, in a process group."""
        options: dict[str, Any] = {"timeout": self._timeout}
        store = self._store
        if self._members is not None:
            assert store is not None
            plan = self._members.come(step)
            self._came(plan.seats)
            self.rank, self.size = plan.seats.index(self._place.rank), len(plan.seats)
            store = dist.PrefixStore(f"generation-{self._members.generation}", self._members.connection())
        if store is not None:
            options |= {"store": store, "rank": self.rank, "world_size": self.size}
        dist.init_process_group(_backend(self.device, self._place), **options | _bound(self.device, self._place))

    @property
    def generation(self) -> int:
        """How often the ranks have met anew."""
        return self._members.generation if self._members is not None else 0

    @property
    def kept(self) -> bool:
        """Whether the death of a rank is survived, in company."""
        return self._members is not None and self.size > 1

    @property
    def seats(self) -> tuple[int, ...]:
        """In order of rank."""
        return self._members.plan.seats if self._members is not None else tuple(range(self.size))

    @property
    def cause(self) -> str:
        """Why they have, the last time."""
        return self._members.plan.cause if self._members is not None else ""

    def survives(self, error: Exception) -> bool:
        """Whether `error` came from the death of another rank, and the others will meet again. Then call `meet_again`."""
        return self._members is not None and self._members.call_up(error)

    def meet_again(self, step: int) -> None:
        """In a new process group, with the ranks that are left and those that are new. Nothing may hold the old groups' models any more.

        step: how far this one had come. Raises Released in a rank that is not needed.
        """
        _leave_groups()
        self._meet(step)

    @property
    def leads(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def store(self) -> dist.Store:
        """Keys and values that all ranks see, over a connection of its own: it never waits for a collective."""
        group = dist.group.WORLD
        assert group is not None
        return group.get_group_store().clone()  # type: ignore[attr-defined]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element over all ranks, the same on each. A NaN anywhere is a NaN everywhere."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks, element by element."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, value: float) -> list[float]:
        """Every rank's number, in order of rank."""
        return self.sum([value if rank == self.rank else 0.0 for rank in range(self.size)])

    def share(self, value: Any) -> Any:
        """What the leading rank has."""
        return exchange.broadcast(value)  # on the CPU, so over gloo

    def gather_values(self, value: Any) -> list[Any]:
        """What every rank has, in order of rank, in every rank: values that JSON can hold.

        >>> world.gather_values({"rank": world.rank})
        [{'rank': 0}, {'rank': 1}]
        """
        text = json.dumps(value).encode()
        return [
            json.loads(bytes(row.tolist())) for row in self.gather_tensor(torch.tensor(list(text), dtype=torch.uint8))
        ]

    def gather_tensor(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, [n, ...] on the CPU, in order of rank; n may differ from rank to rank."""
        if self.size == 1:
            return [rows]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([rows.shape[0]], dtype=torch.int64))
        longest = max(int(length) for length in lengths)
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        everyone = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(everyone, padded)
        return [part[: int(length)] for part, length in zip(everyone, lengths)]

    def on_rank0(self, work: Callable[[], T]) -> T | None:
        """`work()` in the leading rank alone, and its result there. A ValueError or OSError of it is raised in every rank.

        >>> world.on_rank0(lambda: folder.mkdir(parents=True))
        """
        result, failure = None, None
        if self.leads:
            try:
                result = work()
            except (ValueError, OSError) as error:
                failure = str(error)
        failure = self.share(failure)
        if failure is not None:
            raise ValueError(failure)
        return result

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        if self.size == 1:
            return [float(v) for v in values]
        # On the CPU, also for GPUs: it goes over gloo and never waits for what is queued on a GPU.
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, how)
        return numbers.tolist()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _leave_groups() -> None:
    with suppress(RuntimeError, AssertionError):  # what is left in them has failed
        dist.destroy_process_group()


def local_ranks(asked: int | None) -> int:
    """Ranks to start on this machine: as many as asked for, one a GPU, or 2 on a CPU."""
    return asked or torch.cuda.device_count() or 2


def _store(place: Place, variables: Mapping[str, str] = os.environ) -> dist.Store | None:
    """Where the ranks find each other; None: torch knows, from the launcher's variables."""
    if place.port is not None:
        return dist.TCPStore(place.host or "localhost", place.port, is_master=False, wait_for_workers=False)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    known = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    return rendezvous(known, LOOPBACK if place.local else address, place.rank, local=place.local)


def shared_store(place: Place, variables: Mapping[str, str] = os.environ) -> tuple[dist.TCPStore, str]:
    """For launchers of one rank each, which torchrun or Slurm has started: a store that the first of them serves, and its host.

    torchrun's own store is only asked where that is, or is not there at all (static rendezvous, srun): then it is served at MASTER_PORT.
    """
    address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    host = LOOPBACK if place.local else address
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        known = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
        return rendezvous(known, host, place.rank, local=place.local), host
    if place.rank == 0:
        return serve_store(host, port, local=place.local), host
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False), host


def rendezvous(known: dist.Store, host: str, rank: int, seconds: float = 300.0, local: bool = True) -> dist.TCPStore:
    """A new store that rank 0 serves, for this start of the ranks alone. `known`: one that all ranks see; host: where rank 0 runs;
    local: whether all ranks run there.

    torchrun's own store lives as long as torchrun does. After a restart it still has the addresses of ranks that are dead, and ranks
    that read those wait for ever. Here an old address leads to a server that is gone, or has another secret: then rank 0 has not told
    the new one yet.

        >>> store = rendezvous(torchruns_store, "node-0", rank)
    """
    key = "ottava/meeting"
    if rank == 0:
        served = serve_store(host, local=local)
        secret = secrets.token_hex(16)
        served.set("secret", secret)
        known.set(key, f"{served.port} {secret}")
        return served
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        port, secret = known.get(key).decode().split()
        try:
            found = dist.TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
            )
            if found.check(["secret"]) and found.get("secret").decode() == secret:
                found.set_timeout(timedelta(seconds=seconds))
                return found
        except dist.DistError:
            pass  # nobody there
        time.sleep(0.1)
    raise TimeoutError(f"rank {rank} did not find rank 0 on {host} in {seconds:.0f} s.")


def _device(place: Place) -> torch.device:
    if not torch.cuda.is_available():
        # Ranks share the cores; more threads than cores would only take turns.
        torch.set_num_threads(max(math.floor(len(os.sched_getaffinity(0)) / place.local_size), 1))
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _shares_gpu(place: Place) -> bool:
    return place.local_size > torch.cuda.device_count()


def _backend(device: torch.device, place: Place) -> str:
    if device.type == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:gloo" if _shares_gpu(place) else "cpu:gloo,cuda:nccl"  # NCCL refuses two ranks on one GPU


def _bound(device: torch.device, place: Place) -> dict[str, Any]:
    """The GPU that NCCL is bound to: it connects at once, and subgroups split that communicator in place of making their own.

    gloo, which ranks on one GPU use, has no communicator to bind.
    """
    return {"device_id": device} if device.type == "cuda" and not _shares_gpu(place) else {}
