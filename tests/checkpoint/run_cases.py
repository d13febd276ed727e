"""What the ranks of `test_run_state.py` do: train on a mesh, save, load what other meshes saved, go on.

What a mesh holds is put together by torch's own means (`full_tensor`, FSDP1's state dicts, all-gathers), not by the code under test.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ottava
from distributed.parity import RECIPES, SEED
from ottava.checkpoint import Checkpoints, load_model_state, model_state
from ottava.distributed import ParallelPlan, attach, meshes_of, parallelize
from ottava.distributed.vocabulary import VocabParallelEmbedding, VocabParallelHead
from ottava.distributed.whole import layout_of
from ottava.models.gpt import GPT, GPTConfig
from ottava.models.llama import Llama, LlamaConfig
from ottava.nn.initialize import materialize_
from ottava.nn.random_streams import CudaRNGStatesTracker, model_parallel_seed
from ottava.nn.strategy import Layout

Mesh = dict[str, Any]

MESHES: dict[int, dict[str, Mesh]] = {
    1: {"one process": {}},
    4: {
        "(2,2)": {"dp_shard": 2, "tp": 2},
        "(4,1)": {"dp_shard": 4},
        "(1,4)": {"dp_shard": 1, "tp": 4},
        "hsdp (2,1,2)": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        "fsdp1": {"dp_shard": 4, "strategy": "fsdp1"},
        "ddp x tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "strategy": "ddp"},
    },
    6: {"(3,2)": {"dp_shard": 3, "tp": 2}},
}
NAMES = [name for meshes in MESHES.values() for name in meshes]
BEFORE, AFTER = 1, 5  # steps before the checkpoint and after it


def build(name: str) -> nn.Module:
    """On the meta device. tp up to 4 divides heads, groups, ffn and vocabulary; the GPT's embedding is tied."""
    if name == "llama":
        return Llama(LlamaConfig(128, 128, 128, layers=1, heads=4, kv_heads=4, max_length=32), device="meta")
    return GPT(
        GPTConfig(128, 128, 128, layers=1, heads=4, max_length=32, dropout=0.0, tie_embeddings=True), device="meta"
    )


