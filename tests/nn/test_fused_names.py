"""`fc1_weight` of a gated MLP, and its parts: either name reads, assigns and loads, plain and stored in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ottava
from distributed.ranks import run_ranks
from ottava import recipe
from ottava.quant.weight import Weight

RECIPES: dict[str, recipe.Recipe | None] = {
    "plain": None,
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
HIDDEN, INNER = 64, 96  # a block of 128 rows begins in gate and ends in up


def mlp(name: str, split: bool, seed: int = 0, **options: Any) -> ottava.LayerNormMLP:
    torch.manual_seed(seed)
    stored = RECIPES[name] is not None
    options = {"params_dtype": torch.float32, "device": "cpu"} | options
    with ottava.quantized_model_init(enabled=stored, recipe=RECIPES[name] if stored else None):
        return ottava.LayerNormMLP(HIDDEN, INNER, activation="swiglu", set_parallel_mode=split, **options)


def values(weight: Tensor) -> Tensor:
    return weight.dequantize().detach() if isinstance(weight, Weight) else weight.detach()


def fc1(module: ottava.LayerNormMLP) -> tuple[Tensor, Tensor]:
    """Weight and bias as one, by the names of the parameters."""
    parameters = dict(module.named_parameters())
    if "fc1_weight" in parameters:
        return values(parameters["fc1_weight"]), parameters["fc1_bias"].detach()
    kinds = [[values(parameters[f"fc1_{part}_{kind}"]) for part in ("gate", "up")] for kind in ("weight", "bias")]
    return torch.cat(kinds[0]), torch.cat(kinds[1])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("into_parts", [True, False])
def test_a_state_dict_under_the_other_names_loads_to_the_bit(name: str, into_parts: bool) -> None:
    source, target = mlp(name, not into_parts, seed=1), mlp(name, into_parts, seed=2)
    with torch.no_grad():
        for parameter in source.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    state = source.state_dict()
    assert ("fc1_gate_weight" in state) == (not into_parts)
    assert not torch.equal(fc1(target)[0], fc1(source)[0])
    target.load_state_dict(state)
    for found, wanted in zip(fc1(target), fc1(source), strict=True):
        assert torch.equal(found, wanted)
    back = mlp(name, not into_parts, seed=3)
    back.load_state_dict(target.state_dict())
    for key, wanted in state.items():
        assert torch.equal(back.state_dict()[key], wanted), key
    x = torch.randn(32, HIDDEN)
    with torch.no_grad(), ottava.autocast(enabled=name != "plain", recipe=RECIPES[name]):
        assert torch.equal(target(x), source(x))


@pytest.mark.parametrize("name", ["current", "block", "nvfp4"])
@pytest.mark.parametrize("into_parts", [True, False])
def test_stored_entries_under_the_other_names_load_as_values_into_what_is_not_stored(
    name: str, into_parts: bool
) -> None:
    source, target = mlp(name, not into_parts, seed=1), mlp("plain", into_parts, seed=2)
    target.load_state_dict(source.state_dict())
    assert torch.equal(fc1(target)[0], fc1(source)[0])
    assert torch.equal(target.fc2_weight.detach(), values(source.fc2_weight))


@pytest.mark.parametrize("name", RECIPES)
def test_the_name_of_the_whole_is_read_and_assigned(name: str) -> None:
    module = mlp(name, split=True)
    assert module.fc1_weight.shape == (2 * INNER, HIDDEN) and torch.equal(values(module.fc1_weight), fc1(module)[0])
    wanted = torch.randn(2 * INNER, HIDDEN, generator=torch.Generator().manual_seed(5))
    module.fc1_weight = torch.nn.Parameter(wanted)
    module.fc1_bias = torch.nn.Parameter(wanted[:, 0])
    assert {n for n, _ in module.named_parameters()} >= {"fc1_gate_weight", "fc1_up_bias"}
    whole = mlp(name, split=False)
    with torch.no_grad():
        whole.fc1_weight.copy_(wanted)
    assert torch.equal(fc1(module)[0], values(whole.fc1_weight))  # one matrix, whatever its parts
    assert torch.equal(fc1(module)[1], wanted[:, 0])


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_parts_of_different_modules_are_refused(name: str) -> None:
    one, other, target = mlp(name, True, seed=1), mlp(name, True, seed=2), mlp(name, True, seed=3)
    mixed = one.state_dict() | {k: v for k, v in other.state_dict().items() if k.startswith("fc1_up")}
    with pytest.raises(
        RuntimeError, match="fc1_gate_weight_.* is shared with other weights.*from the state dict of one module"
    ):
        target.load_state_dict(mixed)
    alone = {k: v for k, v in one.state_dict().items() if k.startswith("fc1_gate")}
    with pytest.raises(RuntimeError, match="fc1_up_weight_.* is shared with other weights"):
        mlp(name, True, seed=3).load_state_dict(alone, strict=False)
    with pytest.raises(RuntimeError, match="fc1_gate_weight.*have different"):
        mlp(name, False, seed=3).load_state_dict(mixed)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("split", [True, False])
def test_state_dicts_are_plain_tensors_for_torch_save_and_safetensors(name: str, split: bool, tmp_path: Path) -> None:
    module = mlp(name, split, seed=1)
    state = module.state_dict()
    assert {type(tensor) for tensor in state.values()} == {Tensor}
    torch.save(state, tmp_path / "state.pt")
    if (
        name == "block" and split
    ):  # safetensors refuses the scales of a block that begins in one part and ends in the next
        state = {key: tensor.clone() for key, tensor in state.items()}
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, tmp_path / "state.safetensors")
    for loaded in (torch.load(tmp_path / "state.pt", weights_only=True), load_file(tmp_path / "state.safetensors")):
        other = mlp(name, split, seed=2)
        other.load_state_dict(loaded)
        for key, wanted in state.items():
            assert torch.equal(other.state_dict()[key], wanted), key


def load_on_ranks(state: dict[str, Tensor], whole: dict[str, Tensor], name: str) -> list[str]:
    """Both kinds of entries into both kinds of modules, sharded and tensor parallel. What is wrong."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    problems = []
    for split in (True, False):
        for given in (state, whole):
            module = mlp(name, split, device="meta")
            if split:
                module.set_device_mesh(mesh["tp"], mesh._flatten("weight"))
            fully_shard(module, mesh=mesh["dp"])
            module.reset_parameters()
            module.load_state_dict({k: v.clone() for k, v in given.items()}, strict=False)
            found = module.state_dict()
            for key, wanted in (state if split else whole).items():
                tensor = found[key].full_tensor() if isinstance(found[key], DTensor) else found[key]
                if not torch.equal(tensor, wanted):
                    problems.append(f"{key}, {split=}, {'fc1_weight' in given=}")
    return problems


def test_either_kind_of_entries_loads_into_sharded_modules() -> None:
    # The norm and biases of plain modules are DTensors there, which only DTensors load into: weights alone.
    for name in ("current", "mxfp8"):
        source, joined = mlp(name, True, seed=1), mlp(name, False)
        joined.load_state_dict(source.state_dict())
        state, whole = (
            {k: v.clone() for k, v in m.state_dict().items() if k.startswith("fc1") and "weight" in k}
            for m in (source, joined)
        )
        assert run_ranks(load_on_ranks, 4, state, whole, name) == [[]] * 4
