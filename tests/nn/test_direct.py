"""The straight loops of `nn/direct.py` give the bits of `core`'s, are taken where they may be, and cost few Python calls."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ottava
from ottava import recipe, torch_private
from ottava.nn import base, direct
from ottava.nn.product import watching
from quant_cases import RECIPES, all_same, casting, delayed_state, gradients

MODULES: dict[str, Any] = {
    "linear": lambda: ottava.Linear(64, 96, device="cpu"),
    "linear without bias": lambda: ottava.Linear(64, 96, bias=False, device="cpu"),
    "split linear": lambda: ottava.Linear(64, 96, parameters_split={"query": 64, "key": 32}, device="cpu"),
    "layernorm linear": lambda: ottava.LayerNormLinear(64, 96, device="cpu"),
    "rmsnorm linear": lambda: ottava.LayerNormLinear(
        64, 96, normalization="RMSNorm", zero_centered_gamma=True, device="cpu"
    ),
    "gelu mlp": lambda: ottava.LayerNormMLP(64, 96, activation="gelu", device="cpu"),
    "swiglu mlp": lambda: ottava.LayerNormMLP(
        64, 96, activation="swiglu", normalization="RMSNorm", bias=False, device="cpu"
    ),
    "recomputing linear": lambda: ottava.Linear(64, 96, recompute="selective", device="cpu"),
    "recomputing rmsnorm linear": lambda: ottava.LayerNormLinear(
        64, 96, normalization="RMSNorm", recompute="selective", device="cpu"
    ),
    "recomputing gelu mlp": lambda: ottava.LayerNormMLP(64, 96, activation="gelu", recompute="selective", device="cpu"),
    "recomputing swiglu mlp": lambda: ottava.LayerNormMLP(
        64, 96, activation="swiglu", normalization="RMSNorm", bias=False, recompute="selective", device="cpu"
    ),
}


def trained(module: nn.Module, name: str, wants_dx: bool = True, microbatches: bool = False) -> list[Tensor | None]:
    """Outputs, gradients and delayed-scaling state of three steps."""
    seen: list[Tensor | None] = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).requires_grad_(wants_dx)
        torch.manual_seed(step)  # of stochastic rounding
        with casting(name):
            y = module(x, is_first_microbatch=step == 0) if microbatches else module(x)
        y.square().mean().backward()
        seen += [y, x.grad, *gradients(module)]
    return [*seen, *delayed_state(module).values()]


def chain_of(module: nn.Module) -> Any:
    return module._last_chain.chain


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("name", RECIPES)
def test_the_straight_loops_have_the_bits_of_the_general_ones(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    other = copy.deepcopy(module)
    straight = trained(module, name)
    assert chain_of(module).direct
    monkeypatch.setattr(base, "direct", lambda stages, groups: False)
    assert all_same(straight, trained(other, name)) and not chain_of(other).direct


@pytest.mark.parametrize("case", ["frozen weight", "frozen norm", "no input gradient", "microbatches", "main_grad"])
def test_the_same_where_some_gradients_are_not_wanted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module = ottava.LayerNormMLP(64, 96, activation="gelu", fuse_wgrad_accumulation=case == "main_grad", device="cpu")
    if case == "frozen weight":
        module.fc2_weight.requires_grad_(False)
    if case == "frozen norm":
        module.layer_norm_weight.requires_grad_(False)
        module.layer_norm_bias.requires_grad_(False)
    other = copy.deepcopy(module)
    for one in (module, other) if case == "main_grad" else ():
        for parameter in (one.fc1_weight, one.fc2_weight):
            parameter.main_grad = torch.zeros(parameter.shape)
    options = {"wants_dx": case != "no input gradient", "microbatches": case == "microbatches"}
    straight = trained(module, "delayed", **options)
    monkeypatch.setattr(base, "direct", lambda stages, groups: False)
    assert all_same(straight, trained(other, "delayed", **options))
    if case == "main_grad":
        assert all_same(*([one.fc1_weight.main_grad, one.fc2_weight.main_grad] for one in (module, other))) and bool(
            module.fc1_weight.main_grad.any()
        )


def test_who_watches_sees_every_product_of_a_direct_chain() -> None:
    """Also if the watching begins between forward and backward."""
    module, seen = MODULES["swiglu mlp"](), []
    x = torch.randn(32, 64).requires_grad_()
    with watching(lambda a, b: seen.append((str(a.scheme), str(b.scheme)))), casting("current"):
        module(x).sum().backward()
    assert len(seen) == 6
    with casting("current"):
        y = module(x)
    with watching(lambda a, b: seen.append((str(a.scheme), str(b.scheme)))):
        y.sum().backward()
    assert seen[6:] == seen[2:6]


def test_calibration_takes_the_general_loops() -> None:
    """They record what an unquantized stage multiplies."""
    module = ottava.Linear(64, 96, device="cpu")
    with ottava.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):
        module(torch.randn(32, 64))
    assert not chain_of(module).direct and bool((module.delayed.fwd_scale[:2] != 1).all())


@pytest.mark.parametrize("name", ["none", "current", "delayed"])
def test_under_torch_autocast_and_under_a_mode_the_bits_are_the_same(name: str) -> None:
    """There ops are called through the dispatcher, not as plain functions."""
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    module = MODULES["swiglu mlp"]().bfloat16()
    one, two, three = (copy.deepcopy(module) for _ in range(3))
    x = torch.randn(32, 64, dtype=torch.bfloat16)

    def step(module: nn.Module) -> list[Tensor | None]:
        leaf = x.clone().requires_grad_()
        with casting(name):
            y = module(leaf)
        y.float().square().mean().backward()
        return [y, leaf.grad, *gradients(module)]

    plain = step(one)
    with FlopCounterMode(display=False):
        assert all_same(plain, step(two))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all_same(plain, step(three))


def test_what_is_not_plain_takes_the_general_loops() -> None:
    def direct_with(module: nn.Module, chosen: recipe.Recipe) -> bool:
        with ottava.autocast(recipe=chosen):
            module(torch.randn(32, 64))
        return chain_of(module).direct

    current = recipe.Float8CurrentScaling()
    assert direct_with(ottava.Linear(64, 96, device="cpu"), current)
    assert direct_with(ottava.Linear(64, 96, recompute="selective", device="cpu"), current)
    assert not direct_with(ottava.LayerNormLinear(64, 96, return_layernorm_output=True, device="cpu"), current)
    assert not direct_with(
        ottava.Linear(64, 96, device="cpu"), recipe.Float8CurrentScaling(backward_override="high_precision")
    )


def test_a_feature_size_is_checked_for_every_recipe_that_comes() -> None:
    """The check is part of what is resolved once: another recipe has to be checked again."""
    module, x = ottava.Linear(48, 48, device="cpu"), torch.randn(32, 48)
    for _ in range(2):
        with ottava.autocast(recipe=recipe.Float8CurrentScaling()):
            module(x)
        with ottava.autocast(recipe=recipe.MXFP8BlockScaling()), pytest.raises(ValueError, match="multiple of 32"):
            module(x)


def calls_above_ops(module: nn.Module, x: Tensor, name: str) -> int:
    """Python calls of a forward, from the module down to the ops but not inside of them."""
    count, depth = 0, 0

    def look(frame: Any, event: str, arg: Any) -> None:
        nonlocal count, depth
        inside = "/kernels/" in frame.f_code.co_filename.replace("\\", "/")
        if event == "call":
            depth += inside or depth > 0
            count += depth == 0
        elif event == "return":
            depth -= depth > 0

    with casting(name):
        module(x)
        sys.setprofile(look)
        try:
            module(x)
        finally:
            sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("kind", "bars"),
    [
        ("linear", {"none": 20, "delayed": 24, "current": 20, "block": 20}),
        ("layernorm linear", {"none": 26, "delayed": 29, "current": 26, "block": 26}),
        ("gelu mlp", {"none": 40, "delayed": 42, "current": 39, "block": 39}),
    ],
)
def test_a_forward_costs_few_python_calls_beside_its_ops(
    kind: str, bars: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear had 160 before chains were direct. With its ops, on a GPU, it has fewer than 40 (benchmarks/host_overhead.py)."""
    monkeypatch.delitem(
        sys.modules, torch_private.PIPELINE_STAGES, raising=False
    )  # another test may have had a pipeline
    found = {name: calls_above_ops(MODULES[kind](), torch.randn(32, 64), name) for name in bars}
    assert all(found[name] <= bar for name, bar in bars.items()), found


def test_the_functions_arguments_are_where_direct_expects_them() -> None:
    from ottava.nn.core import _ChainFunction

    names = _ChainFunction.forward.__code__.co_varnames[1 : direct.FIRST + 1]
    assert names[-1] == "h" and len(names) == direct.FIRST
