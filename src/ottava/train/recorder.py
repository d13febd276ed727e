"""`Recorder`: turns what a step did into its line of metrics, over all ranks."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from ottava.notices import warn_once
from ottava.overlap.waits import TENSOR
from ottava.train import rank_log
from ottava.train.clock import PARTS, Span
from ottava.train.communication import CommunicationWatch, Seen
from ottava.train.config import Config
from ottava.train.flops import Bound, Peak, device_peak, measure_peak, quantized_precision
from ottava.train.metrics import FILE, Metrics, Sink, StepMetrics, read_metrics
from ottava.train.model import DistributedModel
from ottava.train.prometheus import Prometheus
from ottava.train.restarts import note_restart
from ottava.train.run_folder import next_attempt
from ottava.train.sinks import Console, TensorBoard, WandB
from ottava.train.world import World

GIB = 2.0**30
Report = Callable[[int, StepMetrics | None], None]
"""Called in every rank after every step, with its number and, in the leading rank, its line."""


class _Step(NamedTuple):
    """What `Recorder.keep` was told."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    span: Span
    validation: float | None
    event: str | None


class Recorder:
    """Every rank calls everything; the leading one writes.

    >>> recorder = Recorder(config, world, model, done=0)
    >>> recorder.keep(1, loss, norm, lr, clock.stop(), validation=None, event=None)
    >>> recorder.write()
    """

    def __init__(
        self, config: Config, world: World, model: DistributedModel, done: int, report: Report | None = None
    ) -> None:
        self.config, self.world, self.model, self._report = config, world, model, report
        self.path = config.run_folder / FILE
        self.bound = _bound(config, world, model)
        rank_log.begin()
        self.watch = CommunicationWatch(config, world, model)
        self._event: str | None = None
        self._attempt = 0
        self._kept: _Step | None = None
        self._metrics: Metrics | None = None
        if done < config.train.steps:
            self._metrics = world.on_rank0(lambda: self._open(done))

    def keep(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        span: Span,
        validation: float | None,
        event: str | None,
    ) -> None:
        """One step, to be written by the next `write`: when the device has done it, and is busy with the next. Every rank calls it."""
        self.write()  # two at once, where the host has caught up with the device
        self._kept = _Step(step, loss, grad_norm, lr, span, validation, event)

    def write(self) -> None:
        """The line of the step that is kept, if there is one. Every rank calls it."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            mine = self._measured(kept)
            slowest = dict(zip(mine, self.world.max(list(mine.values()))))
            work = mine["forward_s"] + mine["backward_s"]
            seen = self.watch.see(kept.step, slowest["step_s"], slowest["communication_s"], work)
            self._write(kept, slowest, seen)
            if self._report is not None:
                self._report(kept.step, None if self._metrics is None else self._metrics.newest)

    def _measured(self, kept: _Step) -> dict[str, float]:
        """What this rank measured, in the same order on every rank: seconds, of all and by part, bytes of memory and of what was sent."""
        seconds, parts = kept.span.read()
        allocated, reserved = memory(self.world.device)
        return {
            "step_s": seconds,
            **{f"{name}_s": parts[name] for name in PARTS},
            "tp_exposed_s": kept.span.of(TENSOR),
            "tp_sent": float(kept.span.tp_bytes),
            "allocated": allocated,
            "reserved": reserved,
        }

    def _write(self, kept: _Step, slowest: dict[str, float], seen: Seen) -> None:
        """slowest: the largest of each that a rank measured."""
        if self._metrics is None:
            return
        seconds = slowest["step_s"]
        split_tensors = self.config.parallel.tp > 1
        tokens = self.config.train.global_batch * self.config.data.length
        rate = tokens / seconds
        each = rate / self.world.size
        split: dict[str, float | None] = {f"{name}_s": slowest[f"{name}_s"] for name in PARTS}
        if self.config.parallel.strategy in ("ddp", "fsdp1") and self.world.size > 1:
            split["communication_s"] = None  # torch waits where nobody can look
        event, self._event = "; ".join(filter(None, (self._event, kept.event, seen.event))) or None, None
        self._metrics.record(
            StepMetrics(
                kept.step,
                kept.loss,
                kept.grad_norm,
                kept.lr,
                tokens=kept.step * tokens,
                tokens_per_s=rate,
                step_s=seconds,
                tflops_per_gpu=self.model.flops.causal * each * 1e-12,
                mfu=self.bound.mfu(self.model.flops, each),
                mfu_full=self.bound.mfu(self.model.flops, each, causal=False),
                mfu_basis=self.bound.basis(),
                peak_allocated_gib=slowest["allocated"] / GIB if self.world.device.type == "cuda" else None,
                peak_reserved_gib=slowest["reserved"] / GIB,
                slow_rank=seen.slow_rank,
                slow_rank_times=seen.slow_rank_times,
                reduction_error=seen.reduction_error,
                tp_exposed_s=slowest["tp_exposed_s"] if split_tensors else None,
                tp_sent_mb=slowest["tp_sent"] * 1e-6 if split_tensors else None,
                validation_loss=kept.validation,
                attempt=self._attempt,
                event=event,
                **split,  # type: ignore[arg-type]
            )
        )

    def _open(self, done: int) -> Metrics:
        self._attempt = next_attempt(self.config.run_folder)
        in_place = self.world.generation > 0
        note_restart(self.config.run_folder, self._attempt, done, self.world.cause, in_place)
        return Metrics(self.config.run_folder, _sinks(self.config), first_step=done + 1, patient=in_place)

    def lines(self) -> list[dict[str, Any]]:
        """Of all steps of the run so far. In the leading rank."""
        if self._metrics is not None:
            return self._metrics.lines()
        return list(read_metrics(self.path)) if self.path.is_file() else []

    def note(self, event: str) -> None:
        """Something that happened between steps: the next line says it."""
        self._event = "; ".join(filter(None, (self._event, event)))

    def rewind(self, done: int, event: str) -> None:
        """The run went back to where `done` steps are done; the next line says why."""
        self._event, self._kept = event, None
        if self._metrics is not None:
            self._metrics.rewind(done + 1)

    def close(self) -> None:
        """Closes files and sinks. A step that is still kept (the run ends with an error) is told as this rank saw it."""
        if self._metrics is not None:
            if self._kept is not None:
                self._write(self._kept, self._measured(self._kept), Seen())
            self._metrics.close()


def memory(device: torch.device) -> tuple[float, float]:
    """(most bytes that were allocated, most that the allocator held); of a CPU process (0, most that was resident)."""
    if device.type == "cuda":
        found = torch.cuda.memory_stats_as_nested_dict(device)  # once; and the flat dict takes twice as long
        return tuple(float(found[kind]["all"]["peak"]) for kind in ("allocated_bytes", "reserved_bytes"))  # type: ignore[return-value]
    unit = 1 if sys.platform == "darwin" else 1024
    return 0.0, float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _bound(config: Config, world: World, model: DistributedModel) -> Bound:
    """What MFU is measured against."""
    device = world.device
    plain = "float32" if config.precision.dtype(device.type) == torch.float32 else "bf16"
    quantized = quantized_precision(model.recipe)
    peak: Peak | None
    if config.metrics.measure_peak:
        peak = measure_peak(device, plain, quantized)
    else:
        peak = device_peak(torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine())
    plain_share = config.precision.unquantized(config.model.layers) / config.model.layers if quantized else 0.0
    bound = Bound(world.share(peak), plain, quantized, plain_share, config.precision.fp8_head)
    if config.gate.min_mfu is not None and bound.seconds_per_token(model.flops) is None:
        raise ValueError(
            f"gate.min_mfu ({config.gate.min_mfu}) cannot be judged: the peak of this device is not known. "
            "--metrics.measure-peak measures one."
        )
    return bound


def _sinks(config: Config) -> list[Sink]:
    section, folder = config.metrics, config.run_folder
    wanted: list[Callable[[], Sink]] = [lambda: Console(config.train.steps, section.console_every)]
    if section.tensorboard:
        wanted.append(lambda: TensorBoard(folder))
    if section.wandb != "off":
        wanted.append(lambda: WandB(folder, section.wandb_project, section.wandb, asdict(config)))
    if section.prometheus_port is not None:
        port = section.prometheus_port
        wanted.append(lambda: Prometheus(port, section.mfu_baseline, section.prometheus_address))
    sinks = []
    for make in wanted:
        try:
            sinks.append(make())
        except ValueError:  # a mistake in the configuration: a package that is missing, a port that is taken
            raise
        except Exception as error:
            warn_once(
                f"ottava train: a sink of metrics cannot be had, and is left out: {type(error).__name__}: {error}"
            )
    return sinks
