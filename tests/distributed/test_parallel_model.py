"""`parallelize` and what belongs to a training loop: accumulation, clipping, frozen and tied parameters, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import ottava
from distributed.parity import RECIPES, SEED, batch_of, build
from distributed.ranks import Ranks
from ottava.distributed import (
    ParallelPlan,
    clip_grad_norm_,
    grad_norm_and_scale,
    gradient_sync,
    gradients,
    meshes_of,
    parallelize,
    prefetch_blocks,
    whole_state,
)
from ottava.models.llama import Llama, LlamaConfig
from ottava.nn.initialize import materialize_
from ottava.optimizers.gradient_norm import norm_and_scale, part_of

MICROBATCHES, BATCH = 4, 16
PLANS: dict[str, dict[str, Any]] = {
    "fsdp2 x tp": {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "overlap": "bulk"},
    "recomputed": {"dp_shard": 2, "tp": 2, "recompute": "full", "prefetch": 2},
    "selective, hsdp": {"dp_replicate": 2, "dp_shard": 2, "recompute": "selective", "reshard_after_forward": False},
    "fsdp1": {"dp_shard": 4, "strategy": "fsdp1"},
    "fsdp1 x tp": {"dp_shard": 2, "tp": 2, "strategy": "fsdp1"},
    "ddp x tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "strategy": "ddp"},
    "offload": {"dp_shard": 4, "cpu_offload": True},
}
FROZEN = "layers.0.layernorm_mlp.fc1_weight"


def freeze(model: nn.Module) -> nn.Module:
    dict(model.named_parameters())[FROZEN].requires_grad_(False)
    return model


def norms_and_weights(
    plan: dict[str, Any] | None, recipe: str, plain_layer: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps of four microbatches, clipped, with a frozen weight and a tied head; in one process without a plan."""
    made = freeze(build("gpt"))
    if plain_layer:
        ottava.leave_unquantized(made.layers[-1])
    if plan is None:
        model, parts = materialize_(made, SEED, "cpu"), 1
        rank = 0
    else:
        model = parallelize(made, ParallelPlan(param_dtype=torch.float32, **plan), seed=SEED)
        parts, rank = meshes_of(model).dp_size, meshes_of(model).dp_rank
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        # A microbatch of the whole run is spread over the data-parallel ranks. Blocks along tokens stay those of one process.
        whole = batch_of(step, BATCH).chunk(MICROBATCHES)
        for i, tokens in enumerate(whole):
            mine = tokens.chunk(parts)[rank]
            with gradient_sync(model, on=i == MICROBATCHES - 1):
                with ottava.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                    loss = model(mine[:, :-1], mine[:, 1:]) / MICROBATCHES
                loss.backward()
        norm, scale = grad_norm_and_scale(model, 0.5)
        norms.append(float(clip_grad_norm_(model, 0.5)))
        assert float(norm) == norms[-1] and scale == (0.5 / (norm + 1e-6)).clamp(max=1.0)
        assert_parts_add_up(model, norms[-1], float(scale))
        optimizer.step()
    return norms, whole_state(model)


def assert_parts_add_up(model: nn.Module, norm: float, scale: float) -> None:
    """What a GPU does for every strategy but FSDP1's own: sums of squares by the ranks that hold parts. The gradients are scaled now."""
    held = list(gradients._gradients(model))
    if isinstance(model, FullyShardedDataParallel) and not any(group for _, group in held):
        return
    shards = (model.process_group,) if isinstance(model, FullyShardedDataParallel) else ()
    found = norm_and_scale([part_of(gradient, group, shards) for gradient, group in held], 0.5)
    assert float(found[0]) == pytest.approx(norm * scale, rel=1e-5) and float(found[1]) == pytest.approx(1.0, rel=1e-5)


