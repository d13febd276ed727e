"""Modules that are split over tensor-parallel ranks compute what one process computes, however they came to be split.

In float32 on the CPU outputs are equal bit for bit (`kernels/fixed_order.py`); of gradients, sums over tokens that ranks took apart
and rows that lie in another order differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from distributed.ranks import Ranks
from distributed.tp_ranks import CASES, INSTALL, RECIPES, Run, compare

FLOAT32, BFLOAT16 = 1e-6, 2e-2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def check(ranks: Ranks, name: str, run: Run, exact: bool = True) -> None:
    for rank, errors in enumerate(ranks.run(compare, name, run)):
        wrong = {key: e for key, e in errors.items() if e > (FLOAT32 if run.dtype == torch.float32 else BFLOAT16)}
        assert not wrong, (rank, wrong)
        assert errors["y"] == 0.0 or not exact, (rank, errors["y"])


def spreads_tokens(name: str) -> bool:
    return "experts" not in name and name != "softmax offset"


@pytest.mark.parametrize("install", INSTALL)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_every_module_and_every_way_to_spread_it(
    ranks: Ranks, name: str, sequence_parallel: bool, install: str
) -> None:
    if spreads_tokens(name) or not sequence_parallel:
        check(ranks, name, Run(sequence_parallel=sequence_parallel, install=install))


# Two sequences: 256 tokens fill blocks of 128 on each of two ranks; of 48 the 24 of a rank end inside a block of 128, 32 or 16.
SPREAD = [(False, 24), (True, 24), (True, 128)]
QUANTIZED = [name for name in RECIPES if name != "none"]


@pytest.mark.parametrize(("sequence_parallel", "tokens"), SPREAD)
@pytest.mark.parametrize("name", ["column", "row", "swiglu", "encoder"])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_every_recipe(ranks: Ranks, recipe: str, name: str, sequence_parallel: bool, tokens: int) -> None:
    steps = 3 if recipe == "delayed" else 1
    check(ranks, name, Run(recipe, sequence_parallel=sequence_parallel, tokens=tokens, steps=steps))


@pytest.mark.parametrize("name", ["experts, column", "experts, row"])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_experts(ranks: Ranks, recipe: str, name: str) -> None:
    check(ranks, name, Run(recipe, tokens=80, steps=2))


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["column", "row", "gelu", "swiglu"])
def test_bfloat16(ranks: Ranks, recipe: str, name: str) -> None:
    """Partial products are rounded to bfloat16 before they are added, so not every bit is equal."""
    check(ranks, name, Run(recipe, torch.bfloat16, sequence_parallel=True, tokens=24, steps=3), exact=False)


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("name", ["encoder", "llama", "layer, residual after norm"])
def test_bfloat16_of_a_whole_layer(ranks: Ranks, recipe: str, name: str) -> None:
    """A bfloat16 rounding that differs flips FP8 roundings behind it: docs/numerics.md has the bars of a layer."""
    run = Run(recipe, torch.bfloat16, sequence_parallel=True, tokens=24, steps=3)
    for errors in ranks.run(compare, name, run):
        for key, e in errors.items():
            if "key_bias" not in key:  # softmax does not see it: its gradient is 0, but for rounding
                assert e <= (6e-2 if key.startswith("parameter") else 2e-2), (key, e)


@pytest.mark.parametrize("tokens", [24, 128])
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "mxfp8", "nvfp4", "current dequantized"])
@pytest.mark.parametrize("name", ["column", "row", "LayerNormLinear", "gelu", "llama"])
def test_selective_recomputation(ranks: Ranks, name: str, recipe: str, tokens: int) -> None:
    options = (("recompute", "selective"),)
    check(ranks, name, Run(recipe, sequence_parallel=True, tokens=tokens, steps=2, options=options))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("name", ["column", "row", "gelu", "llama"])
def test_a_kept_copy_of_the_weight(ranks: Ranks, name: str, recipe: str, sequence_parallel: bool) -> None:
    check(ranks, name, Run(recipe, sequence_parallel=sequence_parallel, microbatches=True))


@pytest.mark.parametrize("install", ["mesh", "group"])
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("name", ["column, split", "row", "gelu", "experts, row", "attention, separate"])
def test_weight_gradients_added_into_main_grad(ranks: Ranks, name: str, recipe: str, install: str) -> None:
    check(ranks, name, Run(recipe, install=install, steps=2, options=(("fuse_wgrad_accumulation", True),)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["column", "row", "gelu", "encoder"])
def test_calibration_collects_the_statistics_of_one_process(ranks: Ranks, name: str, sequence_parallel: bool) -> None:
    run = Run("delayed", sequence_parallel=sequence_parallel, calibrating=True)
    check(ranks, name, run)


@pytest.mark.parametrize("name", ["column", "gelu", "llama", "attention, fused, not interleaved"])
@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"])
def test_four_ranks(four_ranks: Ranks, recipe: str, name: str) -> None:
    options = (("num_gqa_groups", 4),) if name not in ("column", "gelu") else ()
    check(four_ranks, name, Run(recipe, sequence_parallel=True, tokens=24, options=options))
