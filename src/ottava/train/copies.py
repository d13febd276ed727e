"""`Copies`: what every rank holds of the run, twice: in its own memory and in that of its neighbour.

When a rank dies, its part of the state dies with it. Its neighbour (the next rank, on the next machine if there are several) has a
copy of some step, and every other rank has a copy of its own part of the same step: the newest step of which every part is left is
where the run goes on, without a disk.

    make      each rank copies its part to the host and sends it to the next one; the step before is kept until all have done so
    newest    the ranks compare what they have, each having checked that its copies still are what was copied
    restore   those who have lost their part get it from their neighbour

Copies lie in memory for long and are read when something has just gone wrong: each has digests, made where the state lies.

How often is a question of time: with `share` = 0.01 copies take at most a hundredth of the training time. All ranks find the same
answer, because they agree on the slowest rank's seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava.checkpoint import model_state
from ottava.checkpoint.boxes import part_of
from ottava.checkpoint.flat import assign, flatten
from ottava.checkpoint.run_state import settle
from ottava.guard.digest import digest, read
from ottava.notices import leads, log, warn_once
from ottava.train.world import World

ALIGNED = 16
"""Bytes that a tensor's place in a copy begins at a multiple of."""
VERSIONS = 4
"""Copies that a rank may hold at a time: its own and its neighbour's, of two steps."""
MEMORY_SHARE = 0.5
"""Of the memory that is free on the machine, for the copies of all its ranks."""


@dataclass
class Copy:
    """One rank's part of the state after a step."""

    step: int
    about: bytes
    """JSON: where each tensor lies in `content`, their digests, and the plain values."""
    seal: int
    """Of `about`."""
    content: Tensor
    """uint8 [n], on the host."""

    def whole(self) -> bool:
        """Whether it still is what was copied."""
        if _seal(self.about) != self.seal:
            return False
        about = json.loads(self.about)
        return read([digest(self.tensor(*place[2:])) for place in about["tensors"]]) == about["digests"]

    def tensor(self, shape: list[int], dtype: str, place: int) -> Tensor:
        """The one that lies there: a view."""
        kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
        return self.content[place : place + math.prod(shape) * kind.itemsize].view(kind).view(shape)


