"""Metrics of a run: a line of JSON a step in RUN/metrics.jsonl, and sinks that are told the same.

A number that is not finite is written as null: JSON has no NaN. A run that is resumed from step N drops the lines from N on, so the
file tells each step once.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ottava.checkpoint.names import sync_directory
from ottava.notices import log, warn_once
from ottava.untrusted.files import MOST_LINE_BYTES, open_to_append_bytes, read_lines

FILE = "metrics.jsonl"
TEXTS = ("event", "mfu_basis")
MOST = 1e30
"""Beyond it a number is a mistake, and no axis."""


@dataclass(frozen=True)
class StepMetrics:
    """One step, over all ranks. Fields that are None are left out of the line.

    >>> StepMetrics(step=1, loss=5.5, grad_norm=1.2, lr=3e-4, tokens=2048, tokens_per_s=1e4, step_s=0.2).line()
    '{"step": 1, "loss": 5.5, ...}'
    """

    step: int
    """From 1: steps that are done."""
    loss: float
    """What was minimized: a mean over the tokens of the global batch (with z-loss, if that is on)."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Tokens that the run has trained on so far."""
    tokens_per_s: float
    """Over all ranks."""
    step_s: float
    """Seconds of the step and of the checkpoint before it. Evaluation and samples do not count."""
    tflops_per_gpu: float | None = None
    """Model FLOPs (causal) a second and rank, in units of 1e12."""
    mfu: float | None = None
    mfu_full: float | None = None
    """With attention over the whole square."""
    mfu_basis: str | None = None
    """What the two are measured against (see flops.py)."""
    peak_allocated_gib: float | None = None
    """The largest of all ranks, so far; None on a CPU."""
    peak_reserved_gib: float | None = None
    """The same of what the allocator holds; on a CPU the resident memory of the process."""
    data_s: float | None = None
    """Parts of step_s, of the slowest rank: waiting for data, ..."""
    forward_s: float | None = None
    backward_s: float | None = None
    communication_s: float | None = None
    """... communication that nothing hid, ..."""
    tp_exposed_s: float | None = None
    """The part of it that was waited for between tensor-parallel ranks: what their overlap did not hide; None without them."""
    tp_sent_mb: float | None = None
    """What a rank sent to them in the step, in units of 1e6 bytes."""
    optimizer_s: float | None = None
    """The norm of gradients, and the update."""
    checkpoint_s: float | None = None
    """Of the checkpoint before this step; one that is written in the background counts as long as it holds training up."""
    slow_rank: int | None = None
    """The rank whose own work takes far longer than the others'; told every few steps."""
    slow_rank_times: float | None = None
    """How many times the usual."""
    reduction_error: float | None = None
    """Of gradients that are summed over ranks in bfloat16, beside a float32 sum, relative; looked at now and then."""
    validation_loss: float | None = None
    attempt: int = 0
    """Restarts of the run before this step."""
    event: str | None = None
    """What happened besides: "skipped: non-finite loss", "loss spike", ..."""

    def line(self) -> str:
        """As JSON, without a line end."""
        return json.dumps({k: finite(v) for k, v in vars(self).items() if v is not None}, allow_nan=False)


NUMBERS = tuple(field.name for field in fields(StepMetrics) if field.name not in TEXTS)


