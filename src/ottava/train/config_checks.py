"""Which configurations are possible. A value that is wrong in itself, and values that do not go together, are named."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ottava.kernels.block_moment import BLOCK
from ottava.quant.quantization import Quantization
from ottava.untrusted.files import shown

if TYPE_CHECKING:
    from ottava.train.config import Config

# (section, field): smallest value that makes sense
AT_LEAST: dict[tuple[str, str], float] = {
    ("parallel", "ranks"): 1,
    ("data", "length"): 1,
    ("data", "prefetch"): 1,
    ("optimizer", "lr"): 0,
    ("optimizer", "weight_decay"): 0,
    ("optimizer", "clip"): 0,
    ("optimizer", "eps"): 0,
    ("model", "norm_eps"): 0,
    ("schedule", "warmup_steps"): 0,
    ("train", "steps"): 1,
    ("train", "global_batch"): 1,
    ("train", "micro_batch"): 1,
    ("train", "z_loss"): 0,
    ("train", "max_logits"): 1,
    ("train", "evaluate_every"): 0,
    ("train", "evaluate_batches"): 1,
    ("train", "sample_every"): 0,
    ("train", "sample_tokens"): 0,
    ("checkpoint", "every"): 0,
    ("checkpoint", "keep"): 0,
    ("checkpoint", "keep_every"): 0,
    ("checkpoint", "max_failed"): 1,
    ("metrics", "console_every"): 1,
    ("metrics", "prometheus_port"): 0,
    ("metrics", "fp8_every"): 0,
    ("gate", "warmup_steps"): 0,
    ("gate", "max_reserved_gib"): 0,
    ("health", "retries"): 0,
    ("health", "spike_factor"): 0,
    ("health", "spike_window"): 2,
    ("health", "replay_every"): 0,
    ("health", "watchdog_s"): 0,
    ("health", "watchdog_start_s"): 0,
    ("health", "watchdog_save_s"): 0,
    ("health", "restarts"): 0,
}
# (section, field): largest value that is no mistake. What follows from such numbers is allocated, counted or started.
AT_MOST: dict[tuple[str, str], float] = {
    ("model", "layers"): 10_000,
    ("model", "hidden_size"): 2**24,
    ("model", "ffn_hidden_size"): 2**26,
    ("model", "heads"): 2**16,
    ("model", "vocab_size"): 2**28,
    ("model", "max_length"): 2**31,
    ("model", "pad_vocab_to"): 2**20,
    ("data", "length"): 2**31,
    ("data", "prefetch"): 4096,
    ("parallel", "ranks"): 2**16,
    ("train", "steps"): 10**12,
    ("train", "global_batch"): 2**31,
    ("train", "sample_tokens"): 2**20,
    ("metrics", "prometheus_port"): 2**16 - 1,
    ("health", "watchdog_s"): 10**9,
    ("health", "watchdog_start_s"): 10**9,
    ("health", "watchdog_save_s"): 10**9,
}
SHORTEST_S = 0.1
"""Of a watchdog that is on: in less nobody can start, save or do anything else."""
WATCHDOGS = ("watchdog_s", "watchdog_start_s", "watchdog_save_s")
MOST = 2**62
"""Of any whole number: torch and the system's clocks count in 64 bits."""
MANY_LINES = (("train", "sample_prompt"),)
"""Texts that may have line ends and tabs."""
FRACTIONS = (
    ("schedule", "final_fraction"),
    ("schedule", "decay_fraction"),
    ("gate", "min_mfu"),
    ("metrics", "mfu_baseline"),
    ("health", "copies"),
)


def check(config: Config) -> None:
    """Raises ValueError with the keys, their values, and what to do.

    >>> Config(train=TrainSection(global_batch=10, micro_batch=4))
    Traceback (most recent call last):
    ValueError: train.global_batch (10) must be a multiple of train.micro_batch (4).
    """
    _check_values(config)
    _check_homes(config)
    _check_numbers(config)
    _check_model(config)
    _check_schedule(config)
    _check_parallel(config)
    _check_quantization(config)
    _check_optimizer(config)
    _check_graph(config)
    weights, files = config.data.weights, config.data.files
    _need(len(weights) in (0, len(files)), f"data.weights has {len(weights)} numbers for {len(files)} data.files.")
    t = config.train
    _need(
        t.global_batch % t.micro_batch == 0,
        f"train.global_batch ({t.global_batch}) must be a multiple of train.micro_batch ({t.micro_batch}).",
    )
    gated = config.gate.min_mfu is not None or config.gate.max_reserved_gib is not None
    _need(
        not gated or config.gate.warmup_steps < t.steps,
        f"gate.warmup_steps ({config.gate.warmup_steps}) leaves nothing of train.steps ({t.steps}) to judge.",
    )


