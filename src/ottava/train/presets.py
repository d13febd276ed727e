"""Configurations with a name. Each is a start: every key can be changed on the command line or in a TOML file."""

from __future__ import annotations

from ottava.train.config import (
    CheckpointSection,
    Config,
    DataSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    PrecisionSection,
    ScheduleSection,
    TrainSection,
)

_LLAMA3: dict = {"vocab_size": 128256, "kv_heads": 8, "rope_theta": 500000.0}
_LONG = CheckpointSection(every=500, keep=3)


def _llama3(name: str, model: ModelSection, lr: float, parallel: ParallelSection, micro_batch: int) -> Config:
    """4M tokens a step in sequences of 8,192, as in training from scratch."""
    return Config(
        model=model,
        data=DataSection(length=8192, document_mask=True, tokenizer="tokenizer.json", files=("corpus.tokens",)),
        optimizer=OptimizerSection(lr=lr),
        schedule=ScheduleSection(warmup_steps=2000),
        parallel=parallel,
        train=TrainSection(
            run=f"runs/{name}", steps=100_000, global_batch=512, micro_batch=micro_batch, evaluate_every=500
        ),
        checkpoint=_LONG,
    )


def presets() -> dict[str, Config]:
    """All of them, by name.

    >>> presets()["llama3-8b"].model.layers
    32
    """
    return {
        # 410k tokens: about two minutes on 2 cores, where FP8 is emulated. Wide, warmed up for long and at a rate below the fastest:
        # so that runs that differ by roundings alone end within a per cent of each other (benchmarks/convergence.py).
        "debug": Config(
            model=ModelSection(hidden_size=256, ffn_hidden_size=768, layers=2, kv_heads=2),
            optimizer=OptimizerSection(lr=1e-3),
            train=TrainSection(steps=200, evaluate_every=50, evaluate_batches=8),
            checkpoint=CheckpointSection(every=50),
        ),
        "llama3-1b": _llama3(
            "llama3-1b",
            ModelSection(
                hidden_size=2048, ffn_hidden_size=8192, layers=16, heads=32, tie_embeddings=True, **_LLAMA3
            ),
            lr=3e-4,
            parallel=ParallelSection(),
            micro_batch=2,
        ),
        "llama3-8b": _llama3(
            "llama3-8b",
            ModelSection(hidden_size=4096, ffn_hidden_size=14336, layers=32, heads=32, **_LLAMA3),
            lr=3e-4,
            parallel=ParallelSection(),
            micro_batch=1,
        ),
        "llama3-70b": _llama3(
            "llama3-70b",
            ModelSection(hidden_size=8192, ffn_hidden_size=28672, layers=80, heads=64, **_LLAMA3),
            lr=1.5e-4,
            parallel=ParallelSection(tp=8),
            micro_batch=1,
        ),
        "gpt2": Config(
            model=ModelSection(
                architecture="gpt", vocab_size=50257, hidden_size=768, ffn_hidden_size=3072, layers=12, heads=12,
                max_length=1024, dropout=0.1, tie_embeddings=True,
            ),
            data=DataSection(length=1024, tokenizer="tokenizer.json", files=("corpus.tokens",)),
            optimizer=OptimizerSection(lr=6e-4),
            schedule=ScheduleSection(warmup_steps=700),
            precision=PrecisionSection(),
            train=TrainSection(run="runs/gpt2", steps=20_000, global_batch=512, micro_batch=16, evaluate_every=500),
            checkpoint=_LONG,
        ),
    }  # fmt: skip