class Run:
    """A model that trains on one mesh; in one process without a group."""

    def __init__(self, model: str, recipe: str, mesh: Mesh, seed: int) -> None:
        self.recipe = RECIPES[recipe]
        self.tracker: CudaRNGStatesTracker
        part, parts, tp_rank = 0, 1, 0
        if mesh:
            plan = ParallelPlan(param_dtype=torch.float32, **mesh)
            self.model = parallelize(build(model), plan, recipe=self.recipe, seed=seed)
            meshes = meshes_of(self.model)
            part, parts, tp_rank = meshes.dp_rank, meshes.dp_size, meshes.tp.get_local_rank() if plan.tp > 1 else 0
        else:
            self.model = materialize_(build(model), seed, "cpu")
        self.rows = slice(part * (12 // parts), (part + 1) * (12 // parts))
        self.tracker = model_parallel_seed(seed, tp_rank, part)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1)
        if mesh and self.recipe is not None and mesh.get("strategy", "fsdp2") == "fsdp2":
            attach(self.optimizer, self.model)

    def steps(self, first: int, count: int) -> list[float]:
        """The losses, and what random streams give, of some steps."""
        found = []
        for step in range(first, first + count):
            tokens = torch.randint(128, (12, 17), generator=torch.Generator().manual_seed(step))[self.rows]
            self.optimizer.zero_grad()
            with ottava.autocast(enabled=self.recipe is not None, recipe=self.recipe):
                loss = self.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            self.optimizer.step()
            with self.tracker.fork():
                found += [loss.item(), torch.rand(()).item()]
            found.append(torch.rand(()).item())
        return found

    def state(self) -> dict[str, Any]:
        return model_state(self.model, self.optimizer, tracker=self.tracker)

    def whole(self) -> dict[str, Tensor]:
        """Everything, as one process would hold it; in rank 0."""
        if isinstance(self.model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
                found = {_clean(n): p.detach().clone() for n, p in self.model.named_parameters()}
            found |= self._moments_of_fsdp1({name: tensor.shape for name, tensor in found.items()})
        else:
            found = self._gathered()
        for name, module in self.model.named_modules():
            if isinstance(module, ottava.quant.delayed.DelayedState):
                for key in ("fwd_scale", "bwd_scale", "fwd_amax_history", "bwd_amax_history"):
                    value = getattr(module, key)
                    # FSDP2 records the next step's weight in row 0 when it makes the wire copies, others in forward.
                    found[f"{_clean(name)}.{key}"] = value[1:] if "history" in key else value
        return {name: tensor.detach().clone() for name, tensor in found.items() if name != "head.weight"}

    def _moments_of_fsdp1(self, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
        """Each rank holds a stretch of each flattened parameter, in order of rank. (torch's `full_optim_state_dict` gives exp_avg_sq
        in place of exp_avg on gloo ranks, and `get_state_dict` of a full state ends in a crash: torch 2.13.)"""
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, (parameter.numel(), dict(self.optimizer.state[parameter])))
            holding = [state for count, state in ranks if count]
            for key in holding[0]:
                parts = [state[key] for state in holding]
                whole = parts[0] if key == "step" else torch.cat(parts).view(shapes[_clean(name)])
                found[f"{_clean(name)}.{key}"] = whole
        return found

    def _gathered(self) -> dict[str, Tensor]:
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        found, seen = {}, set()
        for path, module in model.named_modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                name = _clean(f"{path}.{attribute}".strip("."))
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                for key, tensor in {"": parameter, **self.optimizer.state[parameter]}.items():
                    found[f"{name}.{key}".strip(".")] = _whole(module, attribute, tensor)
        return found


def _clean(name: str) -> str:
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _whole(module: nn.Module, attribute: str, tensor: Tensor) -> Tensor:
    layout, size = layout_of(module, attribute)
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if isinstance(module, VocabParallelEmbedding | VocabParallelHead):
        layout, size, group = Layout(0), module.group.size() if module.group else 1, module.group
    else:
        group = getattr(getattr(module, "parallel", None), "group", None)
    if size == 1 or layout.dim is None or tensor.dim() == 0:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts, layout.dim)


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ."""
    wrong = sorted(set(found) ^ set(wanted))
    return wrong + [
        n for n in found if n in wanted and not (found[n].dtype == wanted[n].dtype and torch.equal(found[n], wanted[n]))
    ]


def train_and_save(root: Path, name: str, mesh: Mesh, model: str, recipe: str) -> list[str]:
    """Trains, saves, trains on; a second model loads and has to do the same, to the bit. What differs."""
    folder, seed = root / model / recipe, SEED + NAMES.index(name)  # another start for each mesh: no mix-up goes unseen
    run = Run(model, recipe, mesh, seed)
    run.steps(0, BEFORE)
    with Checkpoints(folder / name) as checkpoints:
        checkpoints.save(BEFORE, run.state() | {"step": BEFORE})
        reference = run.whole()
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(reference, folder / f"{name}.pt")
        wanted = run.steps(BEFORE, AFTER)
        again, extra = Run(model, recipe, mesh, seed + 100), {"step": 0}
        loaded = load_model_state(checkpoints, again.model, again.optimizer, tracker=again.tracker, extra=extra)
    assert loaded is not None and loaded.rejected == () and extra == {"step": BEFORE}
    assert [k for k in loaded.kept if not k.startswith("delayed.")] == [], loaded.kept
    problems = [] if again.steps(BEFORE, AFTER) == wanted else [f"{name} {recipe}: losses"]
    return problems + [f"{name} {recipe} after {AFTER} steps: {n}" for n in differences(again.whole(), run.whole())]


def load_from(root: Path, name: str, mesh: Mesh, model: str, recipe: str, sources: list[str]) -> list[str]:
    """Loads what `sources` saved; what is not what they had."""
    run, problems = Run(model, recipe, mesh, seed=1), []
    for source in sources:
        with Checkpoints(root / model / recipe / source) as checkpoints:
            loaded = load_model_state(checkpoints, run.model, run.optimizer, tracker=run.tracker, extra={"step": 0})
        assert loaded is not None
        found = run.whole()
        if not dist.is_initialized() or dist.get_rank() == 0:
            wanted = torch.load(root / model / recipe / f"{source}.pt")
            problems += [f"{source} -> {name} {recipe}: {n}" for n in differences(found, wanted)]
    return problems


def cases_of(name: str, everything: bool) -> list[tuple[str, str]]:
    """(model, recipe) that a mesh trains. (2,2) has every recipe; each of the others delayed scaling and one that takes turns."""
    if everything or name == "(2,2)":
        return [*(("llama", recipe) for recipe in RECIPES), ("gpt", "current")]
    rest, at = [r for r in RECIPES if r != "delayed"], NAMES.index(name)
    chosen = [("llama", r) for r in ("delayed", rest[at % len(rest)])]
    return chosen + ([("gpt", "current")] if name in ("one process", "fsdp1") else [])


def all_cases(root: str, world: int, everything: bool) -> dict[str, list[str]]:
    """In one run of the ranks, because a new process group would find the meshes of the one before in DTensor's caches.

    Every mesh loads the checkpoints of three others under delayed scaling, which have all that other recipes' have, and scales. Of its
    other cases it loads one from another mesh; with `everything` all of them from all.
    """
    folder, start = Path(root), time.monotonic()
    problems: dict[str, list[str]] = {"continued": [], "resharded": []}
    for name, mesh in MESHES[world].items():
        for model, recipe in cases_of(name, everything):
            (folder / model / recipe).mkdir(parents=True, exist_ok=True)
            problems["continued"] += train_and_save(folder, name, mesh, model, recipe)
    (folder / f"saved-{world}-{dist.get_rank() if dist.is_initialized() else 0}").touch()
    while len(list(folder.glob("saved-*"))) < sum(MESHES):
        assert time.monotonic() - start < (1500 if everything else 500), "other ranks have not saved"
        time.sleep(0.05)
    for name, mesh in MESHES[world].items():
        for case in cases_of(name, everything):
            others = [n for n in NAMES if n != name and case in cases_of(n, everything)]
            if not everything:
                first = NAMES.index(name) % len(others)  # so that each mesh is loaded by others
                others = (others[first:] + others[:first])[: 3 if case[1] == "delayed" else 1]
            problems["resharded"] += load_from(folder, name, mesh, *case, others)
    return problems