def check_data_parallel(config: Config, ranks: int) -> None:
    """Raises ValueError for what cannot run on `ranks` data-parallel ranks.

    >>> check_data_parallel(Config(train=TrainSection(global_batch=16, micro_batch=8)), 3)
    Traceback (most recent call last):
    ValueError: train.global_batch (16) must be a multiple of train.micro_batch (8) times the 3 data-parallel ranks: 24 or ...
    """
    batch, micro = config.train.global_batch, config.train.micro_batch
    _need(
        batch % (ranks * micro) == 0,
        f"train.global_batch ({batch}) must be a multiple of train.micro_batch ({micro}) times the {ranks} data-parallel ranks: "
        f"{micro * ranks} or a multiple of it, or run on other ranks (parallel.ranks).",
    )
    _need(
        config.parallel.strategy != "none" or ranks == 1,
        f"parallel.strategy 'none' reduces no gradients, but {ranks} ranks would see different data: use fsdp2 or ddp.",
    )


def _need(fine: bool, otherwise: str) -> None:
    if not fine:
        raise ValueError(otherwise)


def _check_values(config: Config) -> None:
    """Numbers are finite and fit a register, and texts can be printed: they come back in messages, names of files and pages."""
    for section in (field for field in fields(config) if is_dataclass(getattr(config, field.name))):
        for name, value in vars(getattr(config, section.name)).items():
            where = f"{section.name}.{name}"
            for one in value if isinstance(value, tuple | list) else (value,):
                _need(not isinstance(one, float) or math.isfinite(one), f"{where} must be finite, got {one}.")
                _need(not isinstance(one, int) or abs(one) <= MOST, f"{where} must be at most {MOST:,}, got more.")
                lines = (section.name, name) in MANY_LINES
                fine = not isinstance(one, str) or (shown(one) == one if lines else one.isprintable())
                _need(fine, f"{where} has control characters: {one!a:.80}.")


def _check_homes(config: Config) -> None:
    """A path that is empty, such as that of a variable that is not set: it would be the current folder. A user without a home folder, as in
    containers, and one that nobody knows (~somebody)."""
    cache = "." if config.data.files else config.data.cache
    for where, text in (
        ("train.run", config.train.run),
        ("data.cache", cache),
        ("checkpoint.load", config.checkpoint.load),
    ):
        _need(bool(text.strip()), f"{where} is empty: write a path.")
        try:
            Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError(
                f"{where} is {text}, but there is no such home folder here: write the whole path."
            ) from error


def _check_numbers(config: Config) -> None:
    for (section, name), most in AT_MOST.items():
        value = getattr(getattr(config, section), name)
        _need(value is None or value <= most, f"{section}.{name} must be at most {most:,}, got {value!s:.20}.")
    for (section, name), least in AT_LEAST.items():
        value = getattr(getattr(config, section), name)
        _need(value is None or value >= least, f"{section}.{name} must be at least {least:g}, got {value}.")
    for name in WATCHDOGS:
        value = getattr(config.health, name)
        _need(not 0 < value < SHORTEST_S, f"health.{name} must be 0 (off) or at least {SHORTEST_S:g} s, got {value}.")
    for section, name in FRACTIONS:
        value = getattr(getattr(config, section), name)
        _need(value is None or 0 <= value <= 1, f"{section}.{name} is a fraction between 0 and 1, got {value}.")
    fraction = config.data.validation_fraction
    _need(0 <= fraction < 1, f"data.validation_fraction must be at least 0 and below 1, got {fraction}.")
    _need(
        all(0 <= b < 1 for b in config.optimizer.betas),
        f"optimizer.betas must lie in [0, 1), got {config.optimizer.betas}.",
    )


