"""Validation loss: the mean over held-out tokens, the same tokens every time."""

from __future__ import annotations

from collections.abc import Callable

from ottava.train.config import Config
from ottava.train.data import IGNORED, Data
from ottava.train.model import DistributedModel
from ottava.train.world import World


def evaluate(
    model: DistributedModel, data: Data, config: Config, world: World, beat: Callable[[], None] = lambda: None
) -> float:
    """Cross-entropy (without z-loss) over at most train.evaluate_batches global batches of `data`, a mean over tokens.

    beat: called before each microbatch.

    >>> math.exp(evaluate(model, validation, config, world))  # perplexity
    """
    meshes, train = model.meshes, config.train
    total = count = 0.0
    with model.eval_scope():
        for batch in data.sweep(train.global_batch, (meshes.dp_rank, meshes.dp_size), train.evaluate_batches):
            for part in batch.to(world.device).split(train.micro_batch):
                beat()
                with model.precision():
                    loss = model.module(
                        part.tokens, part.targets, part.packed(), reduction="sum", max_logits=train.max_logits
                    )
                total += float(loss)
                count += float((part.targets != IGNORED).sum())
    total, count = world.sum([total, count])  # tp ranks count the same tokens: numerator and denominator alike
    return total / max(count, 1.0)