@dataclass
class Copies:
    """In one rank. share: of the training time that copies may take; 0: there are none.

    >>> copies = Copies(share=0.01)
    >>> if copies.due(step):
    ...     copies.make(step, world, model, optimizer, step_seconds)
    >>> step = copies.newest(world)                  # after a restart in place; None: there are none
    >>> copies.restore(step, world, model, optimizer)
    """

    share: float
    own: list[Copy] = field(default_factory=list)
    """The newest one or two steps."""
    neighbours: list[Copy] = field(default_factory=list)
    """Of the rank before this one."""
    size: int = 0
    """How many ranks there were when they were made."""
    _next: float = 1.0
    """The step after which one is due."""
    _free: list[Tensor] = field(default_factory=list)
    """Memory of copies that are not needed any more."""

    def due(self, step: int) -> bool:
        """Whether a copy is to be made after `step`. The same in all ranks."""
        return self.share > 0 and step >= self._next

    def make(
        self, step: int, world: World, model: nn.Module, optimizer: torch.optim.Optimizer, step_seconds: float
    ) -> None:
        """Every rank calls it. step_seconds: what a step takes."""
        began = time.monotonic()
        state = model_state(model, optimizer) | {"step": step}
        pieces, about = _pieces(state)
        size = _end(pieces)
        if not self.own and not self._fits(world, size):
            return
        digests = [digest(tensor) for _, tensor in pieces]
        # Whoever comes here has got through a whole step since the copies before: they are complete everywhere.
        self._drop_older()
        content = self._memory(size)
        for place, tensor in pieces:
            content[place : place + tensor.nbytes].copy_(_bytes(tensor.contiguous()), non_blocking=True)
        if any(tensor.is_cuda for _, tensor in pieces):
            torch.cuda.current_stream().synchronize()
        sealed = json.dumps(about | {"digests": read(digests)}).encode()
        mine = Copy(step, sealed, _seal(sealed), content)
        theirs = self._pass_on(mine, world)
        self.own.append(mine)
        self.neighbours.append(theirs)
        self.size = world.size
        seconds, usual = world.max([time.monotonic() - began, step_seconds])
        allowed = max(
            self.share * max(usual, 1e-6), 1e-12
        )  # of a share that is nearly 0 the quotient would be infinite
        self._next = step + max(math.ceil(seconds / allowed), 1)

    def restore(self, step: int, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fills model and optimizer from the copies of `step`, which `newest` has found.

        Every rank calls it. The model must be spread over as many ranks as then.
        """
        mine = next((copy for copy in self.own if copy.step == step), None)
        mine = self._give_back(step, mine, world)
        _fill(mine, model, optimizer)
        self.own = [mine]
        self.neighbours = [copy for copy in self.neighbours if copy.step == step]
        self.size, self._next = world.size, step + 1.0  # a new rank has no copy of its neighbour yet

    def newest(self, world: World) -> int | None:
        """The newest step of which every rank's part is somewhere, unharmed; None: there is none. Every rank calls it."""
        if self.share <= 0:
            return None
        self.own, self.neighbours = self._unharmed(self.own, world.rank), self._unharmed(self.neighbours, world.rank)
        mine = [self.size, *_two([copy.step for copy in self.own]), *_two([copy.step for copy in self.neighbours])]
        table = [-1.0] * (5 * world.size)
        table[5 * world.rank : 5 * world.rank + 5] = map(float, mine)
        numbers = [int(number) for number in world.max(table)]
        rows = [numbers[i : i + 5] for i in range(0, len(numbers), 5)]
        return newest_whole([(row[0], row[1:3], row[3:5]) for row in rows], world.size, distance(world))

    def forget(self) -> None:
        """There are none any more: the run went back, and what was copied since is not to be trusted. Every rank calls it."""
        self._free = [copy.content for copy in (*self.own, *self.neighbours)]
        self.own, self.neighbours, self._next = [], [], 1.0

    # ---------------------------------------------------------------------------------------------------------- memory

    def _drop_older(self) -> None:
        for copies in (self.own, self.neighbours):
            while len(copies) > 1:
                self._free.append(copies.pop(0).content)

    def _memory(self, size: int) -> Tensor:
        for i, tensor in enumerate(self._free):
            if tensor.numel() == size:
                return self._free.pop(i)
        self._free.clear()
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def _fits(self, world: World, size: int) -> bool:
        """Whether all ranks have the memory. Told once, where it is too little."""
        ranks = max(torch.cuda.device_count(), 1) if world.device.type == "cuda" else world.size
        wanted, free = VERSIONS * size * ranks, _free_bytes()
        if world.sum([float(wanted > MEMORY_SHARE * free)])[0]:
            self.share = 0.0
            if leads():
                warn_once(
                    f"ottava train: no copies in memory: {VERSIONS} of {size / 2**30:.1f} GiB for each of {ranks} ranks are too much for "
                    f"{free / 2**30:.0f} GiB of free memory. A restart in place goes on from the newest checkpoint."
                )
            return False
        return True

    def _unharmed(self, copies: list[Copy], rank: int) -> list[Copy]:
        """Those that still are what was copied. Others are told, and left out as if they had been lost."""
        found = []
        for copy in copies:
            if copy.whole():
                found.append(copy)
            else:
                log.warning(
                    "Rank %d: a copy of step %d in memory is not what was copied: it is not used.", rank, copy.step
                )
        return found

    # -------------------------------------------------------------------------------------------------------- messages

    def _pass_on(self, mine: Copy, world: World) -> Copy:
        """Sends this rank's copy to the next one; the copy of the rank before."""
        apart = distance(world)
        after, before = (world.rank + apart) % world.size, (world.rank - apart) % world.size
        sizes = torch.tensor([len(mine.about), mine.content.numel(), mine.seal], dtype=torch.int64)
        theirs = torch.empty_like(sizes)
        _exchange(sizes, after, theirs, before)
        about = torch.empty(int(theirs[0]), dtype=torch.uint8)
        _exchange(_from_bytes(mine.about), after, about, before)
        content = self._memory(int(theirs[1]))
        _exchange(mine.content, after, content, before)
        return Copy(mine.step, about.numpy().tobytes(), int(theirs[2]), content)

    def _give_back(self, step: int, mine: Copy | None, world: World) -> Copy:
        """To ranks that have lost their part, from those after them. Returns this rank's own."""
        lost = world.max([float(mine is None and rank == world.rank) for rank in range(world.size)])
        work = []
        for rank in [rank for rank, flag in enumerate(lost) if flag]:
            holder = (rank + distance(world)) % world.size
            if world.rank == holder:
                copy = next(c for c in self.neighbours if c.step == step)
                sizes = torch.tensor([len(copy.about), copy.content.numel(), copy.seal], dtype=torch.int64)
                work += [dist.isend(t, rank) for t in (sizes, _from_bytes(copy.about), copy.content)]
            if world.rank == rank:
                sizes = torch.empty(3, dtype=torch.int64)
                dist.recv(sizes, holder)
                about, content = torch.empty(int(sizes[0]), dtype=torch.uint8), self._memory(int(sizes[1]))
                dist.recv(about, holder)
                dist.recv(content, holder)
                mine = Copy(step, about.numpy().tobytes(), int(sizes[2]), content)
        for one in work:
            assert one is not None
            one.wait()
        assert mine is not None
        return mine


def distance(world: World) -> int:
    """How far a rank's neighbour is: on the next machine, if there are several."""
    return world.local_size if world.size > world.local_size else 1


def newest_whole(held: list[tuple[int, list[int], list[int]]], size: int, apart: int = 1) -> int | None:
    """The newest step of which every rank's part is left; None: there is none.

    held: for each rank, of how many ranks its copies are (0: it has none), the steps of its own and those of its neighbour's, which is
    `apart` ranks before it.

        >>> newest_whole([(2, [7, 8], [8, -1]), (0, [-1, -1], [-1, -1])], 2)     # rank 1 is new; rank 0 has its step 8
        8
    """
    if any(ranks not in (0, size) for ranks, _, _ in held):  # of another mesh
        return None
    steps = {step for _, own, theirs in held for step in (*own, *theirs) if step >= 0}
    for step in sorted(steps, reverse=True):
        if all(step in held[rank][1] or step in held[(rank + apart) % size][2] for rank in range(size)):
            return step
    return None


# ------------------------------------------------------------------------------------------------------------------ content


def _pieces(state: dict[str, Any]) -> tuple[list[tuple[int, Tensor]], dict[str, Any]]:
    """(where each tensor that this rank holds lies in a copy, the tensors; names and places of the same, and the plain values)."""
    flat = flatten(state)
    pieces, named, end = [], [], 0
    for name, leaf in flat.tensors.items():
        for offset, view in part_of(name, leaf).views:
            pieces.append((end, view))
            named.append([name, list(offset), list(view.shape), str(view.dtype), end])
            end += -(-view.nbytes // ALIGNED) * ALIGNED
    return pieces, {"tensors": named, "values": flat.values}


def _end(pieces: list[tuple[int, Tensor]]) -> int:
    return max((place + tensor.nbytes for place, tensor in pieces), default=0)


def _fill(copy: Copy, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Model and optimizer get what the copy holds. ValueError if they are not placed as then."""
    state = model_state(model, optimizer) | {"step": 0}
    pieces, now = _pieces(state)
    then = json.loads(copy.about)
    if then["tensors"] != now["tensors"]:
        raise ValueError(f"The copy of step {copy.step} in memory is of a model that is spread otherwise.")
    with torch.no_grad():
        for (_, tensor), place in zip(pieces, then["tensors"]):
            tensor.copy_(copy.tensor(*place[2:]))
    paths = flatten(state).paths
    for name, value in then["values"].items():
        if name in paths:
            assign(state, paths[name], value)
    settle(model, optimizer, None, state, set())
    if leads():
        log.debug("Copy of step %d: %d bytes.", copy.step, copy.content.numel())


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)


def _seal(about: bytes) -> int:
    """That fits int64."""
    return int.from_bytes(hashlib.blake2b(about, digest_size=7).digest())


def _from_bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _two(steps: list[int]) -> list[int]:
    return [*steps, -1, -1][:2]


def _exchange(sent: Tensor, target: int, received: Tensor, source: int) -> None:
    """On the CPU, also for GPUs: over gloo."""
    work = [dist.isend(sent, target), dist.irecv(received, source)]
    for one in work:
        assert one is not None
        one.wait()


def _free_bytes() -> float:
    """Of the machine's memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return math.inf
