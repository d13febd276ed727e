"""The configuration of a run: a frozen dataclass a section. The sentence under a field is also its `--help`.

Fields that may be None are None by default: TOML has no word for it, so leaving a key out must mean the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ottava import recipe as recipes
from ottava.distributed import ParallelPlan
from ottava.models import GPTConfig, LlamaConfig
from ottava.train.config_checks import check

RecipeName = Literal[
    "none", "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"
]


@dataclass(frozen=True)
class ModelSection:
    """The shape of the model."""

    architecture: Literal["llama", "gpt"] = "llama"
    """llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention. gpt: GPT-2's."""
    vocab_size: int | None = None
    """Tokens of the vocabulary. None: as many as the data's tokenizer has."""
    hidden_size: int = 128
    """Channels between layers."""
    ffn_hidden_size: int = 384
    """Channels inside the MLP."""
    layers: int = 4
    """Transformer layers."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values, each shared by heads / kv_heads queries (llama). None: as many as heads."""
    max_length: int | None = None
    """Longest sequence the model is made for, in tokens. None: data.length."""
    rope_theta: float | None = None
    """Base of the rotary positions (llama). None: 500000."""
    norm_eps: float = 1e-5
    """Added to the variance in norms."""
    dropout: float | None = None
    """Probability of dropping an activation (gpt). None: 0."""
    tie_embeddings: bool = False
    """Whether the head multiplies by the embedding's table."""
    init_std: float = 0.02
    """Standard deviation of the first weights; output layers start smaller by sqrt(2 layers)."""
    pad_vocab_to: int = 128
    """The vocabulary is padded to a multiple of this: choose a multiple of every tp size that will load the checkpoint."""

    def shape(self, vocab_size: int, length: int) -> LlamaConfig | GPTConfig:
        """The model's own configuration, for a tokenizer with `vocab_size` tokens and sequences of `length`."""
        common: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "hidden_size", "ffn_hidden_size", "layers", "heads", "norm_eps", "tie_embeddings", "init_std", "pad_vocab_to",
            )
        }  # fmt: skip
        common["vocab_size"] = self.vocab_size or vocab_size
        common["max_length"] = self.max_length or length
        if self.architecture == "gpt":
            return GPTConfig(dropout=self.dropout or 0.0, **common)
        return LlamaConfig(kv_heads=self.kv_heads or self.heads, rope_theta=self.rope_theta or 500000.0, **common)


@dataclass(frozen=True)
class DataSection:
    """What the model reads."""

    files: tuple[str, ...] = ()
    """Token files (`ottava data tokenize`). Without any: the running Python's own standard library, by bytes."""
    weights: tuple[float, ...] = ()
    """Share of each file in the samples. Without any: by size."""
    tokenizer: str = "byte"
    """What the files were tokenized with: byte, or the path of a tokenizer.json. Used to print samples."""
    length: int = 128
    """Tokens of a sequence."""
    validation_fraction: float = 0.005
    """Share of the sequences that is kept for validation."""
    document_mask: bool = False
    """Whether a token sees its own document only."""
    cache: str = "~/.cache/ottava"
    """Folder for token files that are made on the way."""
    prefetch: int = 2
    """Batches that are read ahead."""


