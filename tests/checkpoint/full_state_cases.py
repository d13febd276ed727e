"""What the ranks of `test_full_state.py` do: ask torch for whole tensors and whole state dicts of models on every mesh, and give them back.

What one process has is made in the rank itself: first values do not depend on the mesh.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

import ottava
from checkpoint.mesh_cases import MESHES, RECIPES, Mesh, Pool, build, differences
from ottava.nn.initialize import materialize_
from ottava.quant.weight import Weight

Case = tuple[str, str, bool]
"""(model, recipe, stored)"""
CASES: list[Case] = [
    ("Llama", "current", False),
    ("GPT", "delayed", False),
    ("Llama", "current", True),
    ("Llama", "mxfp8", True),
    ("GPT", "block", True),
    ("GPT", "nvfp4", True),
]
EVERYTHING: list[Case] = [(m, r, s) for m in ("Llama", "GPT") for r in RECIPES for s in (False, True)]


def model_of(case: Case, mesh: Mesh | None, seed: int) -> nn.Module:
    """On a mesh; None: in this process alone."""
    name, by, stored = case
    with ottava.quantized_model_init(recipe=RECIPES[by]) if stored else contextlib.nullcontext():
        model = build(name)
    return materialize_(model, seed, "cpu") if mesh is None else mesh.parallelize(model, RECIPES[by], seed)


def values(tensor: Tensor) -> Tensor:
    """In high precision."""
    return tensor.dequantize().detach() if isinstance(tensor, Weight) else tensor.detach()


def everywhere(parameter: DTensor) -> list[Any]:
    """A copy on every rank."""
    return [Replicate()] * parameter.device_mesh.ndim


def by_columns(parameter: DTensor) -> list[Any]:
    """Cut along the last dimension over the last dimension of the mesh."""
    return [*everywhere(parameter)[:-1], Shard(parameter.dim() - 1)]


WAYS: dict[str, Callable[[DTensor], Tensor]] = {
    "full_tensor": lambda p: p.full_tensor(),
    "detach().full_tensor": lambda p: p.detach().full_tensor(),
    "redistribute to Replicate": lambda p: p.redistribute(placements=everywhere(p)).to_local(),
    "redistribute to Shard(-1)": lambda p: p.redistribute(placements=by_columns(p)).full_tensor(),
    "data.redistribute": lambda p: p.data.redistribute(placements=by_columns(p)).full_tensor(),
}


def whole_tensors(model: nn.Module, alone: nn.Module) -> Iterator[str]:
    """What is wrong with what torch makes of each parameter."""
    for (name, parameter), wanted in zip(model.named_parameters(), map(values, alone.parameters()), strict=True):
        assert isinstance(parameter, DTensor)
        for way, whole in WAYS.items():
            found = values(whole(parameter))
            if found.shape != wanted.shape or not torch.equal(found, wanted):
                yield f"{name}: {way}"


def whole_state(model: nn.Module, alone: nn.Module) -> Iterator[str]:
    """What is wrong with full state dicts."""
    wanted = {n: t.detach().clone() for n, t in alone.state_dict().items()}
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    yield from (f"full_state_dict: {problem}" for problem in differences(_settled(found), _settled(wanted)))
    on_rank_0 = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    wanted = wanted if dist.get_rank() == 0 else {}
    yield from (f"cpu_offload: {problem}" for problem in differences(_settled(on_rank_0), _settled(wanted)))


def _settled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without row 0 of histories, where the amax of the step to come is collected: bytes beside masters note theirs early."""
    return {name: tensor[1:] if name.endswith("fwd_amax_history") else tensor for name, tensor in state.items()}


def given_back(model: nn.Module, other: nn.Module, mesh: str) -> Iterator[str]:
    """What is wrong after the full state of another model was loaded."""
    state = {n: t.detach().clone() for n, t in other.state_dict().items()}
    wanted = {n: t.clone() for n, t in state.items()}
    ways = {"full_state_dict": False, "broadcast_from_rank0": True}
    if (
        mesh == "3x2"
    ):  # torch 2.13 cuts no whole tensors into uneven strided shards, unquantized ones neither: an AssertionError
        del ways["full_state_dict"]
    for how, broadcast in ways.items():
        for tensor in model.state_dict().values():  # no value is there by chance
            held: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            held.fill_(1)
        given = dict(state) if not broadcast or dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, given, options=options)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        yield from (f"set, {how}: {problem}" for problem in differences(_settled(found), _settled(wanted)))


def check_everything(root: str, cases: list[Case]) -> list[str]:
    """In every rank of a pool: what is wrong in this rank."""
    pool, problems = Pool(str(Path(root))), []
    for name in MESHES:
        with pool.mesh(name, "full") as mesh:
            for case in cases if mesh is not None and name != "one" else []:
                try:
                    model, alone, other = model_of(case, mesh, 1), model_of(case, None, 1), model_of(case, None, 2)
                    found = [*whole_tensors(model, alone), *whole_state(model, alone), *given_back(model, other, name)]
                except Exception:
                    found = [traceback.format_exc()]
                problems += [f"{case} on {name}: {problem}" for problem in found]
    return problems
