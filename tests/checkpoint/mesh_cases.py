"""What the ranks of `test_mesh_matrix.py` do: put a module on a mesh as a user of torch does, train, save, load on every other mesh.

What a mesh holds is put together by torch's own means (`get_state_dict`, `full_tensor`), not by the code under test. All ranks see the
same batch, so that meshes of 1, 2 and 4 data-parallel ranks have the same gradients to the bit.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ottava
from distributed.ranks import leave_group
from ottava import recipe
from ottava.checkpoint import Checkpoints, load_model_state, model_state
from ottava.distributed import ParallelPlan, parallelize
from ottava.models.gpt import GPT, GPTConfig
from ottava.models.llama import Llama, LlamaConfig
from ottava.nn.initialize import materialize_

RECIPES: dict[str, recipe.Recipe] = {
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "hybrid": recipe.HybridScaling(recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling()),
}
MESHES: dict[str, tuple[int, int, int]] = {
    "one": (1, 1, 1),
    "dp4": (1, 4, 1),
    "2x2": (1, 2, 2),
    "tp4": (1, 1, 4),
    "hsdp": (2, 1, 2),
    "3x2": (1, 3, 2),  # rows that 3 does not divide: uneven shards
}
"""(dp_replicate, dp_shard, tp)"""
HIDDEN, INNER, HEADS, TOKENS, VOCABULARY = 128, 256, 4, 64, 128
SPLITS = [32, 32]
"""Rows of the two groups of a GroupedLinear."""
MODELS = ("Llama", "GPT")
MODULES = (
    "Linear", "LayerNormLinear", "LayerNormMLP-gelu", "LayerNormMLP-swiglu", "MultiheadAttention",
    "TransformerLayer-gelu", "TransformerLayer-swiglu", "GroupedLinear", *MODELS,
)  # fmt: skip
WAYS = ("dcp", "checkpoints")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "FusedAdam": ottava.optimizers.FusedAdam,
    # Blocks of 128 along rows: not for layers that tensor parallelism would cut inside of one. Rounding counts elements of the whole.
    "FusedAdam float8": partial(
        ottava.optimizers.FusedAdam,
        exp_avg_dtype="float8_block128",
        exp_avg_sq_dtype="float8_block128",
        stochastic_rounding=True,
    ),
}
BEFORE, AFTER = 2, 2
"""Steps before the checkpoint and after it."""


@dataclass(frozen=True)
class Case:
    """What is trained. stored: FP8 bytes are the parameters (`quantized_model_init`)."""

    module: str
    recipe: str
    stored: bool
    optimizer: str

    def __str__(self) -> str:
        return f"{self.module} {self.recipe} {'stored' if self.stored else 'masters'} {self.optimizer}"


def all_cases(recipe_name: str) -> list[Case]:
    """The product of modules and storage. Optimizers take turns; torch's own on FP8 storage are among them."""
    found = []
    for i, module in enumerate(MODULES):
        for stored in (False, True):
            torchs = (i % 3 == 0) if stored else (i % 2 == 0)
            found.append(Case(module, recipe_name, stored, "AdamW" if torchs else "FusedAdam"))
    return found


# -------------------------------------------------------------------------------------------------------------- modules on meshes


def one_layer(kind: str) -> nn.Module:
    """On the meta device."""
    options: dict[str, Any] = {"params_dtype": torch.float32, "device": "meta"}
    name, _, activation = kind.partition("-")
    gated = {"activation": activation} | ({"normalization": "RMSNorm"} if activation == "swiglu" else {})
    if name == "LayerNormMLP":
        return ottava.LayerNormMLP(HIDDEN, INNER, set_parallel_mode=True, **gated, **options)
    if name == "MultiheadAttention":
        # Torch's words for the layout of what is multiplied: interleaved q, k and v, which tensor parallelism can cut.
        return ottava.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, input_layernorm=True, fuse_qkv_params=True, set_parallel_mode=True, **options
        )  # fmt: skip
    if name == "TransformerLayer":
        dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        fuse = activation == "gelu"
        return ottava.TransformerLayer(
            HIDDEN, INNER, HEADS, fuse_qkv_params=fuse, set_parallel_mode=True, **dropout, **gated, **options
        )
    if name == "GroupedLinear":
        first = ottava.GroupedLinear(2, HIDDEN, INNER, parallel_mode="column", **options)
        return Groups(first, ottava.GroupedLinear(2, INNER, HIDDEN, parallel_mode="row", **options))
    kinds = {"LayerNormLinear": ottava.LayerNormLinear, "Linear": ottava.Linear}
    first = kinds[name](HIDDEN, INNER, parallel_mode="column", **options)
    return nn.Sequential(first, ottava.Linear(INNER, HIDDEN, parallel_mode="row", **options))