@dataclass(frozen=True)
class OptimizerSection:
    """How weights are changed."""

    name: Literal["adamw", "fused_adam"] = "adamw"
    """adamw: torch's. fused_adam: Ottava's, with float32 masters of FP8 and bf16 weights."""
    lr: float = 3e-3
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Of matrices; norms, biases and embeddings have none."""
    clip: float = 1.0
    """Gradients of a larger norm are scaled down to this norm. 0: never."""
    moments: Literal["float32", "bfloat16", "float8"] = "float32"
    """Type of the two moments (fused_adam). float8: with a scale for every 128 elements of a row; norms and biases keep float32."""
    masters: Literal["float32", "remainder", "none"] = "float32"
    """What fused_adam keeps of weights of precision.weights bfloat16: float32 values, the 16 bits that bfloat16 lacks, or nothing."""
    stochastic_rounding: bool = False
    """Whether fused_adam rounds at random, right on average, what it stores as bfloat16 or float8: moments, and weights without masters."""


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over the steps: up linearly, then down."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """How it comes down after the warm-up. wsd: constant, and down linearly at the end."""
    warmup_steps: int | None = None
    """Steps until the highest learning rate. None: 30% of all, at most 2000."""
    final_fraction: float = 0.1
    """Learning rate of the last step, as a fraction of the highest."""
    decay_fraction: float | None = None
    """Share of the steps in which wsd comes down. None: 0.2."""

    def warmup(self, steps: int) -> int:
        """Steps of it, in a run of `steps`."""
        return min(steps * 3 // 10, 2000) if self.warmup_steps is None else self.warmup_steps

    def decay(self, steps: int) -> int:
        """Steps in which wsd comes down, at the end of a run of `steps`."""
        return round(steps * (0.2 if self.decay_fraction is None else self.decay_fraction))


@dataclass(frozen=True)
class ParallelSection:
    """How the model is spread over ranks."""

    ranks: int | None = None
    """Ranks that are started on this machine. None: one a GPU, or 2 on a CPU. Under torchrun it is torchrun that starts them."""
    dp_replicate: int = 1
    """Copies of the (sharded) model."""
    dp_shard: int = -1
    """Ranks that one copy's weights are sharded over. -1: the ranks that are left."""
    tp: int = 1
    """Ranks that split each layer."""
    strategy: Literal["fsdp2", "fsdp1", "ddp", "none"] = "fsdp2"
    """Who shards weights and reduces gradients."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in backward: none, norms and activation functions, or whole layers."""
    overlap: Literal["none", "bulk", "ring", "pipeline", "auto"] = "none"
    """How tensor-parallel communication hides under products. Needs sequence_parallel."""
    overlap_transport: Literal["auto", "point_to_point", "symmetric_memory"] = "auto"
    """What carries it: the process group, symmetric memory (CUDA), or the best there is."""
    overlap_minimum_tokens: int | None = None
    """Tokens of all tp ranks below which no product is cut into chunks. None: an estimate decides; 0: all are."""
    reshard_after_forward: bool = True
    """Whether gathered weights are freed after forward: less memory, more communication."""
    prefetch: int = 1
    """Layers whose weights are gathered ahead."""
    sequence_parallel: bool = False
    """Whether tp ranks also split the tokens between layers: less memory for the same communication."""
    cpu_offload: bool = False
    """Whether sharded weights and the optimizer's state lie in host memory between uses."""


