"""Models and batches with a name: what `ottava bench step` and `bench gemm` measure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ottava.train.arguments import preset
from ottava.train.config import (
    CheckpointSection,
    Config,
    DataSection,
    MetricsSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    TrainSection,
)


@dataclass(frozen=True)
class Workload:
    """A model, `batch` sequences of `length` tokens a step, and how many steps the reference can make."""

    model: ModelSection
    batch: int
    length: int
    reference_steps: int = 3
    """1 where weights, gradients and moments of the reference in float32 do not fit on one GPU: then it makes gradients alone."""
    lr: float = 2e-6
    """Small enough for the loss to fall from the first step on."""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.length


def workloads() -> dict[str, Workload]:
    """All of them, by name.

    >>> workloads()["8b-8"].model.layers
    8
    """
    one, eight = preset("llama3-1b").model, preset("llama3-8b").model
    tiny = ModelSection(
        vocab_size=512, hidden_size=128, ffn_hidden_size=256, layers=2, heads=4, kv_heads=2, tie_embeddings=True
    )
    return {
        "1b": Workload(one, batch=4, length=4096),
        "8b-8": Workload(replace(eight, layers=8), batch=1, length=8192),
        "8b": Workload(eight, batch=1, length=8192, reference_steps=1),
        "tiny": Workload(tiny, batch=2, length=64, lr=3e-4),
    }


def train_config(workload: Workload, token_file: str, run: str) -> Config:
    """What `ottava train` would run for this workload: no evaluation, sample or checkpoint comes between the steps."""
    return Config(
        model=workload.model,
        data=DataSection(files=(token_file,), length=workload.length, validation_fraction=0.0),
        optimizer=OptimizerSection(lr=workload.lr),
        schedule=ScheduleSection(kind="constant", warmup_steps=0),
        train=TrainSection(
            run=run, steps=10**6, global_batch=workload.batch, micro_batch=workload.batch, evaluate_every=0, sample_tokens=0
        ),
        checkpoint=CheckpointSection(every=0),
        metrics=MetricsSection(console_every=10**6, fp8_every=0),
    )  # fmt: skip