def _check_model(config: Config) -> None:
    model = config.model
    only_for: dict[str, Any] = {"kv_heads": "llama", "rope_theta": "llama", "dropout": "gpt"}
    for name, architecture in only_for.items():
        _need(
            getattr(model, name) is None or model.architecture == architecture,
            f"model.{name} belongs to architecture {architecture!r}; model.architecture is {model.architecture!r}.",
        )
    longest = model.max_length or config.data.length
    _need(
        config.data.length <= longest,
        f"data.length ({config.data.length}) is above model.max_length ({longest}): shorten the one or raise the other.",
    )
    try:
        model.shape(vocab_size=model.vocab_size or 257, length=config.data.length)
    except ValueError as error:
        raise ValueError(f"model: {error}") from error


def _check_schedule(config: Config) -> None:
    schedule, steps = config.schedule, config.train.steps
    warmup = schedule.warmup(steps)
    _need(
        warmup < steps,
        f"schedule.warmup_steps ({warmup}) must be below train.steps ({steps}).",
    )
    _need(
        schedule.decay_fraction is None or schedule.kind == "wsd",
        f"schedule.decay_fraction belongs to schedule.kind 'wsd'; it is {schedule.kind!r}.",
    )
    _need(
        schedule.kind != "wsd" or warmup <= steps - schedule.decay(steps),
        f"schedule.warmup_steps ({warmup}) reaches into the steps in which 'wsd' comes down: "
        f"the last {schedule.decay(steps)} of {steps}.",
    )


def _check_graph(config: Config) -> None:
    """What a CUDA graph cannot hold. That there is one rank, on a GPU, is known when the run begins."""
    if not config.train.cuda_graph:
        return
    parallel = config.parallel
    _need(
        parallel.strategy in ("fsdp2", "none") and parallel.tp == 1 and parallel.dp_replicate in (1, -1),
        "train.cuda_graph records a model that lies whole on one rank: use parallel.strategy 'fsdp2' or 'none' with parallel.tp 1 and "
        f"parallel.dp_replicate 1; got {parallel.strategy!r}, {parallel.tp} and {parallel.dp_replicate}.",
    )
    _need(
        (parallel.ranks or 1) == 1 and parallel.dp_shard in (1, -1),
        f"train.cuda_graph needs one rank; parallel.ranks is {parallel.ranks}, parallel.dp_shard {parallel.dp_shard}.",
    )
    _need(
        not parallel.cpu_offload,
        "train.cuda_graph reads weights where they lie, but parallel.cpu_offload copies them elsewhere each time.",
    )
    _need(
        parallel.recompute != "full",
        "train.cuda_graph cannot record parallel.recompute 'full', which sets back random states in backward: use 'selective' or 'none'.",
    )
    _need(
        not config.train.compile,
        "train.cuda_graph and train.compile do not go together: both take the place of the host's Python. Leave one of them off.",
    )