@dataclass(frozen=True)
class PrecisionSection:
    """The numbers in use."""

    recipe: RecipeName = "Float8CurrentScaling"
    """How matrix products are quantized. none: not at all."""
    plain_layers: int | None = None
    """Layers at the end of the model that stay unquantized. None: 0; a sixth of all with NVFP4BlockScaling, whose 4 bits cost accuracy
    there first (but not with fp8_weights)."""
    activations: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of everything that is not quantized. auto: bfloat16 on a GPU, float32 on a CPU, which is slow in bfloat16."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Type in which weights are kept and updated."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients of float32 weights are kept until the optimizer reads them. bfloat16 needs fused_adam."""
    fp8_weights: bool = False
    """Whether weights are stored as FP8 bytes only, with float32 masters in fused_adam."""
    fp8_head: bool = False
    """Whether the three products of the head are quantized by the recipe too, each chunk of tokens with scales of its own."""
    fp8_attention: bool = False
    """Whether attention's forward runs in FP8 too (`fp8_dpa` of the recipe), where it is faster; backward stays in the activation dtype.
    For DelayedScaling and Float8CurrentScaling."""

    def make_recipe(self) -> recipes.Recipe | None:
        """The recipe, or None."""
        options = {"fp8_dpa": True} if self.fp8_attention else {}
        return None if self.recipe == "none" else getattr(recipes, self.recipe)(**options)

    def unquantized(self, layers: int) -> int:
        """How many of `layers` stay unquantized: the last ones."""
        if self.recipe == "none":
            return layers
        if self.plain_layers is not None:
            return self.plain_layers
        wanted = self.recipe == "NVFP4BlockScaling" and not self.fp8_weights
        return min(math.ceil(layers / 6), layers - 1) if wanted else 0

    def dtype(self, device: str) -> torch.dtype:
        """Of activations, on a kind of device ("cuda", "cpu")."""
        if self.activations == "auto":
            return torch.float32 if device == "cpu" else torch.bfloat16
        return getattr(torch, self.activations)


@dataclass(frozen=True)
class TrainSection:
    """The run."""

    run: str = "runs/debug"
    """Folder of the run: configuration, metrics, checkpoints. A run that is there already is continued."""
    steps: int = 300
    """Optimizer steps."""
    global_batch: int = 16
    """Sequences of a step, over all ranks."""
    micro_batch: int = 8
    """Sequences that one rank works on at a time, at most: never more than it has of a step."""
    seed: int = 1234
    """Of first weights, order of data and dropout."""
    z_loss: float = 0.0
    """Weight of log(sum exp logits)^2 in the loss; 1e-4 keeps logits from drifting."""
    max_logits: int = 2**29
    """Logits of a rank that exist at a time; more tokens are taken in pieces."""
    compile: bool = False
    """Whether layers go through torch.compile."""
    cuda_graph: bool = False
    """Whether forward, loss and backward of a microbatch are recorded as a CUDA graph and launched as one: the same bits, without the
    host's time. On one GPU with one rank; takes the memory of activations and gradients for good."""
    deterministic: bool = False
    """Whether torch may use only algorithms that give the same bits every time."""
    evaluate_every: int = 100
    """Steps between two passes over the validation data; always after the last step. 0: only then."""
    evaluate_batches: int = 16
    """Global batches of a validation pass, at most."""
    sample_every: int = 0
    """Steps between two samples of generated text; always after the last step. 0: only then."""
    sample_prompt: str = "def "
    """What a sample begins with."""
    sample_tokens: int = 200
    """Tokens of a sample. 0: no samples."""


@dataclass(frozen=True)
class CheckpointSection:
    """What is kept on disk."""

    every: int = 100
    """Steps between two checkpoints; always after the last step. 0: only then."""
    keep: int = 2
    """Newest checkpoints that are kept; older ones are deleted. 0: all."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of this are kept for ever. 0: none."""
    background: bool = True
    """Whether training goes on while a checkpoint is written."""
    hash: Literal["xxh3_128", "blake3", "blake2b", "sha256"] = "xxh3_128"
    """Checksum of the files."""
    load: str = "exact"
    """Where the run begins. exact: at its newest checkpoint that verifies, with everything as it was; in a new run at step 0. none: at
    step 0, and an existing run is an error. Anything else is the path or URL of a checkpoint that a new run begins with; later starts
    go on from its own."""
    max_failed: int = 10
    """Saves in a row that may fail (a full disk, a file system that is read-only) before the run ends with exit code 7. Each is a warning
    and an event in metrics.jsonl, and is tried again after a tenth of checkpoint.every."""
    allow_missing: tuple[str, ...] = ()
    """Entries (patterns such as optimizer.*) that the checkpoint named by load may lack: they keep their first values."""
    allow_extra: tuple[str, ...] = ()
    """Entries that it may have and the run does not want."""
    allow_shape: tuple[str, ...] = ()
    """Entries that may have another shape there: they keep their first values."""
    allow_dtype: tuple[str, ...] = ()
    """Entries that may have another type there: they are converted."""


