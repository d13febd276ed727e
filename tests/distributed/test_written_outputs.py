"""What a sharded module returns may be changed in place (`y += x`): backward still finds its weights gathered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ottava
from distributed.fsdp_cases import RECIPES
from distributed.ranks import Ranks
from ottava.models import Llama, LlamaConfig

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: ottava.Linear(64, 64, device="cpu"),
    "LayerNormLinear": lambda: ottava.LayerNormLinear(64, 64, return_layernorm_output=True, device="cpu"),
    "LayerNormMLP": lambda: ottava.LayerNormMLP(64, 128, return_layernorm_output=True, device="cpu"),
    "GroupedLinear": lambda: ottava.GroupedLinear(2, 64, 64, device="cpu"),
    "RMSNorm": lambda: ottava.RMSNorm(64, device="cpu"),
    "MultiheadAttention": lambda: ottava.MultiheadAttention(64, 2, attention_dropout=0.0, device="cpu"),
}


def gradients(name: str, stored: bool, in_place: bool) -> list[Tensor]:
    """Of two such modules, one after the other, each a unit of its own that frees its weights after forward."""
    torch.manual_seed(0)
    with ottava.quantized_model_init(enabled=stored, recipe=RECIPES["current"]):
        modules: list[Any] = [MODULES[name](), MODULES[name]()]
    for module in modules:
        fully_shard(module, mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=True)
    x = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    h = x
    for module in modules:
        extra = ([16, 16],) if name == "GroupedLinear" else ()
        with ottava.autocast(enabled=stored, recipe=RECIPES["current"]):
            out = module(h, *extra)
        y, *others = out if isinstance(out, tuple) else (out,)
        if in_place:
            y += h
        else:
            y = y + h
        h = sum(others, y)
    h.square().sum().backward()
    return [x.grad, *(p.grad.full_tensor() for module in modules for p in module.parameters())]  # type: ignore[list-item]


def wrong() -> list[str]:
    found = []
    for name in MODULES:
        for stored in (False, True):
            one, other = (gradients(name, stored, in_place) for in_place in (False, True))
            found += [f"{name}, {stored}"] if not all(map(torch.equal, one, other)) else []
    return found


def test_an_output_that_is_changed_in_place_keeps_its_gradients(four_ranks: Ranks) -> None:
    assert four_ranks.run(wrong) == [[]] * 4


def test_an_output_that_backward_needs_is_not_changed_in_silence() -> None:
    x = torch.randn(8, 4, 64)
    for module in (MODULES["LayerNormLinear"](), MODULES["LayerNormMLP"]()):
        y, normalized = module(x)
        normalized *= 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y.sum() + normalized.sum()).backward()
    for module in (ottava.LayerNormLinear(64, 64, device="cpu"), ottava.LayerNormMLP(64, 128, device="cpu")):
        y, total = module(x, residual=torch.randn(8, 4, 64))
        total *= 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y.sum() + total.sum()).backward()


def warned() -> list[str]:
    """What torch says of a model whose layers leave their residual to the next one's norm."""
    model = Llama(LlamaConfig(64, 64, 128, 2, 2, 2, 32), device="cpu")
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=init_device_mesh("cpu", (4,)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tokens = torch.zeros(1, 32, dtype=torch.int64)
        model(tokens, tokens).backward()
    return [str(warning.message) for warning in found if "view" in str(warning.message)]


def test_layers_return_no_views(four_ranks: Ranks) -> None:
    assert four_ranks.run(warned) == [[]] * 4
