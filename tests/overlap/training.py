"""A small Llama whose collectives travel under its products, beside the same one that waits for them: what ranks run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ottava
from distributed.parity import RECIPES
from ottava.distributed import ParallelPlan, clip_grad_norm_, gradient_sync, meshes_of, parallelize, whole_state
from ottava.models.llama import Llama, LlamaConfig
from ottava.overlap import measuring

STEPS = 2


def train(
    plan: dict[str, Any], recipe: str, overlap: str, microbatches: int
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """(losses, weights after the last step, what moved bytes)."""
    config = LlamaConfig(256, 128, 256, layers=2, heads=4, kv_heads=4, max_length=16)
    model: nn.Module = Llama(config, device="meta")
    asked = ParallelPlan(
        sequence_parallel=True,
        param_dtype=torch.float32,
        overlap=overlap,
        overlap_minimum_tokens=0,
        **plan,
    )
    model = parallelize(model, asked, seed=1)
    meshes = meshes_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    with measuring() as meter:
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(microbatches):
                generator = torch.Generator().manual_seed(100 * step + 10 * part + meshes.dp_rank)
                tokens = torch.randint(256, (2, 17), generator=generator)
                last = part == microbatches - 1
                with ottava.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]), gradient_sync(model, last):
                    loss = model(tokens[:, :-1], tokens[:, 1:])
                    loss.backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            losses.append(loss.item())
            model.eval()
            with torch.no_grad():  # evaluation in between
                losses.append(float(model(tokens[:, :-1], tokens[:, 1:])))
            model.train()
    return losses, whole_state(model), sorted(meter.by_name)


def differs(plan: dict[str, Any], recipes: list[str], overlaps: list[str], microbatches: int = 1) -> list[str]:
    """Which losses or weights are not, bit for bit, those of a run that waits for its collectives."""
    wrong = []
    for recipe in recipes:
        losses, weights, _ = train(plan, recipe, "none", microbatches)
        for overlap in overlaps:
            found, after, moved = train(plan, recipe, overlap, microbatches)
            wrong += [] if found == losses else [f"{recipe} {overlap}: losses {found} instead of {losses}"]
            wrong += [
                f"{recipe} {overlap}: {name}" for name, value in weights.items() if not torch.equal(after[name], value)
            ]
            wrong += [] if moved else [f"{recipe} {overlap}: nothing moved"]
    return wrong
