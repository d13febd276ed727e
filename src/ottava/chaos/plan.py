"""What happens to a job under faults: which fault, where, when. Drawn from a seed, so that a table can be made again.

A fault comes in a phase of a step, in one rank or in the launcher. Several come to one run, one after the other: the next is armed
when the one before has struck.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ottava.notices import did_you_mean

PHASES = ("start", "load", "data", "forward", "backward", "optimizer", "save", "evaluation")
"""In the order in which a run comes to them."""
FIRST = ("start", "load")
"""Those that come before the first step: they are the first fault of a run."""
FIRST_STEP = 2
"""Steps that are done before any other fault comes."""
LAUNCHER = -1
"""In place of a rank."""
BEATS = {"save": "checkpoint"}
"""What the watchdog calls a phase, where it has another word."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    about: str
    phases: tuple[str, ...] = PHASES
    launcher: bool = False
    """Whether it can come to the launcher."""
    root: bool = False
    """Whether only root can make it: on a file system or network of its own."""
    number: bool = False
    """Whether it changes a number: it has not struck before that is done."""


KINDS: dict[str, Kind] = {
    "sigkill": Kind("SIGKILL: the system ends the process, as when memory is short", launcher=True),
    "sigterm": Kind("SIGTERM: a scheduler wants the machine back", launcher=True),
    "sigint": Kind("SIGINT: Ctrl-C", launcher=True),
    "sigstop": Kind("SIGSTOP: the process stands still (a launcher is continued after 5 s)", launcher=True),
    "sigsegv": Kind("SIGSEGV: a bug in native code", launcher=True),
    "abort": Kind("SIGABRT: an assertion of native code", launcher=True),
    "exception": Kind("an exception in the thread that trains"),
    "thread": Kind("an exception in one of Ottava's own threads", phases=PHASES[1:]),
    "gil": Kind("native code that keeps the interpreter's lock for ever"),
    "memory": Kind("no memory is left for the process"),
    "disk-full": Kind("no space is left on the disk of the run, for 3 s", phases=PHASES[2:], root=True),
    "disk-frozen": Kind("the file system of the run stands still, until the job has ended", phases=PHASES[2:], root=True),
    "network": Kind("the network is cut, until the job has ended", phases=PHASES[1:], root=True),
    "slow": Kind("a rank is slow: 0.1 s at each of 20 places"),
    "bit-flip": Kind("a bit flips in a weight, or in an activation", phases=("data", "forward"), number=True),
    "nan": Kind("a NaN in a gradient", phases=("forward",), number=True),
}  # fmt: skip
"""The 16 kinds, in the order of the table."""


@dataclass(frozen=True)
class Fault:
    """One fault of one run."""

    number: int
    """Among those of its run, from 0."""
    kind: str
    phase: str
    rank: int
    """LAUNCHER: the launcher."""
    step: int
    """The first step in which it may strike, from 0."""
    seed: int = 0
    """What else is chosen at random: the thread, the weight, the bit."""

    @property
    def where(self) -> str:
        """For a table."""
        return "launcher" if self.rank == LAUNCHER else f"rank {self.rank}"


def draw(
    kinds: Sequence[str],
    count: int,
    seed: int,
    ranks: int,
    steps: int,
    phases: Sequence[str] = PHASES,
    per_run: int = 4,
) -> list[list[Fault]]:
    """`count` faults, by run. Kinds come in turn, phases in turn within each kind, and every fourth that can goes to the launcher.

    steps: of a run; its faults are spread over the first three quarters of them.

        >>> draw(["sigkill", "slow"], count=3, seed=0, ranks=2, steps=40)
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        meant = did_you_mean(unknown[0], KINDS)
        raise ValueError(f"There is no fault {unknown[0]!r}; there are {', '.join(KINDS)}.{meant}")
    if unknown := sorted(set(phases) - set(PHASES)):
        meant = did_you_mean(unknown[0], PHASES)
        raise ValueError(f"There is no phase {unknown[0]!r}; there are {', '.join(PHASES)}.{meant}")
    if steps < per_run + FIRST_STEP:
        raise ValueError(
            f"{per_run} faults come to a run one after the other, from step {FIRST_STEP} on: train.steps ({steps}) must be "
            f"{per_run + FIRST_STEP} or more, or --per-run smaller."
        )
    chance = random.Random(f"{seed} {ranks} {steps}")
    drawn: list[tuple[str, str, int, int]] = []
    turns = {kind: chance.randrange(len(PHASES)) for kind in kinds}
    usable = [kind for kind in kinds if set(KINDS[kind].phases) & set(phases)]
    if not usable:
        raise ValueError(f"None of the faults {', '.join(kinds)} can come in the phases {', '.join(phases)}.")
    for i in range(count):
        kind = usable[i % len(usable)]
        own = [phase for phase in KINDS[kind].phases if phase in phases]
        phase = own[turns[kind] % len(own)]
        turns[kind] += 1
        rank = LAUNCHER if KINDS[kind].launcher and chance.random() < 0.25 else chance.randrange(ranks)
        drawn.append((kind, phase, rank, chance.randrange(2**31)))
    return [_timed(run, steps) for run in _runs(drawn, per_run)]


def _runs(drawn: list[tuple[str, str, int, int]], per_run: int) -> list[list[tuple[str, str, int, int]]]:
    """At most one fault of a run comes before its first step. Those that need a machine of their own share it."""
    early = [fault for fault in drawn if fault[1] in FIRST]
    late = [fault for fault in drawn if fault[1] not in FIRST]
    count = max(len(early), -(-len(drawn) // per_run))
    runs: list[list[tuple[str, str, int, int]]] = [[] for _ in range(count)]
    for i, fault in enumerate([*early, *late]):
        runs[i % count].append(fault)
    return [run for run in runs if run]


def _timed(run: list[tuple[str, str, int, int]], steps: int) -> list[Fault]:
    gap = max(min(3 * steps // 4, steps - FIRST_STEP) // len(run), 1)
    return [
        Fault(i, kind, phase, rank, 0 if phase in FIRST else FIRST_STEP + i * gap, seed)
        for i, (kind, phase, rank, seed) in enumerate(run)
    ]


def write(faults: Sequence[Fault], path: Path) -> None:
    """For the job, which reads it in every rank."""
    path.write_text(json.dumps([asdict(fault) for fault in faults], indent=1) + "\n")


def read(path: Path) -> list[Fault]:
    """What `write` has written."""
    return [Fault(**fault) for fault in json.loads(path.read_text())]
