"""Checkpoints that 0.1 has written load: under its names of gated weights, and its quantized tensors in state dicts.

tests/data/checkpoints-0.1.tar.xz: a Llama of one layer (masters and AdamW; stored in FP8 and FusedAdam), each after two steps under current
scaling, and the state dict of a stored LayerNormMLP. The .json files have the first 16 digits of the SHA-256 of each value.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ottava
from distributed.ranks import run_ranks
from ottava import recipe
from ottava.checkpoint import Checkpoints, load_model_state
from ottava.distributed import ParallelPlan, parallelize
from ottava.models.llama import Llama, LlamaConfig
from ottava.nn.initialize import materialize_
from ottava.quant.weight import Weight

ARCHIVE = Path(__file__).parents[1] / "data" / "checkpoints-0.1.tar.xz"
NAMES = {"llama-masters-adamw": False, "llama-stored-fused-adam": True}
CURRENT = recipe.Float8CurrentScaling()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the archive is unpacked."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        safely: dict[str, Any] = (
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        )  # not in 3.11.0 to 3.11.3
        archive.extractall(folder, **safely)
    return folder / "checkpoints-0.1"


def whole(tensor: Any) -> Tensor:
    """In high precision, of all ranks."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return (tensor.dequantize() if isinstance(tensor, Weight) else tensor).contiguous()


def digest(*tensors: Tensor) -> str:
    """Of tensors one under the other."""
    return hashlib.sha256(torch.cat(tensors).numpy().tobytes()).hexdigest()[:16]


def llama(name: str, mesh: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    shape = LlamaConfig(16, 32, 32, layers=1, heads=2, kv_heads=2, max_length=16)
    with ottava.quantized_model_init(recipe=CURRENT) if NAMES[name] else contextlib.nullcontext():
        model: nn.Module = Llama(shape, device="meta", params_dtype=torch.float32)
    if mesh:
        plan = ParallelPlan(dp_shard=2, tp=2, param_dtype=torch.float32)
        model = parallelize(model, plan, recipe=CURRENT, seed=5, device_type="cpu")
    else:
        materialize_(model, 5, "cpu")
    optimizer: Any = ottava.optimizers.FusedAdam if NAMES[name] else torch.optim.AdamW
    return model, optimizer(model.parameters(), lr=1e-3)


def differing(data: Path, name: str, mesh: bool) -> list[str]:
    """What is not as 0.1 had it, after loading."""
    model, optimizer = llama(name, mesh)
    with Checkpoints(data / name) as checkpoints:
        loaded = load_model_state(checkpoints, model, optimizer)
    assert loaded is not None and loaded.step == 2
    found: dict[str, list[Tensor]] = {}
    for key, parameter in model.named_parameters():
        former = key.replace("fc1_gate_weight", "fc1_weight").replace("fc1_up_weight", "fc1_weight")
        found.setdefault(former, []).append(whole(parameter))
        for word, value in optimizer.state[parameter].items():
            if word != "step":
                found.setdefault(f"{former}.{word}", []).append(whole(value))
    wanted = json.loads((data / f"{name}.json").read_text())["sha256"]
    digests = {key: digest(*tensors) for key, tensors in found.items()}
    return sorted(key for key in wanted.keys() | digests.keys() if wanted.get(key) != digests.get(key))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_0_1_loads_in_one_process(data: Path, name: str) -> None:
    assert differing(data, name, mesh=False) == []


def on_ranks(data: Path) -> dict[str, list[str]]:
    return {name: differing(data, name, mesh=True) for name in NAMES}


def test_a_run_of_0_1_loads_on_four_ranks(data: Path) -> None:
    assert run_ranks(on_ranks, 4, data) == [{name: [] for name in NAMES}] * 4


@pytest.mark.parametrize("split", [True, False])
def test_a_state_dict_of_0_1_with_quantized_tensors_loads(data: Path, split: bool) -> None:
    torch.manual_seed(3)
    with ottava.quantized_model_init(recipe=CURRENT):
        mlp = ottava.LayerNormMLP(
            32, 32, activation="swiglu", set_parallel_mode=split, params_dtype=torch.float32, device="cpu"
        )
    mlp.load_state_dict(torch.load(data / "mlp-stored.pt", weights_only=True))
    wanted = json.loads((data / "mlp-stored.json").read_text())["sha256"]
    parameters = {key: whole(parameter) for key, parameter in mlp.named_parameters()}
    for kind in ("weight", "bias") if split else ():
        parameters[f"fc1_{kind}"] = torch.cat([parameters.pop(f"fc1_{part}_{kind}") for part in ("gate", "up")])
    assert {key: digest(tensor) for key, tensor in parameters.items()} == wanted
