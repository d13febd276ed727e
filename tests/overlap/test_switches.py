"""TransformerEngine's switches do what they say; one that cannot act says so once, at WARNING, with the reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ottava
from distributed.ranks import Ranks
from ottava.nn.options import OverlapOptions
from ottava.overlap import measuring
from ottava.overlap.switches import configure, schedule_of, warn_of_idle_switches


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def nothing_configured() -> Iterator[None]:
    yield
    configure({})


def _moved(kind: str, switches: dict[str, bool]) -> dict[str, list[str]]:
    """What moved bytes in forward and in backward of a layer whose switches are on."""
    common: dict[str, Any] = {
        "device": "cpu", "sequence_parallel": True, "tp_group": dist.group.WORLD, "tp_size": dist.get_world_size(), **switches,
    }  # fmt: skip
    if kind == "mlp":
        layer: Any = ottava.LayerNormMLP(64, 128, set_parallel_mode=True, **common)
    elif kind == "layer":
        layer = ottava.TransformerLayer(64, 128, 4, set_parallel_mode=True, fuse_qkv_params=True, **common)
    else:
        layer = ottava.Linear(64, 64, parallel_mode=kind, **common)
    shape = (16, 1, 64) if kind == "layer" else (16, 32 if kind == "row" else 64)
    x = torch.randn(shape, requires_grad=True)
    with measuring() as forward:
        y = layer(x)
    with measuring() as backward:
        y.sum().backward()
    return {"forward": sorted(forward.by_name), "backward": sorted(backward.by_name)}


RING, PIPELINE = "ring_all_gather", "pipelined_reduce_scatter"
GATHER, SCATTER = "bulk_all_gather", "bulk_reduce_scatter"


@pytest.mark.parametrize(
    ("kind", "switches", "forward", "backward"),
    [
        ("column", {}, [], []),
        ("column", {"ub_overlap_ag": True}, [RING], []),
        ("column", {"ub_overlap_rs_dgrad": True}, [], [PIPELINE]),
        ("column", {"ub_bulk_dgrad": True}, [], [GATHER]),
        ("column", {"ub_bulk_wgrad": True}, [], [SCATTER]),
        ("row", {"ub_overlap_rs": True}, [PIPELINE], []),
        ("row", {"ub_overlap_ag": True}, [], [RING]),
        ("mlp", {"ub_overlap_ag": True, "ub_overlap_rs": True}, [PIPELINE, RING], [RING]),
        ("layer", {"ub_overlap_ag": True}, [], []),
        ("layer", {"ub_tp_comm_overlap": True}, [PIPELINE, RING], [GATHER, SCATTER, RING]),
        ("layer", {"ub_tp_comm_overlap": True, "ub_overlap_ag": False}, [PIPELINE], [GATHER, SCATTER]),
    ],
)
def test_a_switch_moves_what_it_says(
    ranks: Ranks, kind: str, switches: dict[str, bool], forward: list[str], backward: list[str]
) -> None:
    for found in ranks.run(_moved, kind, switches):
        assert found == {"forward": forward, "backward": backward}


def test_the_method_of_a_product_by_its_name() -> None:
    options = OverlapOptions(overlap_all_gather=True, overlap_reduce_scatter=True, name="proj")
    assert schedule_of(options, "row", "proj", True, 2).gather == "ring"
    configure({"proj_dgrad": {"method": "pipeline", "num_splits": 8}, "proj_fprop": {"method": "pipeline"}})
    found = schedule_of(options, "row", "proj", True, 2)
    assert (found.gather, found.scatter, found.splits) == ("pipeline", "pipeline", 8)
    assert schedule_of(options, "row", "fc2", True, 2).gather == "ring"
    for wrong, words in (
        ({"prj_fprop": {}}, "its names are qkv_fprop"),
        ({"qkv_fprop": {"method": "rings"}}, "it is one of ring_exchange"),
        ({"qkv_fprop": {"num_splits": 0}}, "number of pieces"),
    ):
        with pytest.raises(ValueError, match=words):
            configure(wrong)  # type: ignore[arg-type]


def _warnings(caplog: pytest.LogCaptureFixture, *arguments: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ottava"):
        warn_of_idle_switches(*arguments)
        warn_of_idle_switches(*arguments)
    return [record.getMessage() for record in caplog.records]


def test_what_cannot_act_says_so_once_and_why(caplog: pytest.LogCaptureFixture) -> None:
    gather = OverlapOptions(overlap_all_gather=True)
    (said,) = _warnings(caplog, "Alone", gather, ("column",), True, 1)
    assert said == "ottava: Alone: ub_overlap_ag has no effect: one tensor-parallel rank has no communication to hide."
    (said,) = _warnings(caplog, "Together", gather, ("column",), False, 2)
    assert "ub_overlap_ag has no effect without sequence_parallel=True" in said
    (said,) = _warnings(caplog, "Wrong", OverlapOptions(overlap_reduce_scatter=True), ("column",), True, 2)
    assert said == "ottava: Wrong: ub_overlap_rs has no effect: it acts on row parallelism, not on column."
    (said,) = _warnings(
        caplog, "Twice", OverlapOptions(overlap_reduce_scatter_dgrad=True, bulk_wgrad=True), ("column",), True, 2
    )
    assert "ub_bulk_wgrad has no effect beside ub_overlap_rs_dgrad" in said
    (said,) = _warnings(
        caplog, "Symmetric", OverlapOptions(symmetric_all_reduce="multimem_all_reduce"), ("row",), True, 2
    )
    assert "symmetric_ar_type='multimem_all_reduce' has no effect" in said
    everything = OverlapOptions(True, True, False, True, True)
    assert _warnings(caplog, "MLP", everything, ("column", "row"), True, 2) == []
    assert _warnings(caplog, "Silent", OverlapOptions(), ("column",), False, 1) == []


def test_a_module_of_one_rank_warns_of_its_switches(caplog: pytest.LogCaptureFixture) -> None:
    layer = ottava.Linear(32, 32, device="cpu", ub_overlap_rs_dgrad=True)
    with caplog.at_level(logging.WARNING, "ottava"):
        layer(torch.randn(4, 32))
        layer(torch.randn(4, 32))
    said = [r.getMessage() for r in caplog.records if "ub_overlap_rs_dgrad" in r.getMessage()]
    assert len(said) == 1 and "one tensor-parallel rank" in said[0]
