"""Dropout of a GPT in the trainer: which masks ranks share, that steps can be repeated, and that recomputation draws them again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distributed.ranks import Ranks
from ottava.kernels import attention
from ottava.train.model import DistributedModel
from train.runs import tiny

# Ranks of a mesh (dp, tp) = (2, 2): tensor-parallel groups are {0, 1} and {2, 3}.
TP, DP = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


class Masks:
    """Digests of what dropout keeps, in the order of the calls: ("hidden" or "attention", digest)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._hidden, self._attention = F.dropout, attention.reference_attention

    def _add(self, kind: str, kept: Tensor) -> None:
        self.seen.append((kind, hashlib.sha256(kept.numpy().tobytes()).hexdigest()))

    def hidden(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training:
            state = torch.get_rng_state()
            self._add("hidden", self._hidden(torch.ones(x.shape), p) != 0)
            torch.set_rng_state(state)
        return self._hidden(x, p, training, inplace)

    def attention(self, *args: Any) -> Tensor:
        self._add("attention", args[6])
        return self._attention(*args)

    def __enter__(self) -> Masks:
        F.dropout, attention.reference_attention = self.hidden, self.attention
        return self

    def __exit__(self, *_: object) -> None:
        F.dropout, attention.reference_attention = self._hidden, self._attention


def masks_of_steps(
    folder: str, parallel: dict[str, Any]
) -> list[tuple[int, list[tuple[str, str]], list[tuple[str, str]]]]:
    """(step, masks of forward, masks of its recomputation) of steps 0, 1 and 0 again."""
    config = tiny(
        Path(folder),
        model={"architecture": "gpt", "dropout": 0.5},
        precision={"recipe": "none"},
        parallel={"tp": 2, "dp_shard": 2, **parallel},
    )
    model = DistributedModel(config, 258, torch.device("cpu"))
    tokens = torch.randint(258, (2, 32), generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    found = []
    for step in (0, 1, 0):
        model.seed_step(step)
        with Masks() as forward:
            loss = model.module(tokens, tokens)
        with Masks() as backward:
            loss.backward()
        found.append((step, forward.seen, backward.seen))
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def of(kind: str, masks: list[tuple[str, str]]) -> list[str]:
    return [digest for found, digest in masks if found == kind]


@pytest.mark.parametrize(
    "parallel",
    [
        {"sequence_parallel": False},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "recompute": "full"},
        {"sequence_parallel": False, "recompute": "full"},
        {"sequence_parallel": True, "recompute": "selective"},
    ],
    ids=lambda fields: ", ".join(f"{key}={value}" for key, value in fields.items()),
)
def test_masks_differ_where_ranks_hold_different_heads_or_tokens(
    ranks: Ranks, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    runs = ranks.run(masks_of_steps, str(tmp_path), parallel)
    for (step, first, recomputed), (_, second, _), (_, again, _) in runs:
        assert step == 0 and first == again, "masks are a function of the step"
        assert len(of("hidden", first)) == 1 + 2 * 2 and len(of("attention", first)) == 2  # embedding, 2 layers
        assert len(set(first) | set(second)) == 2 * len(first), "no mask is drawn twice"
        if parallel.get("recompute") == "full":
            # Layers are recomputed in reverse order, each as it was.
            assert sorted(recomputed) == sorted(first[1:])
        else:
            assert not recomputed
    steps = [run[0][1] for run in runs]
    for a, b in TP:
        assert not set(of("attention", steps[a])) & set(of("attention", steps[b]))
        if parallel["sequence_parallel"]:
            assert not set(of("hidden", steps[a])) & set(of("hidden", steps[b]))
        else:
            assert of("hidden", steps[a]) == of("hidden", steps[b])
    for a, b in DP:
        assert not set(steps[a]) & set(steps[b])
