"""Linear, LayerNormLinear and LayerNormMLP against TransformerEngine's, recorded on an H200 (docs/numerics.md has the bars).

Three steps without weight updates. tests/make_golden.py says what was kept: inputs, parameters and delayed-scaling state in
full, every 32nd row of outputs and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import ottava
from make_golden import ROW_STEP
from ottava import recipe
from quant_cases import relative, same

RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=16),
    "delayed_e4m3": recipe.DelayedScaling(
        fp8_format=recipe.Format.E4M3, amax_history_len=4, amax_compute_algo="most_recent", margin=1
    ),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
BF16 = {"params_dtype": torch.bfloat16, "device": "cpu"}
MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "linear": functools.partial(ottava.Linear, 128, 256, **BF16),
    "linear_nobias": functools.partial(ottava.Linear, 128, 256, bias=False, **BF16),
    "lnlinear_ln": functools.partial(ottava.LayerNormLinear, 128, 256, **BF16),
    "lnlinear_rms": functools.partial(ottava.LayerNormLinear, 128, 256, bias=False, normalization="RMSNorm", **BF16),
    "lnmlp_gelu": functools.partial(ottava.LayerNormMLP, 128, 256, **BF16),
    "lnmlp_swiglu": functools.partial(
        ottava.LayerNormMLP, 128, 256, bias=False, normalization="RMSNorm", activation="swiglu", **BF16
    ),
}
# Relative Frobenius error against the recording: (outputs and input gradients, weight gradients).
BARS = {"linear": (2e-3, 2e-3), "lnlinear": (2e-2, 2e-2), "lnmlp": (3e-2, 3e-2)}
UNQUANTIZED_BARS = (5e-3, 1e-2)
# Columns whose recorded input is ours bit for bit: inputs, weights and output gradients that no arithmetic comes before.
EXACT_COLUMNS = {
    "linear": {"fwd": slice(0, 3), "bwd": slice(0, 2)},
    "lnlinear": {"fwd": [1, 2], "bwd": slice(0, 2)},
    "lnmlp": {"fwd": [1, 4], "bwd": [2, 3]},
}


@functools.cache
def recorded() -> dict[str, Tensor]:
    with safe_open(Path(__file__).parents[1] / "data" / "modules.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def build(name: str) -> torch.nn.Module:
    module = MODULES[name]()
    start = f"{name}/param/"
    module.load_state_dict(
        {key.removeprefix(start): value for key, value in recorded().items() if key.startswith(start)}
    )
    return module


def check_state(module: torch.nn.Module, name: str, key: str) -> None:
    """Delayed-scaling state: equal in the columns whose input is ours bit for bit, within 1% in the others."""
    for direction in ("fwd", "bwd"):
        exact = EXACT_COLUMNS[name.split("_")[0]][direction]
        for what in ("scale", "amax_history"):
            got = getattr(module.fp8_meta[f"scaling_{direction}"], what)
            want = recorded()[key.format(direction=direction, what=what)]
            assert got.shape == want.shape
            assert same(got[..., exact], want[..., exact]), f"{direction} {what}: {got} is not {want}"
            torch.testing.assert_close(got, want, rtol=0.01, atol=0)


@pytest.mark.parametrize("scheme", list(RECIPES))
@pytest.mark.parametrize("name", list(MODULES))
def test_three_steps_as_recorded(name: str, scheme: str) -> None:
    module = build(name)
    bar, weight_bar = UNQUANTIZED_BARS if scheme == "none" else BARS[name.split("_")[0]]
    for step in range(3):
        module.zero_grad()
        x = recorded()[f"{name}/x{step}"].clone().requires_grad_()
        with ottava.autocast(enabled=RECIPES[scheme] is not None, recipe=RECIPES[scheme]):
            y = module(x)
        y.backward(recorded()[f"{name}/dy{step}"])
        if "delayed" in scheme:
            check_state(module, name, f"{name}/{scheme}/scaling_{{direction}}/{{what}}_after{step}")
        if step != 1:
            for got, what in ((y, "y"), (x.grad, "dx")):
                want = recorded()[f"{name}/{scheme}/{what}{step}"]
                error = relative(got.reshape(-1, got.shape[-1])[::ROW_STEP], want)
                assert error < bar, f"{what}{step}: {error}"
    for key, parameter in module.named_parameters():
        got = parameter.grad[::ROW_STEP] if parameter.dim() == 2 else parameter.grad
        error = relative(got, recorded()[f"{name}/{scheme}/grad/{key}"])
        assert error < weight_bar, f"grad of {key}: {error}"


@pytest.mark.parametrize("name", ["linear", "lnlinear_ln", "lnmlp_swiglu"])
def test_the_recordings_tell_recipes_apart(name: str) -> None:
    """A guard: against another recipe's recording the error is far above the bar, so a mix-up would be seen."""
    module = build(name)
    x = recorded()[f"{name}/x0"]
    with ottava.autocast(recipe=RECIPES["block"]):
        y = module(x)
    error = relative(y.reshape(-1, y.shape[-1])[::ROW_STEP], recorded()[f"{name}/none/y0"])
    assert error > 0.02 and error > 4 * BARS[name.split("_")[0]][0] * (name == "linear")
