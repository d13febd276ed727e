"""The failure modes that show before a run: a model that torch's wrappers have spread badly is told so, one that is well spread is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import ottava
from ottava.detect import MODES, Machine
from ottava.detect.acs import check_acs, read_bridges
from ottava.detect.cards import Card, check_cards, chosen_cards, read_cards
from ottava.detect.finding import Finding

FOUR_NODES = Machine(gpus_per_node=8, nodes=4)
HYBRID: dict[str, Any] = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, 6)


class Task(nn.Module):
    """Somebody's module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.fixture(autouse=True)
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=32)
    yield
    dist.destroy_process_group()


def mesh(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def blocks_and_root(sizes: tuple[int, ...] = (4, 8), policy: MixedPrecisionPolicy = FLOAT32) -> nn.Module:
    net, spread = Net(), mesh(*sizes)
    for part in (*net.layers, net):
        fully_shard(part, mesh=spread, mp_policy=policy)
    return net


def only_root() -> nn.Module:
    return fully_shard(Net(), mesh=mesh(4, 8), mp_policy=FLOAT32)


def root_and_head() -> nn.Module:
    net = Net()
    fully_shard(net.head, mesh=mesh(4, 8), mp_policy=FLOAT32)
    return fully_shard(net, mesh=mesh(4, 8), mp_policy=FLOAT32)


def flat(module: nn.Module, **options: Any) -> Any:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def fsdp1_blocks(**options: Any) -> nn.Module:
    net = Net()
    for n, layer in enumerate(net.layers):
        net.layers[n] = flat(layer, **options)
    return flat(net, **options)


def mixed() -> nn.Module:
    net = Net()
    net.head = flat(net.head, device_mesh=mesh(4, 8), **HYBRID)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh(4, 8), mp_policy=FLOAT32)
    return net