@dataclass(frozen=True)
class MetricsSection:
    """What is measured, and who is told. RUN/metrics.jsonl is always written."""

    console_every: int = 10
    """Steps between two lines on a console that is not a terminal."""
    tensorboard: bool = False
    """Whether to write TensorBoard events to RUN/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases. offline: to RUN/wandb, to be sent later."""
    wandb_project: str = "ottava"
    """Its project."""
    prometheus_port: int | None = None
    """Port on which rank 0 serves metrics to Prometheus. 0: any free one. None: no server."""
    prometheus_address: str = "127.0.0.1"
    """Address that it listens on. 0.0.0.0: every interface of the machine, for a server on another."""
    fp8_every: int = 50
    """Steps between two looks at the FP8 health of every layer. 0: never."""
    measure_peak: bool = False
    """Measure this device's peak with a large product instead of taking it from the table; also for a CPU."""
    mfu_baseline: float | None = None
    """The MFU that this job should reach, for Prometheus alerts."""


@dataclass(frozen=True)
class GateSection:
    """What a run must reach. Otherwise it ends with exit code 3."""

    min_mfu: float | None = None
    """Smallest median MFU."""
    max_reserved_gib: float | None = None
    """Most memory that a rank's allocator may reserve, in GiB."""
    warmup_steps: int = 20
    """Steps that do not count."""


@dataclass(frozen=True)
class HealthSection:
    """What happens when something goes wrong."""

    retries: int = 3
    """Non-finite steps in a row that are skipped before a rollback to the last checkpoint, and rollbacks before exit code 5."""
    spike_factor: float = 2.0
    """A loss this many times the median of the last spike_window steps is reported as a spike. 0: never."""
    spike_window: int = 100
    """Steps that a spike is compared with."""
    replay_every: int = 500
    """Steps between two looks for silent corruption: a microbatch is computed twice and compared bit for bit, weights and moments must be
    those that the step before left, and ranks that must hold the same numbers are compared. 0: never."""
    watchdog_s: float = 600.0
    """Seconds without progress (a microbatch, an evaluation batch, a token of a sample) after which the stalled rank is named, all
    stacks are written and the run ends with exit code 6. 0: never, nor in the other sections."""
    watchdog_start_s: float = 1800.0
    """The same until the first step: connecting, making data and model, loading a checkpoint. 0: not watched."""
    watchdog_save_s: float = 1800.0
    """The same for a checkpoint, as long as it holds training up. 0: not watched."""
    restarts: int = 3
    """Ranks that may die in a row, without a step in between that is new, before the run ends with their exit code. Each time the other
    ranks keep their processes, meet again, and go on from the newest state. 0: the first death ends the run."""
    after_death: Literal["replace", "shrink"] = "replace"
    """Who goes on. replace: a new rank takes the place of the dead one. shrink: the others alone, as many as parallel.dp_shard -1 and
    train.global_batch allow; replace where they allow no fewer."""
    copies: float = 0.01
    """Share of the training time that may go into copies of every rank's state in the memory of its neighbour, from which a restart in
    place goes on. 0: none, so that it goes on from the newest checkpoint."""


@dataclass(frozen=True)
class Config:
    """All sections. It is checked as a whole when it is made.

    >>> Config(train=TrainSection(steps=100)).parallel.tp
    1
    """

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    gate: GateSection = field(default_factory=GateSection)
    health: HealthSection = field(default_factory=HealthSection)

    def __post_init__(self) -> None:
        check(self)

    def plan(self, device: str = "cuda") -> ParallelPlan:
        """What `parallelize` takes."""
        spread = {key: value for key, value in vars(self.parallel).items() if key != "ranks"}
        return ParallelPlan(
            **spread,
            param_dtype=self.precision.dtype(device),
            reduce_dtype=getattr(torch, self.precision.reduce),
        )

    def on_ranks(self, data_parallel: int) -> Config:
        """The same for this many data-parallel ranks: a microbatch has no more sequences than a rank has.

        >>> Config(train=TrainSection(global_batch=16, micro_batch=8)).on_ranks(8).train.micro_batch
        2
        """
        each, left = divmod(self.train.global_batch, data_parallel)
        if left or self.train.micro_batch <= each:
            return self
        return replace(self, train=replace(self.train, micro_batch=each))

    @property
    def run_folder(self) -> Path:
        """Where the run lies."""
        return Path(self.train.run).expanduser()
