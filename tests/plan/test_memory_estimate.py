"""The memory that a rank will need, from a step without data: what is sharded falls as 1/N, and the floor has a name."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ottava import recipe
from ottava.distributed import ParallelPlan
from ottava.models.llama import Llama, LlamaConfig
from ottava.optimizers import FusedAdam
from ottava.plan import RankMemory, estimate

CONFIG = LlamaConfig(1024, 512, 1024, layers=2, heads=8, kv_heads=4, max_length=128)
PARAMETERS = 2 * 1024 * 512 + 2 * (512 * 1024 + 512 * 512 + 3 * 512 * 1024 + 2 * 512) + 512
WEIGHTS = PARAMETERS - 2 * 1024 * 512 - 5 * 512  # what is quantized


def build() -> nn.Module:
    return Llama(CONFIG, device="meta")


def loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(1024, (1, 129))
    return model(tokens[:, :-1], tokens[:, 1:])


def long_loss(model: nn.Module) -> Tensor:
    tokens = torch.randint(1024, (8, 129))
    return model(tokens[:, :-1], tokens[:, 1:])


def run(ranks: list[int], chosen: recipe.Recipe | None, **plan: object) -> list[RankMemory]:
    return estimate(build, lambda n: ParallelPlan(**plan), ranks, chosen, loss)  # type: ignore[arg-type]


def test_what_is_sharded_falls_as_one_over_n_down_to_a_floor() -> None:
    one, two, many, more = run([1, 2, 64, 256], recipe.Float8CurrentScaling())
    assert one.parameters == one.gradients == 4 * PARAMETERS
    assert 8 * PARAMETERS <= one.optimizer <= 8 * PARAMETERS + 1000  # two moments, and a step count each
    assert one.copies == WEIGHTS  # a byte each
    for found in (two, many, more):
        assert found.sharded * found.ranks == pytest.approx(one.sharded, rel=0.02)
        assert found.peak > found.parameters + found.optimizer + found.copies
    # The floor: gathered blocks and activations, which do not know how many ranks there are.
    assert more.gathered == pytest.approx(many.gathered, rel=0.02)
    assert more.activations == pytest.approx(many.activations, rel=0.02)
    assert more.peak - more.sharded == pytest.approx(many.peak - many.sharded, rel=0.05)
    assert one.peak > two.peak > many.peak > more.peak


def test_without_a_recipe_nothing_is_copied() -> None:
    (plain,), (quantized,) = run([16], None), run([16], recipe.MXFP8BlockScaling())
    assert plain.copies == 0
    assert 2 * WEIGHTS <= 16 * quantized.copies <= 2.2 * WEIGHTS  # bytes in both directions, and their scales


def test_recomputation_and_tensor_parallelism_lower_the_floor() -> None:
    chosen = recipe.Float8CurrentScaling()
    (kept,), (redone,), (split,) = (
        estimate(build, lambda n: ParallelPlan(**plan), [8], chosen, long_loss)  # type: ignore[arg-type]  # noqa: B023
        for plan in ({}, {"recompute": "full"}, {"tp": 4})
    )
    assert redone.activations < 0.8 * kept.activations
    assert split.gathered < 0.5 * kept.gathered  # a rank gathers a quarter of a layer
    assert split.sharded == pytest.approx(kept.sharded, rel=0.02)  # the same 8 ranks hold the same weights


def test_the_optimizers_state_is_counted_as_it_is_kept() -> None:
    matrices = PARAMETERS - 5 * 512
    expected = {"float32": 8 * PARAMETERS, "bfloat16": 4 * PARAMETERS}
    expected["float8_block128"] = int((2 + 8 / 128) * matrices) + 8 * 5 * 512  # norms keep float32
    for kept, size in expected.items():

        def make(parameters: Iterable[nn.Parameter], kept: str = kept) -> FusedAdam:
            return FusedAdam(parameters, exp_avg_dtype=kept, exp_avg_sq_dtype=kept)

        (found,) = estimate(build, lambda n: ParallelPlan(), [1], None, loss, make)
        assert size <= found.optimizer <= size + 1000, kept
        # Nothing beside gradients, parameters and state lives during a step: the peak is elsewhere, in backward.
        assert found.peak <= found.sharded + found.gathered + found.activations


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match='knows strategy "fsdp2"'):
        run([2], None, strategy="ddp")
    with pytest.raises(ValueError, match="cannot be divided by"):
        run([3], None, tp=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="this process is in a process group"):
            run([2], None)
    finally:
        dist.destroy_process_group()


def test_logits_are_counted_once_as_gpus_have_them() -> None:
    """Their gradient takes their place; in pieces there is one piece, and the head's gradient in float32."""
    words, tokens = 16384, 1024
    config = LlamaConfig(words, 64, 64, layers=1, heads=1, kv_heads=1, max_length=128)

    def activations(max_logits: int) -> int:
        def loss(model: nn.Module) -> Tensor:
            drawn = torch.randint(words, (8, 129))
            return model(drawn[:, :-1], drawn[:, 1:], max_logits=max_logits)

        return estimate(lambda: Llama(config, device="meta"), lambda n: ParallelPlan(), [2], None, loss)[0].activations

    whole, pieces = activations(2**29), activations(words * tokens // 8)
    size = 2 * words * tokens  # in bf16
    assert size < whole < 1.3 * size
    assert pieces < whole - 0.5 * size
