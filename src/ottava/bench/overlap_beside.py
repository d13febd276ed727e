"""`ottava bench overlap --beside-fsdp`: a training step in which FSDP2 gathers weights ahead and tensor parallelism moves tokens.

A small Llama on twice as many ranks as `--ranks`: tensor-parallel groups, and FSDP2 over two of them. Of a recorded step it says, for the
weights of each block, when FSDP2 began to gather them, when the block waited for them, and which tensor-parallel exchanges began and ended
in between. `held_up` makes it certain that neither waits for the other, without a clock: weights that cannot come before tokens have.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ottava.bench import timing
from ottava.bench.overlap_ranks import under_launcher
from ottava.detect.machine import Machine
from ottava.distributed import ParallelPlan, meshes_of, parallelize
from ottava.models.llama import Llama, LlamaConfig
from ottava.overlap.transport import wrapping
from ottava.overlap.virtual_link import VirtualLink

SHARDS = 2
"""Tensor-parallel groups that hold shards of the same weights."""
LAYERS, HIDDEN, LENGTH, VOCABULARY = 3, 256, 256, 512
_GATHER = re.compile(r"FSDP::all_gather \((.+)\)")
_EXCHANGE = re.compile(r"ottava\.overlap\.(\w+)")


class Range(NamedTuple):
    """A named range of a trace. Microseconds."""

    name: str
    begin: float
    end: float


class Flight(NamedTuple):
    """Weights that FSDP2 gathers ahead, from when it has begun to when they are waited for. Microseconds."""

    block: str
    begun: float
    waited_for: float
    exchanges: list[str]
    """Ranges of tensor-parallel exchanges that began and ended meanwhile: one each, or two where something is multiplied in between."""


def measure(options: argparse.Namespace, device: torch.device) -> int:
    """In every rank: one recorded step, printed by rank 0."""
    plan = plan_of(options.ranks or 2, options.method, options.transport, device)
    rate = None if options.link is None else options.link * 1e6
    with nullcontext() if rate is None else wrapping(lambda transport: VirtualLink(transport, rate)):
        found = recorded_step(plan, device, options.trace)
    if dist.get_rank() == 0:
        print(f"tp {plan.tp}, FSDP2 over {SHARDS}, {options.method}; ms of one step\n")
        print(f"{'weights of':14}{'gather begun':>14}{'waited for':>14}  tensor-parallel exchanges meanwhile")
        start = min((flight.begun for flight in found), default=0.0)
        for flight in found:
            times = "".join(f"{(at - start) / 1e3:14.2f}" for at in (flight.begun, flight.waited_for))
            print(f"{flight.block:14}{times}  {', '.join(dict.fromkeys(flight.exchanges)) or '-'}")
    return 0


def plan_of(tp: int, method: str, transport: str, device: torch.device) -> ParallelPlan:
    """Tensor parallelism of `tp` ranks that hides its collectives, FSDP2 outside, the next block's weights gathered ahead."""
    return ParallelPlan(
        tp=tp, dp_shard=SHARDS, sequence_parallel=True, overlap=method, overlap_transport=transport, overlap_minimum_tokens=0,
        prefetch=1, param_dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )  # fmt: skip


def recorded_step(
    plan: ParallelPlan, device: torch.device, trace: Path | None = None, held: bool = False
) -> list[Flight]:
    """The flights of one step after one that warms up. trace: written by rank 0. held: see `held_up`."""
    config = LlamaConfig(VOCABULARY, HIDDEN, 2 * HIDDEN, layers=LAYERS, heads=4, kv_heads=4, max_length=LENGTH)
    # Ranks that were started here share a machine, and perhaps a GPU.
    machine = None if under_launcher() else Machine(gpus_per_node=dist.get_world_size())
    model = parallelize(Llama(config, device="meta"), plan, seed=1, machine=machine, device_type=device.type)
    generator = torch.Generator().manual_seed(meshes_of(model).dp_rank)
    tokens = torch.randint(VOCABULARY, (1, LENGTH + 1), generator=generator).to(device)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        model.zero_grad(set_to_none=True)
        timing.wait()

    step()
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with held_up(model) if held else nullcontext(), profile(activities=kinds) as seen:
        step()
    if trace is not None and dist.get_rank() == 0:
        trace.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(trace))
        print(f"wrote {trace}; open it in ui.perfetto.dev or chrome://tracing")
    on_host = [e for e in seen.events() or [] if e.device_type == torch.autograd.DeviceType.CPU]
    return flights([Range(e.name, e.time_range.start, e.time_range.end) for e in on_host])


def flights(ranges: list[Range]) -> list[Flight]:
    """What FSDP2 gathered ahead, in order, from the ranges of a trace."""
    ranges = sorted(ranges, key=lambda found: found.begin)
    found = []
    for index, gather in enumerate(ranges):
        gathered = _GATHER.fullmatch(gather.name)
        if gathered is None:
            continue
        block = gathered[1]
        name = f"FSDP::all_gather_copy_out ({block})"
        wait = next(later for later in ranges[index:] if later.name == name)  # FSDP2 waits for all that it gathers
        inside = [_EXCHANGE.fullmatch(r.name) for r in ranges if gather.end <= r.begin and r.end <= wait.begin]
        found.append(Flight(block, gather.end, wait.begin, [match[1] for match in inside if match is not None]))
    return found


@contextmanager
def held_up(model: nn.Module) -> Iterator[None]:
    """In here the second block's weights cannot come before the first block's tokens have travelled.

    Ranks of the first shard begin to gather them before the first block runs; those of the second only after the first shard's ranks
    have sent word that their first block is done. If tensor-parallel messages waited for FSDP2's gather, nobody would ever send it.
    """
    layers: Any = model.layers
    meshes = meshes_of(model)
    here, others = meshes.dp_rank, dist.get_world_size() // SHARDS
    peer = (dist.get_rank() + others) % dist.get_world_size()

    def send_word(*_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # of the block alone: not of FSDP2's streams
        dist.send(torch.zeros(1, dtype=torch.float32), dst=peer)

    def wait_for_word(*_: Any) -> None:
        dist.recv(torch.zeros(1, dtype=torch.float32), src=peer)

    hook: Callable[..., None] = send_word if here == 0 else wait_for_word
    if here != 0:
        layers[0].set_modules_to_forward_prefetch([])
    handle = layers[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        if here != 0:
            layers[0].set_modules_to_forward_prefetch([layers[1]])
