"""Several microbatches, one reduction over ranks."""

from __future__ import annotations

import pytest
import torch

import ottava
from distributed.ranks import Ranks
from ottava.distributed import ParallelPlan, gradient_sync, parallelize
from ottava.models import Llama, LlamaConfig
from ottava.overlap.collectives import FixedOrderReduceScatter


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def _reductions(strategy: str, microbatches: int) -> int:
    """Reductions of gradients in one step."""
    shape = LlamaConfig(64, 32, 64, layers=2, heads=2, kv_heads=2, max_length=16)
    model = parallelize(Llama(shape, device="meta"), ParallelPlan(strategy=strategy, param_dtype=torch.float32), seed=1)
    made = 0
    plain = FixedOrderReduceScatter.__call__

    def counted(self, *args, **options):
        nonlocal made
        made += 1
        return plain(self, *args, **options)

    def hook(_, bucket):
        nonlocal made
        made += 1
        return torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

    FixedOrderReduceScatter.__call__ = counted
    if strategy == "ddp":
        model.register_comm_hook(None, hook)
    try:
        for i in range(microbatches):
            tokens = torch.randint(64, (2, 17))
            with gradient_sync(model, i == microbatches - 1), ottava.autocast(enabled=False):
                model(tokens[:, :-1], tokens[:, 1:]).backward()
    finally:
        FixedOrderReduceScatter.__call__ = plain
    return made


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_four_microbatches_communicate_as_often_as_one(two, strategy):
    one, four = two.run(_reductions, strategy, 1), two.run(_reductions, strategy, 4)
    assert one == four and min(one) > 0
