"""No module outside of quant/ and kernels/ knows formats, none outside of quant/ knows recipes' classes, the core knows no mode,
and tensors are made with a dtype."""

from __future__ import annotations

import pytest

import walls


def test_the_walls_stand() -> None:
    assert not walls.all_breaches()


@pytest.mark.parametrize(
    "line",
    [
        'x = ":tensor" in scheme',
        'x = ":tensor" not in stage.input',
        'x = scheme.startswith("e2m1")',
        'x = str(scheme).removesuffix(":f32")',
        'x = q.scheme.kind == "mx"',
        "x = Scheme.parse(text).block",
        'x = weight_scheme.format != "e2m1"',
        'x = scheme == "e4m3:tensor"',
        "x = isinstance(recipe, DelayedScaling)",
        "x = isinstance(r, ottava.recipe.MXFP8BlockScaling | recipe.NVFP4BlockScaling)",
        "x = type(recipe) is Float8BlockScaling",
        "x = recipe.delayed()",
    ],
)
def test_a_module_that_looks_into_a_format_is_named(line: str) -> None:
    assert [n for n, _ in walls.breaches(f"import torch\n{line}\n", "nn/core.py")] == [2]


@pytest.mark.parametrize(
    "line",
    [
        "x = scheme.per_tensor and scheme.fills_blocks(8)",
        "x = recipe.DelayedScaling(amax_history_len=4)",
        "x = isinstance(recipe, Recipe)",
        "x = schedule.kind == 'wsd'",
        "x = norm.kind",
        "x = state.delayed.mark_for_update(recipe, group)",
        "x = a.split(',')",
    ],
)
def test_questions_are_free(line: str) -> None:
    assert not walls.breaches(line, "nn/core.py")


def test_rooms_may_know_their_own() -> None:
    assert not walls.breaches('x = scheme.kind == "mx"', "kernels/gemm.py")
    assert not walls.breaches("x = isinstance(recipe, DelayedScaling)", "quant/scheme.py")
    assert walls.breaches("x = isinstance(recipe, DelayedScaling)", "kernels/gemm.py")


def test_the_core_knows_no_parallel_mode() -> None:
    for line in ('x = strategy.mode == "row"', "x = strategy.mode", 'x = chosen == "column"'):
        assert walls.breaches(line, "nn/core.py")
        assert not walls.breaches(line, "distributed/tensor_parallel.py")


def test_a_tensor_that_follows_the_default_dtype_is_named() -> None:
    for line in ("x = torch.zeros(3, device=device)", "x = torch.tensor([1.0])"):
        assert walls.breaches(line, "kernels/many_triton.py")
    for line in ("x = torch.zeros(3, dtype=torch.float32)", "x = torch.ones(3, **options)", "x = torch.zeros_like(y)"):
        assert not walls.breaches(line, "kernels/many_triton.py")
