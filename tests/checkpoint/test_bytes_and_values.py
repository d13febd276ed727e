"""Checkpoints of weights that are stored in FP8, and models whose weights are not, and the other way round: torch's tools copy uint8 into
float32 and back without a word, so the models say it. And what torch sends from rank 0 to others: bytes with their scales."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ottava
from distributed.fsdp_cases import RECIPES
from distributed.ranks import Ranks

ALL = ["delayed", "current", "block", "mxfp8", "nvfp4"]


def build(name: str, stored: bool, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe=RECIPES[name]) if stored else contextlib.nullcontext():
        return nn.Sequential(
            ottava.LayerNormMLP(64, 64, activation="swiglu", set_parallel_mode=True, device="cpu"),
            ottava.Linear(64, 32, device="cpu"),
        )


def values(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        value: Any = parameter.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = value.dequantize() if isinstance(value, ottava.QuantizedTensor) else value
    return found


def entries(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of one process."""
    state = model.state_dict().items()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state}


def equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


# ------------------------------------------------------------------------------------------------------------- one process


def test_bytes_without_scales_are_not_taken_for_values() -> None:
    """As after `{k: v for k, v in state.items() if k in model.state_dict()}`."""
    state = build("current", stored=True, seed=0).state_dict()
    model = build("current", stored=False, seed=1)
    before = entries(model)
    for options in ({"strict": True}, {"strict": False}, {"assign": True}):
        kept = {name: tensor for name, tensor in state.items() if name in before}
        with pytest.raises(
            RuntimeError, match=r"1\.weight is not stored in FP8 here.*\n?.*inside quantized_model_init"
        ):
            model.load_state_dict(kept, **options)
    model.load_state_dict(state)  # with their scales they are values
    assert equal(values(model), values(build("current", stored=True, seed=0)))


def test_whole_numbers_are_weights_too() -> None:
    """Zeros, ones and other numbers that a byte could be, but that no FP8 weight has."""
    model = build("current", stored=False, seed=1)
    for number in (0.0, 1.0, 3.0, 200.0):
        state = {name: torch.full_like(tensor, number) for name, tensor in model.state_dict().items()}
        model.load_state_dict(state)
    rising = torch.arange(32 * 64).view(32, 64) % 256
    model.load_state_dict(model.state_dict() | {"1.weight": rising.float()})
    assert torch.equal(model[1].weight, rising.float())


@pytest.mark.parametrize("name", ALL)
def test_asking_for_the_state_of_an_optimizer_leaves_the_bytes_alone(name: str) -> None:
    """torch makes a step with a rate of 0 for it, each time where an optimizer keeps nothing."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = build(name, stored=True, seed=0)
        before, optimizer = entries(model), kind(model.parameters(), lr=0.1)
        states = get_state_dict(model, optimizer)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        assert equal(entries(model), before), kind.__name__


def test_hooks_come_before_loading() -> None:
    """torch's FSDP2 goes back to its shards in one, and somebody's renames entries."""
    source, model = (build("current", stored=True, seed=seed) for seed in range(2))
    state = {name.replace("1.weight", "1.old"): tensor for name, tensor in source.state_dict().items()}
    calls: list[str] = []

    def rename(module: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        calls.append(prefix)
        for name in [name for name in state if name.startswith(f"{prefix}old")]:
            state[name.replace(f"{prefix}old", f"{prefix}weight")] = state.pop(name)

    model[1].register_load_state_dict_pre_hook(rename)
    for _ in range(2):
        model.load_state_dict(state)
        assert equal(entries(model), entries(source))
    assert calls == ["1.", "1."]


# -------------------------------------------------------------------------------------------------------------- two ranks


def refused(load: Any) -> str:
    with pytest.raises(RuntimeError, match="is not stored in FP8 here") as error:
        load()
    return str(error.value)


def bytes_into_values(folder: str) -> None:
    """On every rank: a rank that passes would train with other numbers than the rest."""
    mesh = init_device_mesh("cpu", (2,))
    stored = fully_shard(build("current", stored=True, seed=0), mesh=mesh)
    dcp.save(get_model_state_dict(stored), checkpoint_id=folder)
    whole = entries(stored)

    def by_dcp() -> None:
        dcp.load(state := get_model_state_dict(model), checkpoint_id=folder)
        set_model_state_dict(model, state)

    def by_whole() -> None:
        set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True, strict=False))

    def by_rank_0() -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, dict(whole) if dist.get_rank() == 0 else {}, options=options)

    for load in (by_dcp, by_whole, by_rank_0):
        model = fully_shard(build("current", stored=False, seed=1), mesh=mesh)
        refused(load)
    alone = build("current", stored=False, seed=2)
    alone.load_state_dict(whole)  # what the message says
    set_model_state_dict(model, alone.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert equal(values(model), values(stored))


def values_into_bytes(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    plain = fully_shard(build("current", stored=False, seed=0), mesh=mesh)
    whole = entries(plain)
    alone = build("current", stored=True, seed=2)
    alone.load_state_dict(whole)
    for broadcast in (False, True):
        for strict in (True, False):
            model = fully_shard(build("current", stored=True, seed=1), mesh=mesh)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
            set_model_state_dict(model, dict(whole) if not broadcast or dist.get_rank() == 0 else {}, options=options)
            assert equal(values(model), values(alone)), (broadcast, strict)
    dcp.save(get_model_state_dict(plain), checkpoint_id=folder)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ottava").addHandler(handler)
    set_model_state_dict(model, state)
    logging.getLogger("ottava").removeHandler(handler)
    assert any("nearly all FP8 bytes that were loaded for weight are 0" in line for line in said)


def scales_come_from_rank_0() -> None:
    """Also to ranks that share no mesh of the parameter with rank 0 (the last layer, which tensor parallelism leaves alone), and without
    any mesh (DDP)."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def split(seed: int) -> nn.Module:
        model: Any = build(name, stored=True, seed=seed)
        model[0].set_device_mesh(mesh["tp"], mesh["tp"])
        fully_shard(model[0], mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    def data_parallel(seed: int) -> nn.Module:
        return DistributedDataParallel(build(name, stored=True, seed=seed))

    for name in ALL:
        for make in (split, data_parallel):
            source, model = make(0), make(1)
            on_rank_0 = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, on_rank_0, options=options)
            assert equal(entries(model), entries(source)), (name, make.__name__)


def gathered_weights_are_loaded_into_their_shards() -> None:
    """After a forward without a backward FSDP's outermost unit is still gathered."""
    mesh = init_device_mesh("cpu", (2,))
    for name in ALL:
        source, model = (fully_shard(build(name, stored=True, seed=seed), mesh=mesh) for seed in range(2))
        with ottava.autocast(recipe=RECIPES[name]), torch.no_grad():
            model(torch.randn(32, 64))
        set_model_state_dict(model, {n: t.clone() for n, t in get_model_state_dict(source).items()})
        assert equal(entries(model), entries(source)), name


def all_roads(root: str) -> None:
    gathered_weights_are_loaded_into_their_shards()
    scales_come_from_rank_0()
    bytes_into_values(f"{root}/stored")
    values_into_bytes(f"{root}/plain")


def test_two_ranks(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        ranks.run(all_roads, str(tmp_path), timeout=200)
