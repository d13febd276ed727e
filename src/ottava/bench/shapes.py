"""Models and batches with a name: what `ottava bench step` and `bench gemm` measure."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

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


def override(config: Config, text: str) -> Config:
    """`config` with keys changed: "precision.recipe=DelayedScaling,train.compile=true".

    >>> override(Config(), "optimizer.lr=0.1").optimizer.lr
    0.1
    """
    changes: dict[str, dict[str, Any]] = {}
    for word in filter(None, text.split(",")):
        path, equals, value = word.partition("=")
        section, _, key = path.strip().partition(".")
        if not equals or not is_dataclass(getattr(config, section, None)):
            raise ValueError(f"{word!r} is not of the form section.key=value, with a section of `ottava train`.")
        part: Any = getattr(config, section)
        if key not in {field.name for field in fields(part)}:
            known = ", ".join(field.name for field in fields(part))
            raise ValueError(f"{word!r}: the section {section} has no key {key!r}; there are {known}.")
        changes.setdefault(section, {})[key] = _value(typing.get_type_hints(type(part))[key], value.strip(), word)
    return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in changes.items()})


def _value(kind: Any, text: str, word: str) -> Any:
    """`text` as a field of type `kind` takes it."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if text not in choices:
            raise ValueError(f"{word!r}: expected one of {', '.join(map(str, choices))}.")
        return text
    if origin in (typing.Union, types.UnionType):
        kinds = [choice for choice in choices if choice is not type(None)]
        return None if text == "none" and len(kinds) < len(choices) else _value(kinds[0], text, word)
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{word!r}: expected true or false.")
        return text == "true"
    if kind not in (int, float, str):
        raise ValueError(f"{word!r}: a value of several parts cannot be given here.")
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{word!r}: expected a value of type {kind.__name__}.") from error
