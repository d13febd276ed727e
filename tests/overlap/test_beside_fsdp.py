"""Tensor-parallel messages and FSDP2's gathers do not wait for each other: one passes while the other is held up.

No clock decides: ranks do the two in different orders, so that whoever waited for the other would wait for ever. Four ranks,
tensor-parallel pairs {0, 1} and {2, 3}, shards of weights on {0, 2} and {1, 3}.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from distributed.ranks import Ranks
from ottava.nn.operand import Operand
from ottava.overlap import Engine, Schedule


def begin_gather(mesh: DeviceMesh, x: Tensor) -> Any:
    begun = Engine(mesh["tp"].get_group(), Schedule.of("bulk")).begin_gather([Operand(x)])
    assert begun is not None
    return begun


def fsdp_passes_tensor_parallelism() -> list[str]:
    """The second rank of a pair sends its tokens only after FSDP2 has gathered: the first has FSDP2 gather while it waits for them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = mesh["tp"].get_local_rank() == 0
    layer = fully_shard(nn.Linear(16, 16, bias=False), mesh=mesh["dp"])
    x = torch.full((4, 16), float(mesh["tp"].get_local_rank()))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        begun = begin_gather(mesh, x) if first else None
        layer(torch.ones(2, 16))
        begun = begun or begin_gather(mesh, x)
        whole = begun()[0].data
    assert torch.equal(whole, torch.tensor([0.0, 1.0]).repeat_interleave(4)[:, None].expand(8, 16))
    events = sorted(
        (e.time_range.start, e.name) for e in seen.events() if e.name.startswith(("ottava.overlap", "FSDP::all_gather"))
    )
    return [name for _, name in events]


def tensor_parallelism_passes_fsdp() -> bool:
    """The second rank of a shard gathers only after its tokens have travelled: the first has them travel while it waits for weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer: Any = fully_shard(nn.Linear(16, 16, bias=False), mesh=mesh["dp"])
    x = torch.full((4, 16), float(mesh["tp"].get_local_rank()))
    if mesh["dp"].get_local_rank() == 0:
        coming = layer.unshard(async_op=True)  # as prefetching does
        whole = begin_gather(mesh, x)()[0].data
    else:
        whole = begin_gather(mesh, x)()[0].data
        coming = layer.unshard(async_op=True)
    coming.wait()
    return float(whole.sum()) == 4 * 16 and layer.weight.shape == (16, 16)


def both() -> tuple[list[str], bool]:
    return fsdp_passes_tensor_parallelism(), tensor_parallelism_passes_fsdp()


def test_neither_waits_for_the_other_and_the_trace_shows_it() -> None:
    with Ranks(4) as ranks:
        found = ranks.run(both, timeout=100)
    for rank, (names, passed) in enumerate(found):
        assert passed
        if rank in (0, 2):  # messages set out, weights are gathered, messages are waited for
            order = [names.index("ottava.overlap.bulk_all_gather"), names.index("FSDP::all_gather")]
            assert order == sorted(order)
            assert names.index("ottava.overlap.wait bulk_all_gather") > order[1]
