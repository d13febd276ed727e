"""`Keeper`: in a launcher, what happens when a rank ends. A death that the others can survive is answered with a new generation.

A launcher has all ranks of a machine (`ottava train`) or one (a process that torchrun or Slurm has started: they never see a death
that was survived). Launchers talk through the store alone, and each looks after its own seats:

    a rank dies          the plan of the next generation is written (once: two deaths at a time make one), a new rank is started
    a rank does not come the ranks of a new generation have a time to come to it; one that is stuck somewhere is killed, and replaced
    a rank has ended     well: its launcher stays until all have, since another one may die in the last moment
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ottava.train import exits, watchdog
from ottava.train.config import Config
from ottava.train.console import tell
from ottava.train.members import PREFIX, Plan, newest
from ottava.train.nursery import Child

COME_S = 30.0
"""Seconds that a rank has to come to a new generation."""
GIVE_UP_S = 75.0
"""Seconds after which a generation whose ranks are not all there is given up: a machine is gone with its launcher, and whoever has
started this one has to start again on what is left."""
TEND_S = 0.2
ASK_S = 3.0
"""Seconds that the store has to answer: the network may be cut."""
RESTARTED = (exits.FAILED, exits.STALLED)
"""Exit codes that another try may not end with. The others are decisions of all ranks."""
T = TypeVar("T")


class Keeper:
    """The seats of one launcher. start: starts a rank on a seat, in place of `ranks[seat]`. stopping: whether the run was asked to end.
    child: of another launcher, which has to be looked after too.

    >>> keeper = Keeper(config, store, ranks, seats=4, start=start)
    >>> keeper.revive(seat=2, code=-9)       # whether the run goes on
    """

    def __init__(
        self,
        config: Config,
        store: dist.Store,
        ranks: dict[int, Child],
        seats: int,
        start: Callable[[int], Child],
        stopping: Callable[[], bool] = lambda: False,
        child: bool = False,
    ) -> None:
        self._child = child
        self._config, self._section = config, config.health
        self._store, self._told = dist.PrefixStore(PREFIX, store), dist.PrefixStore(watchdog.PREFIX, store)
        self._ranks, self._start, self._stopping = ranks, start, stopping
        self._generation, self._plan = 0, Plan(tuple(range(seats)))
        self._since = self._entered = (
            time.monotonic()
        )  # when it was seen first; since when those that run have had time to come
        self._complete = True  # the first generation has the time of a start, which the watchdog looks at
        self._deaths, self._furthest = 0, -1
        self._ask_after = 0.0
        self._closed = False  # whether the store has closed the connection
        self._reported: set[int] = set()  # generations of which `over` counts our seats
        self.released: set[int] = set()
        """Seats that nobody sits on any more."""

    @property
    def pause(self) -> float | None:
        """Seconds until `tend` should be called again; None: nothing is due."""
        alone = all(seat in self._ranks for seat in self._plan.seats) and not self._child
        return None if not self.on or (alone and self._complete) else TEND_S

    @property
    def cut_off(self) -> bool:
        """Whether the store did not answer when it was asked last."""
        return self._ask_after > 0.0

    @property
    def abandoned(self) -> bool:
        """Whether this launcher was told to stop, and the one that served the store has ended: nobody is left whom a rank could save with.
        (A store that is only slow to answer may belong to ranks that are saving.)"""
        return self._closed and self._stopping()

    @property
    def on(self) -> bool:
        """Whether deaths are survived at all."""
        return self._section.restarts > 0

    def revive(self, seat: int, code: int) -> bool:
        """After the rank on `seat` has ended with `code`: whether the run goes on without ending."""
        if not self.on or self._stopping() or (code >= 0 and code not in RESTARTED):
            return False
        self._ask(self._look)
        gathering = self._generation > 0 and not self._complete
        if code == exits.STALLED and gathering:  # those who are left cannot reach each other
            return False
        if not self._within_limits(seat):
            tell(
                f"ottava train: rank {seat} has ended ({name_of(code)}) without a new step since the last restart: "
                f"health.restarts ({self._section.restarts}) is used up."
            )
            return False
        if self._ask(lambda: self._announce(seat, code)) is None:
            return False
        tell(f"ottava train: rank {seat} has ended ({name_of(code)}): the others go on.")
        if seat in self._plan.seats:
            self._ranks[seat] = self._start(seat)
        else:
            self.released.add(seat)
        return True

    def tend(self) -> None:
        """What is due: to be called every now and then."""
        if not self.on or self._ask(self._look) is None or self._complete:
            return
        if time.monotonic() - self._since < COME_S:
            return
        for seat in self._plan.seats:
            rank = self._ranks.get(seat)
            if rank is not None and rank.is_alive() and self._ask(lambda: self._is_here(seat)) is False:  # noqa: B023
                tell(f"ottava train: rank {seat} has not come to the others in {COME_S:.0f} s: killed, to be replaced.")
                rank.kill()
                self._since = time.monotonic()

    def hopeless(self) -> bool:
        """Whether the others will not come any more."""
        waited = time.monotonic() - self._entered
        return self.on and self._generation > 0 and not self._complete and waited > GIVE_UP_S

    def over(self) -> bool:
        """After all ranks here have ended well: whether those of the other launchers have."""
        mine = [seat for seat in self._plan.seats if seat in self._ranks]
        if not self.on or len(mine) == len(self._plan.seats):
            return True
        generation = self._generation
        if generation not in self._reported:
            self._reported.add(generation)
            self._ask(lambda: self._store.add(f"over/{generation}", len(mine)))
        count = self._ask(lambda: self._store.add(f"over/{generation}", 0))
        if count is None:  # the store is gone with the launcher that served it, which waited for us
            return True
        self.tend()
        for seat in mine:  # another rank has died in its last moment
            if self._generation > generation and not self._ranks[seat].is_alive():
                self._ranks[seat] = self._start(seat)
        return self._generation == generation and count >= len(self._plan.seats)

    # ------------------------------------------------------------------------------------------------------- the store

    def _look(self) -> bool:
        """At the newest generation, and whether all are there."""
        generation, plan = newest(self._store, self._generation)
        if generation > self._generation:
            self._enter(generation, plan)
        if not self._complete:
            self._complete = self._store.add(f"here/{generation}", 0) >= len(plan.seats)
        return True

    def _enter(self, generation: int, plan: Plan) -> None:
        self._generation, self._plan, self._complete = generation, plan, False
        self._since = self._entered = time.monotonic()

    def _is_here(self, seat: int) -> bool:
        return self._store.check([f"here/{self._generation}/{seat}"])

    def _announce(self, seat: int, code: int) -> bool:
        """The plan of a new generation, unless the dead rank has not come to the present one: then others wait for it there."""
        self._look()
        if not self._is_here(seat):
            return True
        seats = self._seats_without(seat) if self._section.after_death == "shrink" else self._plan.seats
        plan = Plan(seats, f"rank {self._plan.seats.index(seat)} ended ({name_of(code)})")
        written = self._store.compare_set(f"plan/{self._generation + 1}", "", plan.encode())
        self._enter(self._generation + 1, Plan.decode(written))
        return True

    def _seats_without(self, dead: int) -> tuple[int, ...]:
        left = tuple(seat for seat in self._plan.seats if seat != dead)
        count = next((n for n in range(len(left), 0, -1) if allowed(self._config, n)), None)
        return self._plan.seats if count is None else left[:count]

    def _within_limits(self, seat: int) -> bool:
        """Deaths count until there is a step that is new."""
        step = self._ask(lambda: self._step(seat))
        if step is not None and step > self._furthest:
            self._furthest, self._deaths = step, 0
        self._deaths += 1
        return self._deaths <= self._section.restarts

    def _step(self, seat: int) -> int:
        """How far the run has come, as those say who came to this generation from the one before; or the dead one, every few seconds."""
        keys = [f"step/{self._generation}/{each}" for each in self._plan.seats]
        steps = [int(self._store.get(key)) for key in keys if self._store.check([key])]
        told = self._told.get(str(seat)) if self._told.check([str(seat)]) else b"{}"
        return max([*steps, json.loads(told).get("step", -1)], default=-1)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """None if the store does not answer; then it is not asked again for a moment: the end of a run must not wait for it."""
        if time.monotonic() < self._ask_after:
            return None
        answer: list[T] = []

        def ask() -> None:
            try:
                answer.append(question())
            except dist.DistNetworkError:
                self._closed = True
                raise

        if not watchdog.within(ASK_S, ask, quiet=True):
            self._ask_after = time.monotonic() + ASK_S
            return None
        self._ask_after, self._closed = 0.0, False
        return answer[0] if answer else None


def allowed(config: Config, ranks: int) -> bool:
    """Whether the configuration can run on this many ranks as it stands."""
    parallel, train = config.parallel, config.train
    fixed = max(parallel.tp, 1) * max(parallel.dp_replicate, 1)
    if parallel.dp_shard != -1 or ranks % fixed or parallel.strategy not in ("fsdp2", "fsdp1", "ddp"):
        return False
    data_parallel = ranks // max(parallel.tp, 1)
    return train.global_batch % (config.on_ranks(data_parallel).train.micro_batch * data_parallel) == 0


def name_of(code: int) -> str:
    """An exit code in words.

    >>> name_of(-9)
    'SIGKILL'
    """
    if code < 0:
        return signal.Signals(-code).name
    return {exits.STALLED: "no progress"}.get(code, f"exit code {code}")
