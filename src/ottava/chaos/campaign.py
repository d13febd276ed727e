"""`Campaign`: one undisturbed run, then runs under faults, each compared with it bit for bit.

A job that ends is started again, as a scheduler would: what it does not survive by itself must end with a documented exit code, in
the time of the watchdog and 30 s. A run that is done has to have the losses and the tensors of the undisturbed one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ottava.chaos import plan as plans
from ottava.chaos.arm import LAUNCHER_FILE, PLAN, changed, struck
from ottava.chaos.ground import Ground, can_make_disks, can_make_networks
from ottava.chaos.plan import KINDS, LAUNCHER, Fault
from ottava.checkpoint.inspect import newest
from ottava.checkpoint.reader import Reader
from ottava.train import exits
from ottava.train.arguments import to_toml
from ottava.train.config import Config
from ottava.train.metrics import FILE, read_metrics

EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
END_S = 30.0
"""What a job that cannot go on may take to end, beyond the watchdog's time."""
SLACK_S = 120.0
"""What a loaded machine may add before a job counts as hung."""
STARTS = 3
"""Starts of a run for each of its faults, at most."""
CODES = {
    exits.NON_FINITE,
    exits.FAILED,
    exits.STALLED,
    exits.NOT_SAVED,
    exits.ABANDONED,
    exits.STOPPED,
    137,
    134,
    139,
    128 + signal.SIGHUP,
}
"""Exit codes that docs/training.md explains. (torchrun has its own: 1, and those of signals to itself.)"""


@dataclass
class Outcome:
    """What a fault did."""

    fault: Fault
    struck: bool = False
    survived: bool = False
    """Whether the job went on by itself."""
    code: int | None = None
    """What the job ended with, if it did."""
    end_s: float | None = None
    """Seconds from the fault to that end."""
    lost_s: float | None = None
    """Seconds from the fault until a step was done that is new."""
    launcher: str = "ottava"
    ranks: int = 0
    run: int = 0
    equal: bool = False
    """Whether the run it came to has the bits of the undisturbed one."""
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**{k: v for k, v in vars(self).items() if k != "fault"}, **vars(self.fault)}


@dataclass
class Campaign:
    """Faults on a configuration. launcher: "ottava" or "torchrun"; work: a folder for the runs; say: told how it goes.

    >>> outcomes = Campaign(config, ranks=2, launcher="ottava", work=Path("/tmp/chaos")).run(runs)
    """

    config: Config
    ranks: int
    launcher: str
    work: Path
    say: Callable[[str], None] = print
    steps_s: float = 0.0
    """Seconds of steps that count, in all runs."""
    wall_s: float = 0.0
    """Seconds of all runs, from their first step."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Kinds that cannot be made here, and why."""
    first: dict[str, Any] = field(default_factory=dict)
    """What the undisturbed run came to."""

    def run(self, runs: Sequence[Sequence[Fault]]) -> list[Outcome]:
        """All runs, one after the other."""
        self.work.mkdir(parents=True, exist_ok=True)
        self.skipped = self._impossible({fault.kind for run in runs for fault in run})
        outcomes = []
        self._undisturbed()
        for number, faults in enumerate(runs):
            possible = [fault for fault in faults if fault.kind not in self.skipped]
            possible = [replace(fault, number=i) for i, fault in enumerate(possible)]
            if possible:
                outcomes += self._disturbed(number, possible)
        return outcomes

    def _impossible(self, kinds: set[str]) -> dict[str, str]:
        found = {}
        for kind in sorted(kind for kind in kinds if KINDS[kind].root):
            reason = can_make_networks() if kind == "network" else can_make_disks(self.work)
            if reason:
                found[kind] = reason
                self.say(f"{kind}: skipped: {reason}.")
        return found

    # ------------------------------------------------------------------------------------------------------------- runs

    def _undisturbed(self) -> None:
        folder = self.work / "undisturbed"
        shutil.rmtree(folder, ignore_errors=True)
        with Ground(folder, disk=False, network=False) as ground:
            job = self._start(ground, [], "undisturbed")
            code = job.wait()
            if code:
                raise ValueError(f"The undisturbed run ended with exit code {code}: {self._log('undisturbed')}")
            self.first = result_of(folder / "run")
        self.say(f"undisturbed: {len(self.first['lines'])} steps")

    def _disturbed(self, number: int, faults: list[Fault]) -> list[Outcome]:
        name = f"run-{number}-{self.launcher}-{self.ranks}"
        shutil.rmtree(self.work / name, ignore_errors=True)
        outcomes = [Outcome(fault, launcher=self.launcher, ranks=self.ranks, run=number) for fault in faults]
        kinds = {fault.kind for fault in faults}
        disk = bool(kinds & {"disk-full", "disk-frozen"})
        with Ground(self.work / name, disk, "network" in kinds) as ground:
            Run(self, ground, name, outcomes).go()
        for outcome in outcomes:
            self.say(describe(outcome))
        return outcomes

    def _start(self, ground: Ground, faults: list[Fault], name: str) -> subprocess.Popen[bytes]:
        marks = self.work / f"{name}.faults"
        marks.mkdir(exist_ok=True)
        train = replace(self.config.train, run=str(ground.folder / "run"))
        config = replace(self.config, train=train, parallel=replace(self.config.parallel, ranks=self.ranks))
        path = marks / "config.toml"
        if not path.exists():
            path.write_text(to_toml(config))
            plans.write(faults, marks / PLAN)
        (marks / LAUNCHER_FILE).unlink(missing_ok=True)
        words = [sys.executable]
        if self.launcher == "torchrun":
            words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        words += ["-m", "ottava.chaos.job", str(path), str(marks)]
        with (self.work / f"{name}.log").open("ab") as log:
            job = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, preexec_fn=ground.enter)
        (marks / LAUNCHER_FILE).write_text(str(job.pid))
        return job

    def _log(self, name: str) -> str:
        return (self.work / f"{name}.log").read_text(errors="replace")[-2000:]


