"""Peak memory of a rank for a 12-layer Llama on 1 to 1,024 ranks that shard it (dp_shard), without any of them.

`python benchmarks/memory_by_ranks.py [--recipe NAME] [--recompute MODE] [--tp N]` on any CPU: a minute or two.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ottava import recipe
from ottava.distributed import ParallelPlan
from ottava.models.llama import Llama, LlamaConfig
from ottava.plan import RankMemory, estimate

RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
# 0.9 billion parameters: 2,048 wide, grouped-query attention, a vocabulary of 32,000.
CONFIG = LlamaConfig(32000, 2048, 8192, layers=12, heads=16, kv_heads=8, max_length=4096)
COLUMNS = ("parameters", "gradients", "optimizer", "copies", "sharded", "gathered", "activations", "peak")


def main() -> None:
    """Prints a line for each number of ranks, in GiB."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", choices=list(RECIPES), default="current")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="full")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a rank's microbatch")
    parser.add_argument("--layers", type=int, default=CONFIG.layers)
    options = parser.parse_args()
    config = LlamaConfig(**{**vars(CONFIG), "layers": options.layers})
    ranks = [n for n in (2**i for i in range(11)) if n >= options.tp]

    def plan_for(n: int) -> ParallelPlan:
        return ParallelPlan(tp=options.tp, recompute=options.recompute)

    print(
        f"{config.layers} layers, {options.sequence} tokens a rank, {options.recipe}, recompute {options.recompute}, GiB a rank"
    )
    print("ranks  " + "".join(f"{name:>12}" for name in COLUMNS))
    loss = loss_of(config, options.sequence)
    for n in ranks:
        (found,) = estimate(lambda: Llama(config, device="meta"), plan_for, [n], RECIPES[options.recipe], loss)
        print(line(found), flush=True)


def loss_of(config: LlamaConfig, sequence: int) -> Callable[[nn.Module], Tensor]:
    """The loss of one microbatch of `sequence` tokens."""

    def loss(model: nn.Module) -> Tensor:
        tokens = torch.randint(config.vocab_size, (1, sequence + 1))
        return model(tokens[:, :-1], tokens[:, 1:])

    return loss


def line(found: RankMemory) -> str:
    """One line of the table."""
    return f"{found.ranks:5}  " + "".join(f"{getattr(found, name) / 2**30:12.3f}" for name in COLUMNS)


if __name__ == "__main__":
    main()