def one_big_batch() -> list[float]:
    """The norms without microbatches."""
    model = materialize_(freeze(build("gpt")), SEED, "cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)
    norms = []
    for step in range(2):
        optimizer.zero_grad()
        tokens = batch_of(step, BATCH)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        norms.append(float(clip_grad_norm_(model, 0.5)))
        optimizer.step()
    return norms


def relative(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    error = sum(float((got[n] - w).square().sum()) for n, w in expected.items())
    return (error / sum(float(w.square().sum()) for w in expected.values())) ** 0.5


@pytest.mark.parametrize("name", PLANS)
def test_accumulation_clipping_frozen_and_tied(four_ranks: Ranks, name: str) -> None:
    start = materialize_(build("gpt"), SEED, "cpu").state_dict()
    expected_norms, expected = norms_and_weights(None, "none")
    assert expected_norms == pytest.approx(one_big_batch(), rel=1e-5)
    for norms, weights in four_ranks.run(norms_and_weights, PLANS[name], "none", timeout=120.0):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        assert relative(weights, expected) < 1e-5
        assert torch.equal(weights[FROZEN], start[FROZEN])
        assert torch.equal(weights["head.weight"], weights["embedding.weight"])
        assert not torch.equal(weights["embedding.weight"], start["embedding.weight"])


def test_accumulation_with_fp8_weights_on_the_wire(four_ranks: Ranks) -> None:
    """MXFP8: its scales do not depend on how the batch is cut."""
    expected_norms, expected = norms_and_weights(None, "mxfp8")
    for norms, weights in four_ranks.run(norms_and_weights, PLANS["fsdp2 x tp"], "mxfp8", timeout=120.0):
        assert norms == pytest.approx(expected_norms, rel=1e-3)
        assert relative(weights, expected) < 1e-3


@pytest.mark.parametrize("name", ["fsdp2 x tp", "recomputed", "fsdp1 x tp"])
def test_a_layer_that_is_left_unquantized(four_ranks: Ranks, name: str) -> None:
    expected_norms, expected = norms_and_weights(None, "mxfp8", plain_layer=True)
    quantized_norms, _ = norms_and_weights(None, "mxfp8")
    assert expected_norms != quantized_norms
    for norms, weights in four_ranks.run(norms_and_weights, PLANS[name], "mxfp8", True, timeout=120.0):
        assert norms == pytest.approx(expected_norms, rel=1e-3)
        assert relative(weights, expected) < 1e-3


def mistakes() -> list[str]:
    """What parallelize says to wrong calls; every rank makes the same ones."""
    model = build("llama")
    two_groups = Llama(LlamaConfig(256, 64, 128, layers=1, heads=4, kv_heads=2), device="meta")
    calls = [
        lambda: parallelize(model, {"tp": 2}),  # type: ignore[arg-type]
        lambda: parallelize(model, ParallelPlan(tp=3)),
        lambda: parallelize(two_groups, ParallelPlan(tp=4, dp_shard=1)),
        lambda: parallelize(nn.Linear(4, 4), ParallelPlan(tp=4, sequence_parallel=True)),
        lambda: parallelize(build("llama"), ParallelPlan(tp=2 if dist.get_rank() else 4)),
        lambda: meshes_of(model),
        lambda: prefetch_blocks([nn.Linear(2, 2)], 1),
        lambda: clip_grad_norm_(model, 0.0),
    ]
    said = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_mistakes_are_named(four_ranks: Ranks) -> None:
    words = [
        "takes a ParallelPlan",
        "4 ranks cannot be divided by",
        "does not divide kv_heads=2",
        "VocabParallelEmbedding",
        "plan.tp",
        "was not returned by parallelize",
        "fully_shard has sharded",
        "max_norm must be above 0",
    ]
    for said in four_ranks.run(mistakes, timeout=120.0):
        for sentence, word in zip(said, words, strict=True):
            assert word in sentence, (sentence, word)


def backward_outside(keep_gathered: bool) -> tuple[bool, bool]:
    """(whether FSDP2 finishes a backward pass that comes after `gradient_sync(on=False)`, and whether it frees the weights then)."""
    made = Llama(LlamaConfig(64, 64, 128, layers=1, heads=4, kv_heads=2), device="meta")
    model = parallelize(made, ParallelPlan(dp_shard=4, param_dtype=torch.float32))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with gradient_sync(model, False, keep_gathered):
        model(tokens, tokens).backward()
    model(tokens, tokens).backward()
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    finishes = all(unit._get_fsdp_state()._state_ctx.is_last_backward for unit in units)
    return finishes, all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("keep_gathered", [False, True])
def test_a_backward_pass_after_gradient_sync_is_the_last_one(four_ranks: Ranks, keep_gathered: bool) -> None:
    assert four_ranks.run(backward_outside, keep_gathered) == [(True, True)] * 4


def test_parallelize_needs_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        parallelize(build("llama"), ParallelPlan())