class Run:
    """One run under faults: the job is watched, and started again when it ends too early."""

    def __init__(self, campaign: Campaign, ground: Ground, name: str, outcomes: list[Outcome]) -> None:
        self.campaign, self.ground, self.name, self.outcomes = campaign, ground, name, outcomes
        self.marks = campaign.work / f"{name}.faults"
        shutil.rmtree(self.marks, ignore_errors=True)
        self.folder = ground.folder / "run"
        self._began: float | None = None
        self._stopped_at: dict[int, int] = {}

    def go(self) -> None:
        """Until it is done, or cannot be."""
        code: int | None = None
        for _ in range(STARTS * len(self.outcomes) + 1):
            job = self.campaign._start(self.ground, [o.fault for o in self.outcomes], self.name)
            try:
                code = self._watch(job)
            finally:
                end(job, self.marks)
            if code == exits.DONE or code is None:
                break
            self.ground.mend()
        self._judge(code)

    def _watch(self, job: subprocess.Popen[bytes]) -> int | None:
        """The exit code of the job; None: it hung, and was killed."""
        last_progress, furthest = time.monotonic(), self._furthest()
        while (code := job.poll()) is None:
            time.sleep(0.05)
            if (now := self._furthest()) != furthest:
                last_progress, furthest = time.monotonic(), now
            if self._began is None and furthest:
                self._began = time.time()
            self._look(job, furthest)
            if time.monotonic() - last_progress > self._patience():
                current = self._current()
                if current is not None:
                    current.note = "hung"
                return None
        code = 128 - code if code < 0 else code
        self._look(job, self._furthest())
        current = self._current()
        if current is not None and code != exits.DONE and current.code is None:
            current.code, current.end_s = code, time.time() - self._mark(current)["time"]
            current.survived, current.lost_s = False, None
            self._stopped_at[current.fault.number] = self._furthest()
        return code

    def _look(self, job: subprocess.Popen[bytes], furthest: int) -> None:
        """At what has struck, and whether the run has got beyond it."""
        for outcome in self.outcomes:
            if not outcome.struck and struck(self.marks, outcome.fault.number).is_file():
                outcome.struck = outcome.survived = True
                if outcome.fault.kind == "disk-full":
                    self.ground.mend_later(3.0)
                if outcome.fault.kind == "sigstop" and outcome.fault.rank == LAUNCHER:
                    time.sleep(5.0)
                    os.kill(job.pid, signal.SIGCONT)
            if outcome.struck and outcome.lost_s is None and furthest > self._step_of(outcome):
                outcome.lost_s = time.time() - self._mark(outcome)["time"]

    def _current(self) -> Outcome | None:
        """The last fault that struck."""
        hit = [outcome for outcome in self.outcomes if outcome.struck]
        return hit[-1] if hit else None

    def _mark(self, outcome: Outcome) -> dict[str, Any]:
        return json.loads(struck(self.marks, outcome.fault.number).read_text() or '{"time": 0, "step": 0}')

    def _step_of(self, outcome: Outcome) -> int:
        """Steps that were done when it struck, or, if the job ended by it (perhaps after saving), when that ended."""
        return max(self._mark(outcome)["step"], self._stopped_at.get(outcome.fault.number, 0))

    def _furthest(self) -> int:
        """Steps that are done, as far as the file says."""
        try:
            content = (self.folder / FILE).read_bytes()
            return int(json.loads(content[: content.rfind(b"\n")].rpartition(b"\n")[2])["step"])
        except (OSError, ValueError, KeyError):
            return 0

    def _patience(self) -> float:
        health = self.campaign.config.health
        return max(health.watchdog_s, health.watchdog_start_s, health.watchdog_save_s) + END_S + SLACK_S

    def _judge(self, code: int | None) -> None:
        """Whether the run is that of the undisturbed job."""
        equal, why = False, f"the job ended with exit code {code}"
        if code == exits.DONE:
            found = result_of(self.folder)
            equal, why = same(found, self.campaign.first)
            self.campaign.steps_s += sum(line["step_s"] for line in found["lines"][1:])
            self.campaign.wall_s += time.time() - (self._began or time.time())
        for outcome in self.outcomes:
            if KINDS[outcome.fault.kind].number and not changed(self.marks, outcome.fault.number).exists():
                outcome.struck = False
            outcome.equal = equal
            if not equal and not outcome.note:
                outcome.note = why


