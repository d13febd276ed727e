"""`Recorder`: turns what a step did into its line of metrics, over all ranks."""

from __future__ import annotations

import platform
import resource
import sys
from dataclasses import asdict

import torch

from ottava.train.clock import PARTS
from ottava.train.config import Config
from ottava.train.flops import Bound, Peak, device_peak, measure_peak, quantized_precision
from ottava.train.metrics import FILE, Metrics, Sink, StepMetrics
from ottava.train.model import SpreadModel
from ottava.train.prometheus import Prometheus
from ottava.train.run_folder import next_attempt
from ottava.train.sinks import Console, TensorBoard, WandB
from ottava.train.world import World

GIB = 2.0**30


class Recorder:
    """Every rank calls `record`; the leading one writes.

    >>> recorder = Recorder(config, world, model, done=0)
    >>> recorder.record(1, loss, norm, lr, seconds, clock.read(), validation=None, event=None)
    """

    def __init__(self, config: Config, world: World, model: SpreadModel, done: int) -> None:
        self.config, self.world, self.model = config, world, model
        self.path = config.run_folder / FILE
        self.bound = _bound(config, world, model)
        self._event: str | None = None
        self._attempt = 0
        self._metrics: Metrics | None = None
        if done < config.train.steps:
            self._metrics = world.lead(lambda: self._open(done))

    def record(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        seconds: float,
        parts: dict[str, float],
        validation: float | None,
        event: str | None,
    ) -> None:
        """One step. seconds: its time in this rank; parts: by `clock.PARTS`."""
        allocated, reserved = memory(self.world.device)
        slowest = self.world.max([seconds, allocated, reserved, *(parts[name] for name in PARTS)])
        if self._metrics is None:
            return
        seconds, allocated, reserved = slowest[:3]
        tokens = self.config.train.global_batch * self.config.data.length
        rate = tokens / seconds
        each = rate / self.world.size
        split = {f"{name}_s": value for name, value in zip(PARTS, slowest[3:])}
        event, self._event = "; ".join(filter(None, (self._event, event))) or None, None
        self._metrics.record(
            StepMetrics(
                step,
                loss,
                grad_norm,
                lr,
                tokens=step * tokens,
                tokens_per_s=rate,
                step_s=seconds,
                tflops_per_gpu=self.model.flops.causal * each * 1e-12,
                mfu=self.bound.mfu(self.model.flops, each),
                mfu_full=self.bound.mfu(self.model.flops, each, causal=False),
                mfu_basis=self.bound.basis(),
                peak_allocated_gib=allocated / GIB if self.world.device.type == "cuda" else None,
                peak_reserved_gib=reserved / GIB,
                validation_loss=validation,
                attempt=self._attempt,
                event=event,
                **split,  # type: ignore[arg-type]
            )
        )

    def _open(self, done: int) -> Metrics:
        self._attempt = next_attempt(self.config.run_folder)
        return Metrics(self.config.run_folder, _sinks(self.config), first_step=done + 1)

    def rewind(self, done: int, event: str) -> None:
        """The run went back to where `done` steps are done; the next line says why."""
        self._event = event
        if self._metrics is not None:
            self._metrics.rewind(done + 1)

    def close(self) -> None:
        """Closes files and sinks."""
        if self._metrics is not None:
            self._metrics.close()


def memory(device: torch.device) -> tuple[float, float]:
    """(most bytes that were allocated, most that the allocator held); of a CPU process (0, most that was resident)."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)), float(torch.cuda.max_memory_reserved(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return 0.0, float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _bound(config: Config, world: World, model: SpreadModel) -> Bound:
    """What MFU is measured against."""
    device = world.device
    plain = "float32" if config.precision.dtype(device.type) == torch.float32 else "bf16"
    quantized = quantized_precision(model.recipe)
    peak: Peak | None
    if config.metrics.measure_peak:
        peak = measure_peak(device, plain, quantized)
    else:
        peak = device_peak(torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine())
    bound = Bound(world.share(peak), plain, quantized)
    if config.gate.min_mfu is not None and bound.seconds_per_token(model.flops) is None:
        raise ValueError(
            f"gate.min_mfu ({config.gate.min_mfu}) cannot be judged: the peak of this device is not known. "
            "--metrics.measure-peak measures one."
        )
    return bound


def _sinks(config: Config) -> list[Sink]:
    section, folder = config.metrics, config.run_folder
    sinks: list[Sink] = [Console(config.train.steps, section.console_every)]
    if section.tensorboard:
        sinks.append(TensorBoard(folder))
    if section.wandb != "off":
        sinks.append(WandB(folder, section.wandb_project, section.wandb, asdict(config)))
    if section.prometheus_port is not None:
        sinks.append(Prometheus(section.prometheus_port, section.mfu_baseline))
    return sinks
