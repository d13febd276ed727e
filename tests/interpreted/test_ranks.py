"""Two ranks whose tensors say that they lie on a GPU train as one of a CPU does: gathers, their kernels, split products."""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distributed.update_parity import PLANS, Trained, bar_of, check_updates, on_ranks, one_process

WIDTH, BATCH = 64, 2
NAMES = ["none", "delayed", "current", "block"]


def _rank(rank: int, folder: str) -> None:
    import triton_on_cpu

    triton_on_cpu.install()
    from pretended_cuda import pretended_cuda

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with pretended_cuda():
        results = {(plan, name): on_ranks(plan, WIDTH, name, BATCH, "cpu") for plan in PLANS for name in NAMES}
    torch.save(results, f"{folder}/results-{rank}")
    dist.barrier()
    dist.destroy_process_group()


@functools.cache
def one_rank(name: str, dp: int) -> Trained:
    return one_process(WIDTH, name, dp, BATCH, "cpu")


def test_two_ranks_update_as_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(folder,), nprocs=2)
        files = [torch.load(f"{folder}/results-{rank}", weights_only=False) for rank in range(2)]  # our own files
    for plan, name in files[0]:
        runs = [results[plan, name] for results in files]
        dp = 2 if plan == "fsdp2" else 1
        whole = one_rank(name, dp)
        assert runs[0].losses == pytest.approx(whole.losses, rel=2e-2), (plan, name)
        check_updates(runs, whole, bar_of(name, whole, one_rank("none", dp)))