class Groups(nn.Sequential):
    """GroupedLinears one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, SPLITS)
        return x


def build(kind: str) -> nn.Module:
    """On the meta device."""
    if kind == "Llama":
        shape = LlamaConfig(VOCABULARY, HIDDEN, INNER, layers=1, heads=HEADS, kv_heads=HEADS, max_length=32)
        return Llama(shape, device="meta", params_dtype=torch.float32)
    if kind == "GPT":
        shape = GPTConfig(VOCABULARY, HIDDEN, INNER, layers=1, heads=HEADS, max_length=32, dropout=0.0)
        return GPT(shape, device="meta", params_dtype=torch.float32)
    return nn.Sequential(one_layer(kind), one_layer(kind))


class Mesh:
    """The meshes of a shape, made once a process group."""

    def __init__(self, name: str) -> None:
        self.name, self.sizes = name, MESHES[name]
        if name != "one":
            replicate, shard, tp = self.sizes
            self.root = init_device_mesh("cpu", self.sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
            self.tp = self.root["tp"]
            self.dp: DeviceMesh = self.root["dp_replicate", "dp_shard"] if replicate > 1 else self.root["dp_shard"]
            self.weight = self.root["dp_shard", "tp"]._flatten("weight") if shard * tp > 1 else self.tp

    def place(self, model: nn.Module, seed: int) -> nn.Module:
        """torch's and TransformerEngine's way: set_device_mesh, fully_shard, reset_parameters."""
        if self.name == "one":
            return materialize_(model, seed, "cpu")
        if self.sizes[2] > 1:
            for module in outermost(model):
                module.set_device_mesh(self.tp, self.weight)
        if self.name != "tp4":  # tensor parallelism alone
            for layer in model:
                fully_shard(layer, mesh=self.dp)
            fully_shard(model, mesh=self.dp)
        return materialize_(model, seed)

    def parallelize(self, model: nn.Module, by: recipe.Recipe, seed: int) -> nn.Module:
        """Ottava's way."""
        if self.name == "one":
            return materialize_(model, seed, "cpu")
        replicate, shard, tp = self.sizes
        plan = ParallelPlan(dp_replicate=replicate, dp_shard=shard, tp=tp, param_dtype=torch.float32)
        return parallelize(model, plan, recipe=by, seed=seed, device_type="cpu")


def outermost(module: nn.Module) -> Iterator[Any]:
    """The modules that spread themselves and all that is in them."""
    if hasattr(module, "set_device_mesh"):
        yield module
        return
    for child in module.children():
        yield from outermost(child)


# ------------------------------------------------------------------------------------------------------------------------ runs