def ddp(hook: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = DistributedDataParallel(Net().to(dtype), init_sync=False)
    if hook:
        model.register_comm_hook(None, fp16_compress_hook)
    return model


BAD: list[tuple[str, Callable[[], nn.Module], str, list[str]]] = [
    ("root", only_root, "only the root wrapped", ["wrap each of the 3 blocks (layers.0, layers.1, layers.2)"]),
    ("root and head", root_and_head, "only the root wrapped", ["3 blocks"]),
    ("inside a task", lambda: Task(only_root()), "only the root wrapped", ["(model.layers.0, "]),
    ("FSDP1 root", lambda: flat(Net(), device_mesh=mesh(4, 8), **HYBRID), "only the root wrapped", ["3 blocks"]),
    ("mixed", mixed, "FSDP1 and FSDP2 mixed", ["head by FullyShardedDataParallel", "use one of them"]),
    ("1-D", lambda: blocks_and_root((32,)), "1-D FSDP across nodes", ["1-D FSDP over 32 ranks", "islands of 8", "(4, 8)"]),
    ("1-D FSDP1", fsdp1_blocks, "1-D FSDP across nodes", ["1-D FSDP over 32 ranks", "HYBRID_SHARD"]),
    ("wide", lambda: blocks_and_root((2, 16)), "shards beyond NVLink", ["16 ranks is larger than", "island of 8", "HSDP"]),
    ("bf16", lambda: blocks_and_root(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "bf16 gradient sum",
     ["32 data-parallel ranks are summed in bfloat16", "reduce_dtype=torch.float32"]),
    ("bf16 FSDP1", lambda: fsdp1_blocks(device_mesh=mesh(4, 8), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16), **HYBRID),
     "bf16 gradient sum", ["32 data-parallel ranks are summed in bfloat16"]),
    ("fp16 hook", lambda: ddp(hook=True), "bf16 gradient sum", ["32 data-parallel ranks are summed in float16"]),
    ("bf16 DDP", lambda: ddp(dtype=torch.bfloat16), "bf16 gradient sum", ["32 data-parallel ranks"]),
]  # fmt: skip


@pytest.mark.parametrize("build, mode, words", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_badly_spread_model_is_told_so(build: Callable[[], nn.Module], mode: str, words: list[str]) -> None:
    found = ottava.diagnose(build(), FOUR_NODES)
    assert [finding.mode for finding in found] == [mode], found
    for word in words:
        assert word in found[0].message, found[0].message


@pytest.mark.parametrize(
    "build",
    [
        Net,
        blocks_and_root,
        lambda: blocks_and_root((8, 4)),  # two shard groups in a node
        ddp,
        lambda: fsdp1_blocks(device_mesh=mesh(4, 8), **HYBRID),
        lambda: fsdp1_blocks(sharding_strategy=ShardingStrategy.NO_SHARD),
    ],
    ids=["plain", "HSDP", "narrow", "DDP", "FSDP1", "FSDP1 copies"],
)
def test_a_well_spread_model_is_not(build: Callable[[], nn.Module]) -> None:
    assert ottava.diagnose(build(), FOUR_NODES) == []


def test_one_nvlink_domain_over_nodes_and_one_node_may_have_one_dimension() -> None:
    assert ottava.diagnose(blocks_and_root((32,)), Machine(4, nodes=8, island=32)) == []
    assert ottava.diagnose(blocks_and_root((32,)), Machine(32)) == []
    (found,) = ottava.diagnose(blocks_and_root((8, 4)), Machine(8, nodes=4, island=2))  # pairs of GPUs with a bridge
    assert found.mode == "shards beyond NVLink"


def test_without_a_process_group_the_wrapping_is_judged(fake_world: None) -> None:
    dist.destroy_process_group()
    assert ottava.diagnose(Net()) == []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=32)


def test_what_is_no_module_is_named() -> None:
    with pytest.raises(ValueError, match="diagnose takes a torch.nn.Module.*got list"):
        ottava.diagnose([Net()])  # type: ignore[arg-type]


def test_every_mode_has_a_detector() -> None:
    """The last one shows in a run only: test_exposed.py."""
    before = {case[2] for case in BAD}
    before |= {finding.mode for finding in check_cards([], "mlx5_9") + check_acs(["00:01.0"])}
    assert before | {"no overlap"} == set(MODES)


# ------------------------------------------------------------------------------------------------------ bridges and cards

CARDS = [Card("mlx5_0", 1, True, 400.0), Card("mlx5_1", 1, False, 400.0), Card("mlx5_10", 1, True, 25.0, "Ethernet")]


@pytest.mark.parametrize(
    "value, said",
    [
        (None, None),
        ("mlx5_0", None),
        ("mlx5_0:1", None),
        ("^mlx5_1", None),  # and mlx5_10
        ("mlx5_9", "names no network card of this machine, which has mlx5_0:1, mlx5_1:1, mlx5_10:1"),
        ("mlx5_0:2", "names no network card"),
        ("=mlx5_1", "means mlx5_1:1, whose port is not active"),
        ("mlx5_10", "means mlx5_10:1 at 25 Gb/s, while a card of this machine has 400"),
    ],
)
def test_the_wrong_card(value: str | None, said: str | None) -> None:
    found = check_cards(CARDS, value)
    assert (said is None) == (found == [])
    if said is not None:
        assert said in found[0].message and f"NCCL_IB_HCA={value}" in found[0].message


def test_cards_of_a_machine_are_read(tmp_path: Path) -> None:
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "10 Gb/sec (4X)")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(rate + "\n")
        (port / "link_layer").write_text("InfiniBand\n")
    assert read_cards(tmp_path) == [Card("mlx5_0", 1, True, 400.0), Card("mlx5_1", 1, False, 10.0)]
    assert read_cards(tmp_path / "none") == []
    assert [card.name for card in chosen_cards("mlx5_1", CARDS)] == ["mlx5_1", "mlx5_10"]


def test_access_control_is_told_with_the_bridges(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "00:01.0 PCI bridge: X\n\t\tACSCtl:\tSrcValid+ TransBlk-\n17:00.0 3D controller\n\t\tACSCtl:\tSrcValid-\n"
    monkeypatch.setattr("ottava.detect.acs.run_command", lambda words: text)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_9")
    monkeypatch.setattr("ottava.detect.model.read_cards", lambda: CARDS)
    found = ottava.diagnose(blocks_and_root(), FOUR_NODES, hardware=True)
    assert [finding.mode for finding in found] == ["ACS or wrong card"] * 2
    assert "ACS is on at 00:01.0" in found[0].message and "mlx5_9" in found[1].message
    assert found[0] == Finding("warning", found[0].message, "ACS or wrong card")
    monkeypatch.setattr("ottava.detect.acs.run_command", lambda words: None)
    assert "lspci is not here" in read_bridges() and check_acs(read_bridges()) == []