def _check_quantization(config: Config) -> None:
    precision, model = config.precision, config.model
    if precision.fp8_weights:
        _need(
            precision.recipe != "none",
            "precision.fp8_weights stores weights as FP8, but precision.recipe is 'none'.",
        )
        _need(
            config.optimizer.name == "fused_adam",
            f"precision.fp8_weights needs optimizer.name 'fused_adam', which keeps float32 masters; got {config.optimizer.name!r}.",
        )
        strategy = config.parallel.strategy
        _need(strategy in ("fsdp2", "none"), f"precision.fp8_weights does not go with parallel.strategy {strategy!r}.")
    _need(
        precision.recipe != "none" or not precision.fp8_head,
        "precision.fp8_head quantizes the head by the recipe, but precision.recipe is 'none'.",
    )
    _need(
        precision.recipe in ("DelayedScaling", "Float8CurrentScaling") or not precision.fp8_attention,
        f"precision.fp8_attention needs a recipe with one scale a tensor, DelayedScaling or Float8CurrentScaling; precision.recipe is "
        f"{precision.recipe!r}.",
    )
    plain = precision.plain_layers or 0
    _need(
        0 <= plain <= model.layers,
        f"precision.plain_layers ({plain}) must be from 0 to model.layers ({model.layers}).",
    )
    _need(not (plain and precision.fp8_weights), "precision.plain_layers does not go with precision.fp8_weights.")
    recipe = precision.make_recipe()
    if recipe is None:
        return
    multiple = Quantization.of(recipe).feature_multiple
    _check_head(config, Quantization.of(recipe))
    for name in ("hidden_size", "ffn_hidden_size"):
        width = getattr(model, name)
        for what, part in (
            ("", width),
            (f" / parallel.tp ({config.parallel.tp})", width // max(config.parallel.tp, 1)),
        ):
            _need(
                part % multiple == 0,
                f"model.{name}{what} = {part} must be a multiple of {multiple} for precision.recipe {precision.recipe!r}.",
            )


def _check_head(config: Config, quantization: Quantization) -> None:
    words = config.model.vocab_size or (257 if config.data.tokenizer == "byte" else None)
    if not config.precision.fp8_head or words is None:  # a head whose size is not known yet says the same when it runs
        return
    tp, padding = max(config.parallel.tp, 1), config.model.pad_vocab_to
    rows = -(-words // padding) * padding // tp
    _need(
        rows % quantization.feature_multiple == 0 and quantization.weight.fills_blocks(rows),
        f"precision.fp8_head quantizes whole blocks of the vocabulary, but a rank has {rows} rows of it: pad it with "
        f"model.pad_vocab_to = {128 * tp}.",
    )


def _check_optimizer(config: Config) -> None:
    optimizer, precision = config.optimizer, config.precision
    only_fused = {
        "optimizer.moments": (optimizer.moments, "float32"),
        "optimizer.masters": (optimizer.masters, "float32"),
        "optimizer.stochastic_rounding": (optimizer.stochastic_rounding, False),
        "precision.gradients": (precision.gradients, "float32"),
    }
    for name, (value, usual) in only_fused.items():
        _need(
            value == usual or optimizer.name == "fused_adam",
            f"{name} {value!r} needs optimizer.name 'fused_adam'; it is {optimizer.name!r}.",
        )
    _need(
        optimizer.masters == "float32" or (precision.weights == "bfloat16" and not precision.fp8_weights),
        f"optimizer.masters {optimizer.masters!r} is for precision.weights 'bfloat16' without precision.fp8_weights: float32 weights are "
        "their own masters, and FP8 ones need float32 masters.",
    )
    _need(
        not optimizer.stochastic_rounding or optimizer.moments != "float32" or optimizer.masters == "none",
        "optimizer.stochastic_rounding has nothing to round: set optimizer.moments to 'bfloat16' or 'float8', or "
        "optimizer.masters to 'none'.",
    )
    if optimizer.moments == "float8":
        strategy, tp = config.parallel.strategy, config.parallel.tp
        _need(
            strategy != "fsdp1",
            "optimizer.moments 'float8' has blocks along rows, which parallel.strategy 'fsdp1' flattens: use 'fsdp2'.",
        )
        for name in ("hidden_size", "ffn_hidden_size"):
            width = getattr(config.model, name)
            _need(
                tp <= 1 or width % (tp * BLOCK) == 0,
                f"optimizer.moments 'float8' has blocks of {BLOCK} along rows, of which parallel.tp ({tp}) would cut some: model.{name} "
                f"({width}) must be a multiple of {tp * BLOCK}.",
            )


def _check_parallel(config: Config) -> None:
    parallel, model = config.parallel, config.model
    try:
        config.plan()
    except ValueError as error:
        raise ValueError(f"parallel: {error}") from error
    tp = parallel.tp
    if tp > 1:
        sizes = {"heads": model.heads, "kv_heads": model.kv_heads or model.heads, "pad_vocab_to": model.pad_vocab_to}
        for name, size in sizes.items():
            _need(size % tp == 0, f"model.{name} ({size}) must be a multiple of parallel.tp ({tp}).")
        _need(
            config.data.length % tp == 0,
            f"data.length ({config.data.length}) must be a multiple of parallel.tp ({tp}), which splits sequences.",
        )
        _need(
            parallel.strategy in ("fsdp2", "none"),
            f"parallel.tp ({tp}) needs parallel.strategy 'fsdp2', got {parallel.strategy!r}. (dp_replicate = N, dp_shard = 1 makes it "
            "data parallelism without sharding.)",
        )
    _need(
        parallel.overlap == "none" or tp != 1,
        f"parallel.overlap {parallel.overlap!r} hides tensor-parallel communication; with parallel.tp 1 there is none.",
    )