class Run:
    """A case on a mesh."""

    def __init__(self, case: Case, mesh: Mesh, seed: int) -> None:
        self.case, self.recipe = case, RECIPES[case.recipe]
        with ottava.quantized_model_init(recipe=self.recipe) if case.stored else contextlib.nullcontext():
            model = build(case.module)
        if case.module in MODELS:
            self.model = mesh.parallelize(model, self.recipe, seed)
        else:
            self.model = mesh.place(model, seed)
        self.optimizer = OPTIMIZERS[case.optimizer](self.model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1)

    def steps(self, first: int, count: int) -> list[float]:
        """The losses of some steps."""
        found = []
        for step in range(first, first + count):
            self.optimizer.zero_grad()
            loss = self._loss(torch.Generator().manual_seed(step))
            loss.backward()
            self.optimizer.step()
            found.append(loss.item())
        return found

    def _loss(self, generator: torch.Generator) -> Tensor:
        if self.case.module in MODELS:
            tokens = torch.randint(VOCABULARY, (2, TOKENS // 2 + 1), generator=generator)
            with ottava.autocast(recipe=self.recipe):
                return self.model(tokens[:, :-1], tokens[:, 1:])
        x = torch.randn(TOKENS, HIDDEN, generator=generator)
        shape = (TOKENS // 2, 2, HIDDEN) if self.case.module[:5] in ("Multi", "Trans") else (TOKENS, HIDDEN)
        with ottava.autocast(recipe=self.recipe):
            out = self.model(x.view(shape))
        return (out - 0.5).square().mean()

    def whole(self) -> dict[str, Tensor]:
        """Everything that a checkpoint has to keep, gathered: bytes, scales, masters, moments, delayed scaling."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found = dict(model)
        for name, state in optimizer["state"].items():
            found |= {f"{name}.{key}": value for key, value in state.items()}
        gathered = {}
        for name, value in found.items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(value)
            gathered[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
            if self.case.module in MODELS and name.endswith("fwd_amax_history"):
                # The bytes beside masters are renewed when they are needed: after a step, or after loading. Delayed scaling notes it
                # then, in row 0, where the next step's amax is collected.
                gathered[name] = gathered[name][1:]
        return gathered

    # ------------------------------------------------------------------------------------------------------- saving, loading

    def save(self, folder: Path, way: str) -> None:
        """Into folder/way."""
        if way == "checkpoints":
            with Checkpoints(folder / way) as checkpoints:
                checkpoints.save(BEFORE, model_state(self.model, self.optimizer))
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder / way)

    def load(self, folder: Path, way: str) -> None:
        """What `save` has written, on any mesh."""
        if way == "checkpoints":
            with Checkpoints(folder / way) as checkpoints:
                loaded = load_model_state(checkpoints, self.model, self.optimizer)
            assert loaded is not None and loaded.rejected == ()
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder / way)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ."""
    wrong = [f"only on one side: {name}" for name in sorted(set(found) ^ set(wanted))]
    for name in sorted(set(found) & set(wanted)):
        a, b = found[name], wanted[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            wrong.append(f"{name} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}")
        elif not torch.equal(a, b):
            wrong.append(f"{name} differs in {int((a != b).sum())} of {a.numel()}")
    return wrong


def one_order(case: Case, *meshes: str) -> bool:
    """Whether sums have the same order on these meshes (docs/design/0002-many-ranks.md), so that losses are equal to the bit.

    Contractions that tensor parallelism splits are INNER wide in MLPs and linear layers, and HIDDEN wide after attention. A mean over
    three ranks rounds.
    """
    widths = [HIDDEN] if case.module == "MultiheadAttention" else [INNER]
    widths += [HIDDEN] if case.module in (*MODELS, "TransformerLayer-gelu", "TransformerLayer-swiglu") else []
    slice_width = 128 if case.recipe == "block" else 64
    for name in meshes:
        replicate, shard, tp = MESHES[name]
        if (replicate * shard) & (replicate * shard - 1) or any(
            width // tp % slice_width for width in widths if tp > 1
        ):
            return False
    return True


LOSS_BAR = 2e-2
"""Relative error of a loss on another mesh where sums have another order: an FP8 rounding flips. (numerics.md, TransformerLayer.)"""


def compare_losses(case: Case, found: list[float], wanted: list[float], source: str, mesh: str) -> list[str]:
    """What is wrong with the losses after loading."""
    if source == mesh or one_order(case, source, mesh):
        return [] if found == wanted else [f"losses {found}, not {wanted}"]
    far = [abs(a - b) > LOSS_BAR * abs(b) for a, b in zip(found, wanted, strict=True)]
    return [f"losses {found}, far from {wanted}"] if any(far) else []


# ----------------------------------------------------------------------------------------------------------- what a rank does


@dataclass(frozen=True)
class Job:
    """A case saved on a mesh and loaded on others, in both ways or one."""

    case: Case
    source: str
    targets: tuple[str, ...]
    ways: tuple[str, ...] = WAYS

    def folder(self, root: Path) -> Path:
        """Where its checkpoints are."""
        return root / f"{self.case}-{self.source}".replace(" ", "-")


class Pool:
    """Six ranks that are a mesh of six, of four or of one, one after the other."""

    SIZE = 6

    def __init__(self, root: str) -> None:
        self.root, self.rank = Path(root), dist.get_rank()
        self._meet("start", self.SIZE)
        leave_group(forget=True)
        warnings.filterwarnings("ignore", module="torch.distributed")

    @contextlib.contextmanager
    def mesh(self, name: str, use: str) -> Iterator[Mesh | None]:
        """The process group of a mesh, in the first ranks of the pool; None in others. "one" is the last rank, without a group.

        use: another word each time that a mesh is made.
        """
        replicate, shard, tp = MESHES[name]
        world = replicate * shard * tp
        if name == "one" or self.rank >= world:
            yield Mesh(name) if name == "one" and self.rank == self.SIZE - 1 else None
            return
        store, wait = self.root / f"store-{use}-{name}", datetime.timedelta(minutes=30)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=self.rank, world_size=world, timeout=wait)
        yield Mesh(name)
        self._meet(f"{use}-{name}", world)
        leave_group(forget=True)

    def meet(self, word: str) -> None:
        """Waits for all ranks of the pool."""
        self._meet(word, self.SIZE)

    def _meet(self, word: str, count: int) -> None:
        """Through files: a group must not be closed while another rank still reads from it."""
        (self.root / f"at-{word}-{self.rank}").touch()
        while len(list(self.root.glob(f"at-{word}-*"))) < count:
            time.sleep(0.01)


def run_jobs(root: str, jobs: list[Job]) -> list[str]:
    """In every rank of a pool: all jobs, mesh by mesh; what went wrong in this rank."""
    pool, problems = Pool(root), []
    for name in MESHES:
        with pool.mesh(name, "save") as mesh:
            for job in jobs:
                if mesh is not None and job.source == name:
                    problems += _tried(save, pool.root, job, mesh)
    pool.meet("saved")
    for name in MESHES:
        with pool.mesh(name, "load") as mesh:
            for job in jobs:
                if mesh is not None and name in job.targets:
                    problems += _tried(load, pool.root, job, mesh)
    return problems


def _tried(work: Any, root: Path, job: Job, mesh: Mesh) -> list[str]:
    """An error is one problem among others: the next job runs."""
    where = f"{job.case}: {job.source} -> {mesh.name}" if work is load else f"{job.case}: {job.source}"
    try:
        return [f"{where}: {problem}" for problem in work(root, job, mesh)]
    except (Exception, CheckpointException):
        return [f"{where}: {traceback.format_exc()}"]
    finally:
        gc.collect()


def save(root: Path, job: Job, mesh: Mesh) -> list[str]:
    """Trains, saves, trains on."""
    folder = job.folder(root)
    run = Run(job.case, mesh, seed=1 + list(MESHES).index(job.source))
    run.steps(0, BEFORE)
    folder.mkdir(exist_ok=True)
    for way in job.ways:
        run.save(folder, way)
    wanted = run.whole()
    losses = run.steps(BEFORE, AFTER)
    if mesh.name == "one" or dist.get_rank() == 0:
        torch.save({"whole": wanted, "losses": losses}, folder / "wanted.pt")
    return []


def load(root: Path, job: Job, mesh: Mesh) -> list[str]:
    """Another model of the same kind, new or after a step of its own, takes what was saved and goes on."""
    folder, problems = job.folder(root), []
    wanted = torch.load(folder / "wanted.pt")
    run = Run(job.case, mesh, seed=100)
    if mesh.name != job.source:
        run.steps(50, 1)
    for way in job.ways:
        run.load(folder, way)
        problems += [f"{way}: {problem}" for problem in differences(run.whole(), wanted["whole"])]
        found = run.steps(BEFORE, AFTER)
        problems += [
            f"{way}: {problem}" for problem in compare_losses(job.case, found, wanted["losses"], job.source, mesh.name)
        ]
    return problems