def finite(value: Any) -> Any:
    """The value, or None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_number(value: Any) -> bool:
    """Whether it can be counted with and drawn. NaN and infinity are gaps: a chart knows them."""
    if type(value) is float and not math.isfinite(value):
        return True
    return type(value) in (int, float) and abs(value) <= MOST


class Sink(Protocol):
    """Something that is told every step: a console, TensorBoard, Weights & Biases, Prometheus."""

    def record(self, metrics: StepMetrics) -> None:
        """One step."""

    def close(self) -> None:
        """The run is over."""


class Metrics:
    """Writes RUN/metrics.jsonl and tells the sinks. On one rank only. Nothing that fails here stops a run.

    first_step: the step that comes next; lines of this and later steps, from before a restart, are dropped.
    patient: a disk that does not let us now may do so later. Without it OSError is raised.

        >>> with Metrics(Path("runs/debug"), sinks=[Console()]) as metrics:
        ...     metrics.record(step_metrics)
    """

    def __init__(self, run: Path, sinks: Iterable[Sink] = (), first_step: int = 1, patient: bool = False) -> None:
        self.path = run / FILE
        self.sinks = list(sinks)
        self.newest: StepMetrics | None = None
        """The line that was recorded last."""
        self._unwritten = b""
        """What the disk has not taken yet: lines, the first of which may be there in part."""
        self._waiting: list[StepMetrics] = []
        """The same, as they were recorded."""
        self._file: BinaryIO | None = None
        self._cut: int | None = first_step
        """Lines of this step and later ones are to be dropped, before another is written; None: they were."""
        run.mkdir(parents=True, exist_ok=True)
        if patient:
            self._write()
        else:
            self._cut_and_open()

    def record(self, metrics: StepMetrics) -> None:
        """One step. The line is in the file when this returns, so that it outlives a killed process; or it is tried with the next."""
        self.newest = metrics
        self._unwritten += (metrics.line() + "\n").encode()
        self._waiting.append(metrics)
        self._write()
        for sink in list(self.sinks):
            self._tell(sink, lambda: sink.record(metrics))  # noqa: B023

    def _cut_and_open(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._cut is not None:
            keep_before(self.path, self._cut)  # and the part of a line that a full disk took
        self._file, self._cut = open_to_append_bytes(self.path), None

    def _write(self) -> None:
        try:
            if self._cut is not None or self._file is None:
                self._cut_and_open()
            assert self._file is not None
            if self._unwritten and not self._is_in_place():
                self._open_anew()
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._waiting = []
        except OSError as error:
            warn_once(
                f"{self.path} cannot be written: {error.strerror}. Its lines are kept and written when they can be."
            )

    def _is_in_place(self) -> bool:
        """Whether the file that is written is the one that others find: somebody may have removed or moved it, or its folder."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _open_anew(self) -> None:
        warn_once(
            f"{self.path} was removed or replaced under the run: lines go on in the file of that name, those before are not in it."
        )
        assert self._file is not None
        file = open_to_append_bytes(self.path)
        self._file.close()
        self._file = file
        self._unwritten = "".join(f"{metrics.line()}\n" for metrics in self._waiting).encode()

    def _tell(self, sink: Sink, work: Callable[[], None]) -> None:
        """A sink that fails is told nothing more."""
        try:
            work()
        except Exception as error:
            name = type(sink).__name__
            warn_once(f"ottava train: {name} failed and is left out from now on: {type(error).__name__}: {error}")
            self.sinks.remove(sink)

    def lines(self) -> list[dict[str, Any]]:
        """Of all steps, also those that the disk has not taken."""
        waiting = [json.loads(metrics.line()) for metrics in self._waiting]
        first = min(waiting[0]["step"] if waiting else math.inf, math.inf if self._cut is None else self._cut)
        written = read_metrics(self.path) if self.path.is_file() else ()
        return [line for line in written if line["step"] < first] + waiting

    def rewind(self, first_step: int) -> None:
        """The step that comes next is `first_step` (again): later lines are dropped."""
        self._write()
        self._cut = first_step if self._cut is None else min(self._cut, first_step)
        lines = read_metrics(self.path) if self.path.is_file() else ()
        there = {line["step"] for line in lines if line["step"] < self._cut}
        self._waiting = [
            metrics for metrics in self._waiting if metrics.step < first_step and metrics.step not in there
        ]
        self._unwritten = "".join(f"{metrics.line()}\n" for metrics in self._waiting).encode()
        self._write()

    def close(self) -> None:
        """Closes file and sinks."""
        self._write()
        if self._waiting:
            steps = f"{self._waiting[0].step} to {self._waiting[-1].step}"
            log.warning("%s: the lines of steps %s could not be written, and are lost.", self.path, steps)
        if self._file is not None:
            self._file.close()
        for sink in list(self.sinks):
            self._tell(sink, sink.close)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file. A last line that a killed process left unfinished is passed over; so is a damaged one, with a warning.

    >>> [line["loss"] for line in read_metrics(Path("runs/debug/metrics.jsonl"))]
    """
    for _, found in _lines(path):
        if found is not None:
            yield found


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(bytes, what they say) of each line but an unfinished last one; None: damaged, which is said once."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            found = json.loads(line)
            _check(found)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                return  # the last one
            warn_once(f"{path}, line {number}: not a line of metrics, passed over ({error}).")
            found = None
        yield line, found


def _check(found: Any) -> None:
    """ValueError for what is no line: what counts with it later must not fail on a text in the place of a number."""
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise ValueError("no step in it")
    for name in NUMBERS:
        if not (found.get(name) is None or is_number(found[name])):
            raise ValueError(f"{name} is no number")
    if type(found.get("attempt", 0)) is not int:
        raise ValueError("attempt is no number")


def keep_before(path: Path, step: int) -> None:
    """Drops the lines of `step` and later ones. The file is cut where they are its end, which takes no space on a full disk; otherwise
    it is replaced in one go. Damaged lines go to FILE.damaged beside it."""
    beside = path.with_name(f"{path.name}.damaged")
    for link in (path, beside):
        if link.is_symlink():  # it may lead to any file of the user's, which is neither read nor written
            warn_once(f"{link} is a link, which a run does not follow: it is removed.")
            link.unlink()
    if not path.exists():
        return
    lines = list(_lines(path))
    if damaged := b"".join(line for line, found in lines if found is None):
        with open_to_append_bytes(beside) as file:
            file.write(damaged)
    # A last line may lack its end, which the disk did not take any more; the next one must not be written behind it.
    kept = [line.rstrip(b"\n") + b"\n" for line, found in lines if found is not None and found["step"] < step]
    content = b"".join(kept)
    if kept != [line for line, _ in lines[: len(kept)]]:
        write_whole(path, content)
    elif path.stat().st_size != len(content):
        os.truncate(path, len(content))


def write_whole(path: Path, content: bytes | str) -> None:
    """A file that is either the old one or the new one, never half of it, also after a power cut."""
    if path.exists() and not path.is_file():  # renaming would take the place of a device, such as /dev/null, too
        raise OSError(errno.EEXIST, "what is there is no file", str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)