def end(job: subprocess.Popen[bytes], marks: Path) -> None:
    """Nothing of a job may be left. torchrun puts its ranks into sessions of their own, but all of a job have its folder on their
    command lines."""
    for _ in range(2):  # one may be on its way
        for pid in list(_with_words(str(marks))):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            job.wait(timeout=10)


def _with_words(word: str) -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with suppress(OSError):
                if word.encode() in (path / "cmdline").read_bytes().split(b"\0"):
                    yield int(path.name)


# --------------------------------------------------------------------------------------------------------------- comparison


def result_of(run: Path) -> dict[str, Any]:
    """Lines of metrics and tensors of a run that is done."""
    reader = Reader(newest(run / "checkpoints"))
    names = sorted(name for name in reader.entries if not name.startswith("rng."))
    return {"lines": list(read_metrics(run / FILE)), "tensors": {name: reader.read(name) for name in names}}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[bool, str]:
    """Whether two runs have the same losses and tensors, bit for bit; and the first difference."""
    for mine, theirs in zip(found["lines"], wanted["lines"]):
        for key in EXACT:
            if mine.get(key) != theirs.get(key):
                return False, f"step {theirs['step']}: {key} is {mine.get(key)}, undisturbed {theirs.get(key)}"
    if len(found["lines"]) != len(wanted["lines"]):
        return False, f"{len(found['lines'])} steps, undisturbed {len(wanted['lines'])}"
    if found["tensors"].keys() != wanted["tensors"].keys():
        return False, "other tensors"
    for name, tensor in found["tensors"].items():
        if not torch.equal(_bytes(tensor), _bytes(wanted["tensors"][name])):
            return False, f"{name} differs"
    return True, ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def describe(outcome: Outcome) -> str:
    """A line for people."""
    fault = outcome.fault
    what = f"{fault.kind:<12} {fault.phase:<11} {fault.where:<9} "
    if not outcome.struck:
        return what + "did not strike"
    if outcome.code is not None:
        how = f"ended with exit code {outcome.code} in {outcome.end_s or 0:.1f} s, started again"
    else:
        how = "survived"
    lost = f", {outcome.lost_s:.1f} s lost" if outcome.lost_s is not None else ""
    return what + how + lost + (", bits equal" if outcome.equal else f", NOT EQUAL: {outcome.note}")
