"""A plan that does not fit the machine or the model is told so before anything runs, with the numbers and what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ottava.distributed.plan import ParallelPlan
from ottava.distributed.topology import Finding, Launch, Machine, check_model, check_topology, enforce
from ottava.models import GPTConfig, LlamaConfig

NODE = Machine(gpus_per_node=8)
FOUR_NODES = Machine(gpus_per_node=8, nodes=4)
LLAMA = {"num_attention_heads": 32, "num_gqa_groups": 8, "ffn_hidden_size": 14336, "vocab_size": 128256}


def expect(findings: list[Finding], level: str, *words: str) -> None:
    """Exactly one finding, of this level, with all of the words."""
    assert [finding.level for finding in findings] == [level], findings
    for word in words:
        assert word in findings[0].message, findings[0].message


@pytest.mark.parametrize(
    "fields, machine",
    [
        ({}, NODE),
        ({"tp": 8}, NODE),
        ({"tp": 2, "dp_replicate": 4}, FOUR_NODES),
        ({"tp": 8, "dp_replicate": 4}, FOUR_NODES),
        ({"dp_replicate": 8}, FOUR_NODES),  # two copies on a node
        ({"strategy": "ddp"}, FOUR_NODES),
        ({"tp": 8, "strategy": "ddp"}, FOUR_NODES),
        ({}, Machine(gpus_per_node=4, nodes=18, island=72)),  # all nodes on one NVLink domain
        ({"tp": 2}, Machine(gpus_per_node=6)),
    ],
)
def test_plans_with_nothing_to_say(fields: dict[str, Any], machine: Machine) -> None:
    assert check_topology(ParallelPlan(**fields), LLAMA, machine) == []


@pytest.mark.parametrize(
    "fields, machine, level, words",
    [
        ({"tp": 16, "dp_replicate": 2}, FOUR_NODES, "error", ["tp=16 is larger than", "island of 8", "take tp=8"]),
        ({"tp": 4}, Machine(6, nodes=2), "error", ["tp=4 does not divide", "island of 6", "take tp=3"]),
        ({}, FOUR_NODES, "warning", ["1-D FSDP", "dp_replicate=4, dp_shard=8, tp=1, strategy='fsdp2'"]),
        ({"strategy": "fsdp1"}, FOUR_NODES, "warning", ["dp_replicate=4, dp_shard=8, tp=1, strategy='fsdp1'"]),
        ({"tp": 4}, FOUR_NODES, "warning", ["1-D FSDP", "dp_shard=8 x tp=4 = 32", "dp_replicate=4, dp_shard=2, tp=4"]),
        ({"dp_replicate": 2}, FOUR_NODES, "warning", ["dp_shard=16", "larger than", "dp_replicate=4, dp_shard=8"]),
        ({"dp_shard": 3, "dp_replicate": 8}, Machine(8, nodes=3), "warning", ["dp_shard=3", "does not divide", "of 8"]),
        ({"dp_shard": 4, "tp": 2}, Machine(4), "error", ["= 8 ranks", "there are 4"]),
        ({"tp": 3}, NODE, "error", ["8 ranks", "tp=3"]),
        ({"reduce_dtype": torch.bfloat16}, NODE, "warning", ["8 data-parallel", "bfloat16", "torch.float32"]),
        ({"strategy": "none"}, NODE, "warning", ["none", "8 data-parallel", "wrap the model yourself"]),
    ],
)
def test_plan_against_machine(fields: dict[str, Any], machine: Machine, level: str, words: list[str]) -> None:
    expect(check_topology(ParallelPlan(**fields), None, machine), level, *words)


def test_bf16_reduction_of_one_rank_sums_nothing() -> None:
    assert check_topology(ParallelPlan(reduce_dtype=torch.bfloat16), None, Machine(1)) == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_attention_heads": 30}, ["tp=4", "num_attention_heads=30", "2 left over", "take tp=3"]),
        ({"num_gqa_groups": 2}, ["tp=4", "num_gqa_groups=2", "kv heads", "take tp=2"]),
        ({"ffn_hidden_size": 14338}, ["ffn_hidden_size=14338", "pad it to 14340"]),
        ({"vocab_size": 50257}, ["vocab_size=50257", "vocabulary", "pad it to 50260"]),
    ],
)
def test_model_sizes_that_tp_does_not_divide(change: dict[str, int], words: list[str]) -> None:
    config = LLAMA | change
    expect(check_topology(ParallelPlan(tp=4), config, NODE), "error", *words)
    expect(check_topology(ParallelPlan(tp=4), SimpleNamespace(**config), NODE), "error", *words)
    assert check_topology(ParallelPlan(), config, NODE) == []


def test_our_own_models_are_told_their_own_fields() -> None:
    gpt, llama = GPTConfig(vocab_size=256, max_length=32), LlamaConfig(vocab_size=256, kv_heads=8)
    said = [f.message for f in check_topology(ParallelPlan(tp=3), gpt, Machine(3))]
    assert len(said) == 2
    assert "padded_vocab_size=256" in said[0] and "set pad_vocab_to to a multiple of 3, or take tp=2" in said[0]
    assert "learned positions; 2 left over): set max_length to 33, or take tp=2" in said[1]
    said = [f.message for f in check_topology(ParallelPlan(tp=3), llama, Machine(3))]
    assert [text.split("=")[1].split()[-1] for text in said] == [
        "heads",
        "kv_heads",
        "ffn_hidden_size",
        "padded_vocab_size",
    ]


def test_names_of_other_configurations() -> None:
    config = SimpleNamespace(num_attention_heads=32, num_key_value_heads=2, intermediate_size=11008, vocab_size=32000)
    expect(check_topology(ParallelPlan(tp=4), config, NODE), "error", "num_key_value_heads=2")
    expect(
        check_topology(ParallelPlan(tp=4), {"head_count": 3}, NODE),
        "warning",
        "cannot be checked",
        "num_attention_heads",
    )


def test_all_findings_come_at_once() -> None:
    config = {"num_attention_heads": 30, "num_gqa_groups": 2, "ffn_hidden_size": 6, "vocab_size": 50257}
    findings = check_topology(ParallelPlan(tp=4, reduce_dtype=torch.bfloat16), config, FOUR_NODES)
    assert [finding.level for finding in findings] == ["warning"] * 2 + ["error"] * 4


def test_enforce_raises_all_errors_and_logs_each_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    findings = [Finding("error", "first"), Finding("warning", "careful (a test)"), Finding("error", "second")]
    with caplog.at_level(logging.WARNING, logger="ottava"):
        for _ in range(2):
            with pytest.raises(ValueError, match="first\n.*second") as caught:
                enforce(findings)
    assert "careful" not in str(caught.value)
    assert [record.getMessage() for record in caplog.records] == ["careful (a test)"]
    enforce([Finding("warning", "careful (a test)")])
    enforce([])


def test_machine_by_what_the_launcher_says() -> None:
    launch = Launch.from_torchrun({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "3"})
    assert Machine.detect(launch) == Machine(gpus_per_node=8, nodes=2, island=8)
    assert Machine.detect(launch, island=16).islands == 1
    assert Launch.from_torchrun({}) == Launch(None, None)
    with pytest.raises(ValueError, match="6 ranks do not fill nodes of 4"):
        Machine.detect(Launch(world_size=6, local_world_size=4))
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number of ranks.*'many'"):
        Launch.from_torchrun({"WORLD_SIZE": "many"})
    with pytest.raises(ValueError, match="nodes must be a whole number, 1 or more, got 0"):
        Machine(8, nodes=0)


def test_machine_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert Machine.detect(Launch()) == Machine(8)
    assert Machine.detect(Launch(world_size=32)) == FOUR_NODES
    assert Machine.detect(Launch(world_size=2)) == Machine(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert Machine.detect(Launch(world_size=6)) == Machine(6)
    assert Machine.detect(Launch()) == Machine(1)


# How a model is wrapped. A fake group: wrapping needs one, and none of its collectives matters here.


class Net(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, 6)


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(fake_world: None) -> dist.DeviceMesh:
    return ParallelPlan().meshes("cpu").dp


def shard(module: nn.Module, mesh: dist.DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)


def flat(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def test_blocks_then_the_root_is_right(mesh: dist.DeviceMesh) -> None:
    net = Net()
    assert check_model(net) == []
    for layer in net.layers:
        shard(layer, mesh)
    expect(
        check_model(net), "error", "root is not", "embedding.weight, embedding.bias, head.weight", "wrap the root last"
    )
    shard(net, mesh)
    assert check_model(net) == []


def test_only_the_root_wrapped(mesh: dist.DeviceMesh) -> None:
    net = Net()
    shard(net, mesh)
    expect(check_model(net), "warning", "only the root", "3 blocks (layers.0, layers.1, layers.2)")
    one_layer = nn.Linear(4, 4)
    shard(one_layer, mesh)
    assert check_model(one_layer) == []  # no blocks to wrap


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_only_the_root_wrapped_by_fsdp1(fake_world: None, use_orig_params: bool) -> None:
    expect(check_model(flat(Net(), use_orig_params=use_orig_params)), "warning", "only the root", "3 blocks (layers.0")


def test_fsdp1_and_fsdp2_in_one_model(mesh: dist.DeviceMesh) -> None:
    net = Net()
    net.head = flat(net.head)  # type: ignore[assignment]
    for layer in net.layers:
        shard(layer, mesh)
    expect(check_model(net), "error", "FSDP1 and FSDP2", "head by Fully", "layers.0, layers.1, layers.2 by fully_shard")


@pytest.mark.parametrize("then_fsdp", [False, True])
def test_rows_that_tp_does_not_divide(fake_world: None, then_fsdp: bool) -> None:
    meshes = ParallelPlan(tp=2).meshes("cpu")
    layer = nn.Linear(8, 7)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, meshes.tp, [Shard(0)]))
    layer.bias = nn.Parameter(distribute_tensor(layer.bias.data, meshes.tp, [Shard(0)]))
    if then_fsdp:
        shard(layer, meshes.dp)
    findings = check_model(layer)
    assert len(findings) == 2
    expect(findings[:1], "error", "tp=2", "7 rows of weight (7, 8)", "pad them to 8")


def test_even_rows_and_uneven_shards_are_fine(fake_world: None) -> None:
    meshes = ParallelPlan(tp=2).meshes("cpu")
    layer = nn.Linear(8, 6, bias=False)  # 3 rows a tp rank, 2 and 1 rows a dp rank
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.data, meshes.tp, [Shard(0)]))
    shard(layer, meshes.dp)
    assert check_model(layer) == []


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (ParallelPlan(tp=2, dp_shard=2, sequence_parallel=True, overlap="ring"), True),
        (ParallelPlan(tp=4, sequence_parallel=True, overlap="ring"), False),
        (ParallelPlan(tp=2, dp_shard=2), False),
        (ParallelPlan(dp_shard=4), False),
    ],
    ids=["beside FSDP2", "alone", "nothing hidden", "no tensor parallelism"],
)
def test_one_hardware_queue_for_tensor_parallelism_and_fsdp2(
    plan: ParallelPlan, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    machine = Machine(gpus_per_node=4)
    assert check_topology(plan, None, machine) == []  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = check_topology(plan, None, machine)
    if said:
        expect(found, "warning", "CUDA_DEVICE_MAX_CONNECTIONS=1", "one queue", "set it to 32")
    else:
        assert found == []
