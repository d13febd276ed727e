"""Who is told about each step besides metrics.jsonl: the console, TensorBoard, Weights & Biases. (Prometheus: prometheus.py.)

Packages are imported when a sink is made; one that is missing is an error that says what to install.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from textwrap import shorten
from typing import Any, TextIO

from ottava.train.console import say
from ottava.train.metrics import StepMetrics, write_whole

LONGEST_EVENT = 100
"""Letters of an event in a line of the console: what is longer was a warning of its own, and is whole in metrics.jsonl."""


def missing(what: str, package: str, error: ImportError) -> ValueError:
    """A package that is not installed."""
    return ValueError(f"{what} needs the package `{package}`: pip install 'ottava[train]' or {package} ({error}).")


def numbers(metrics: StepMetrics) -> dict[str, float]:
    """What of a step can be drawn."""
    return {k: v for k, v in vars(metrics).items() if k != "step" and isinstance(v, int | float)}


def one_line(metrics: StepMetrics, steps: int) -> str:
    """A step as people read it.

    >>> one_line(StepMetrics(7, 3.2, 0.9, 3e-4, 14336, 5120.0, 0.4), steps=300)
    'step   7/300  loss 3.2000  grad 0.90  lr 3.00e-04  5,120 tok/s'
    """
    m = metrics
    parts = [
        f"step {m.step:>{len(str(steps))}}/{steps}",
        f"loss {m.loss:.4f}",
        f"grad {m.grad_norm:.2f}",
        f"lr {m.lr:.2e}",
    ]
    parts.append(f"{m.tokens_per_s:,.0f} tok/s")
    if m.mfu is not None:
        parts.append(f"MFU {m.mfu:.1%}")
    if m.peak_reserved_gib is not None:
        parts.append(f"{m.peak_reserved_gib:.1f} GiB")
    if m.validation_loss is not None:
        parts.append(f"validation {m.validation_loss:.4f}")
    if m.event is not None:
        parts.append(shorten(m.event, LONGEST_EVENT, placeholder=" ..."))
    return "  ".join(parts)


class Console:
    """A progress bar on a terminal; elsewhere a line every `every` steps, and for each step on which something happened."""

    def __init__(self, steps: int, every: int = 10, stream: TextIO | None = None) -> None:
        self.steps, self.every = steps, every
        self.stream = stream or sys.stdout
        self._progress: Any = _rich_progress(self.stream) if self.stream.isatty() else None
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("", total=steps, line="")

    def record(self, metrics: StepMetrics) -> None:
        """One step."""
        line = one_line(metrics, self.steps)
        notable = metrics.event is not None or metrics.validation_loss is not None
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, line=line)
            if notable:
                self._progress.console.print(line, highlight=False)
        elif notable or metrics.step % self.every == 0 or metrics.step in (1, self.steps):
            say(line, self.stream)

    def close(self) -> None:
        """Leaves the last line standing."""
        if self._progress is not None:
            self._progress.stop()


def _rich_progress(stream: TextIO) -> Any:
    try:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise missing("The progress display", "rich", error) from error
    columns = (TextColumn("{task.fields[line]}"), BarColumn(bar_width=20), TimeRemainingColumn())
    return Progress(*columns, console=RichConsole(file=stream))


class TensorBoard:
    """Scalars in RUN/tensorboard: one event a step has them all, since each wakes the thread that writes."""

    def __init__(self, run: Path) -> None:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import FileWriter
        except ImportError as error:
            raise missing("metrics.tensorboard", "tensorboard", error) from error
        self._summary = Summary
        self._writer = FileWriter(str(run / "tensorboard"))

    def record(self, metrics: StepMetrics) -> None:
        """One step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(metrics).items()]
        self._writer.add_summary(self._summary(value=values), metrics.step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()


class WandB:
    """Weights & Biases, offline in RUN/wandb or online. A resumed run continues under the same id."""

    def __init__(self, run: Path, project: str, mode: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise missing("metrics.wandb", "wandb", error) from error
        kept = run / "wandb-id"
        identity = kept.read_text().strip() if kept.is_file() and not kept.is_symlink() else uuid.uuid4().hex[:8]
        write_whole(kept, identity)
        options: dict[str, Any] = {"project": project, "mode": mode, "config": config, "name": run.name}
        self._run = wandb.init(dir=str(run), id=identity, resume="allow", **options)

    def record(self, metrics: StepMetrics) -> None:
        """One step."""
        self._run.log(numbers(metrics), step=metrics.step)

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()
