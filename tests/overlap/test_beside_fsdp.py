"""Tensor-parallel messages and FSDP2's gathers do not wait for each other: one passes while the other is held up.

No clock decides: ranks do the two in different orders, so that whoever waited for the other would wait for ever. Four ranks,
tensor-parallel pairs {0, 1} and {2, 3}, shards of weights on {0, 2} and {1, 3}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from distributed.ranks import Ranks
from ottava.bench.overlap_beside import Flight, Range, flights, measure, plan_of, recorded_step
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


def training_step() -> list[Flight]:
    """The second block's weights come after the first block's tokens have travelled, or never: see `held_up`."""
    device = torch.device("cpu")
    return recorded_step(plan_of(2, "ring", "auto", device), device, held=True)


def all_of_it(trace: Path) -> tuple[list[str], bool, list[Flight]]:
    options = argparse.Namespace(ranks=2, method="pipeline", transport="auto", link=500.0, trace=trace)
    assert measure(options, torch.device("cpu")) == 0
    return fsdp_passes_tensor_parallelism(), tensor_parallelism_passes_fsdp(), training_step()


def test_neither_waits_for_the_other_and_the_trace_shows_it(tmp_path: Path) -> None:
    with Ranks(4) as ranks:
        found = ranks.run(all_of_it, tmp_path / "trace.json", timeout=100)
    names_in_trace = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"FSDP::all_gather (layers.1)", "ottava.overlap.pipelined_all_gather"} <= names_in_trace
    for rank, (names, passed, flights_of_a_step) in enumerate(found):
        assert passed
        if rank in (0, 2):  # messages set out, weights are gathered, messages are waited for
            order = [names.index("ottava.overlap.bulk_all_gather"), names.index("FSDP::all_gather")]
            assert order == sorted(order)
            assert names.index("ottava.overlap.wait bulk_all_gather") > order[1]
        if rank in (0, 1):  # the weights of layers.1 were on their way while layers.0 exchanged tokens four times
            ahead = next(flight for flight in flights_of_a_step if flight.block == "layers.1")
            assert ahead.exchanges.count("ring_all_gather") == 2, ahead
            assert ahead.exchanges.count("pipelined_reduce_scatter") == 4, ahead  # begun, and waited for


def test_flights_are_read_from_the_ranges_of_a_trace() -> None:
    ranges = [
        Range("FSDP::all_gather (layers.0)", 0, 1),
        Range("FSDP::all_gather_copy_out (layers.0)", 1, 2),
        Range("FSDP::all_gather (layers.1)", 3, 4),
        Range("ottava.overlap.ring_all_gather", 5, 9),
        Range("ottava.overlap.wait ring_all_gather", 6, 7),
        Range("ottava.overlap.bulk_all_gather", 9, 12),
        Range("FSDP::all_gather_copy_out (layers.1)", 10, 11),
    ]
    assert flights(ranges[::-1]) == [Flight("layers.0", 1, 1, []), Flight("layers.1", 4, 10, ["ring_all_gather"])]
