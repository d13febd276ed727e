"""TransformerEngine's switches do what they say: each hides its own collective, by its own method, and no other."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import ottava
from distributed.ranks import Ranks
from ottava.nn.base import QuantizedModule
from ottava.notices import warn_once
from ottava.overlap import measuring

SWITCHES = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
SIZE = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2}


def moved(**switches: bool) -> tuple[dict[str, int], dict[str, int]]:
    """(messages by method, bytes of collectives that were waited for) of a step of a transformer layer."""
    torch.manual_seed(dist.get_rank())
    off = dict.fromkeys((s for s in SWITCHES if s not in switches), False)
    layer = ottava.TransformerLayer(
        **SIZE, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True, sequence_parallel=True, tp_size=2,
        tp_group=dist.group.WORLD, ub_tp_comm_overlap=True, params_dtype=torch.float32, device="cpu", **off, **switches,
    )  # fmt: skip
    for module in layer.modules():  # so few tokens would not be cut
        if isinstance(module, QuantizedModule):
            module.overlap = replace(module.overlap, minimum_tokens=0)
            module.set_tensor_parallel_group(module.tp_group)
    x = torch.randn(8, 2, 32, requires_grad=True)
    with measuring() as meter:
        layer(x).sum().backward()
    return {name: flow.messages for name, flow in meter.by_name.items()}, dict(meter.collectives)


def one_by_one() -> dict[str, Any]:
    return {"": moved()} | {switch: moved(**{switch: True}) for switch in SWITCHES}


def idle_switches() -> list[str]:
    """What is said of switches that cannot act."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ottava").addHandler(handler)
    warn_once.cache_clear()
    options: dict[str, Any] = {"device": "cpu", "tp_group": dist.group.WORLD, "tp_size": 2}
    for _ in range(2):
        ottava.Linear(32, 32, parallel_mode="column", ub_overlap_ag=True, **options)(torch.randn(4, 32))
        ottava.Linear(32, 32, parallel_mode="column", sequence_parallel=True, ub_overlap_rs=True, **options)(
            torch.randn(4, 32)
        )
        ottava.Linear(32, 32, ub_bulk_wgrad=True, device="cpu")(torch.randn(4, 32))
    logging.getLogger("ottava").removeHandler(handler)
    return said


def test_each_switch_hides_its_collective_and_no_other() -> None:
    with Ranks(2) as ranks:
        found = ranks.run(one_by_one)[0]
        said = ranks.run(idle_switches)
    hidden, waited = found[""]
    assert hidden == {}
    for switch, method, collective, count in (
        ("ub_overlap_ag", "ring_all_gather", "all_gather", 4),  # qkv, fc1 forward; proj, fc2 dgrad
        ("ub_overlap_rs", "pipelined_reduce_scatter", "reduce_scatter", 2 * 4),  # proj, fc2 forward, in 4 pieces
        ("ub_overlap_rs_dgrad", "pipelined_reduce_scatter", "reduce_scatter", 2 * 4),  # qkv, fc1
        ("ub_bulk_dgrad", "bulk_all_gather", "all_gather", 2),
        ("ub_bulk_wgrad", "bulk_reduce_scatter", "reduce_scatter", 2),
    ):
        by_method, left = found[switch]
        assert by_method == {method: count}, switch
        others = {name for name in waited if name != collective}
        assert {name: left[name] for name in others} == {name: waited[name] for name in others}, switch
        whole = 16 * 32 * 4  # bytes that a rank sends in one collective: as many as it has tokens
        assert waited[collective] - left.get(collective, 0) == (4 if switch == "ub_overlap_ag" else 2) * whole, switch
    assert said[1] == [] and len(said[0]) == 3, said
    for option, reason in {
        "ub_overlap_ag": "without sequence_parallel",
        "ub_overlap_rs": "acts on row",
        "ub_bulk_wgrad": "one tensor-parallel rank",
    }.items():
        assert sum(option in line and "no effect" in line and reason in line for line in said[0]) == 1
