"""What tensor parallelism promises beside values: whose dropout masks are equal, what travels as bytes, what is refused and how."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import ottava
from distributed.ranks import Ranks
from distributed.tp_ranks import RECIPES, error, local
from ottava import recipe
from ottava.checkpoint.placement import placed_parameters
from ottava.distributed import clip_grad_norm_, model_parallel_seed, split_tensors, use_tracker, whole_state
from ottava.distributed.vocabulary import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_cross_entropy
from ottava.notices import warn_once
from ottava.overlap import collectives


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def of_all_ranks(x: Tensor) -> list[Tensor]:
    return list(collectives.all_gather(x.detach().unsqueeze(0), dist.group.WORLD))


# -------------------------------------------------------------------------------------------------------- heads of a rank


def alibi(group: bool) -> tuple[Tensor, Tensor]:
    """(what attention with ALiBi gives for this rank's heads, what it gives there in one process)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 2, 4, 8) for _ in range(3))
    whole = ottava.DotProductAttention(4, 8, device="cpu")(q, k, v, core_attention_bias_type="alibi")
    size, rank = dist.get_world_size(), dist.get_rank()
    if group:
        module = ottava.DotProductAttention(4, 8, tp_group=dist.group.WORLD, device="cpu")
    else:
        module = ottava.DotProductAttention(4, 8, device="cpu")
        module.set_device_mesh(tp_mesh())
    own = [x.chunk(size, dim=2)[rank] for x in (q, k, v)]
    return module(*own, core_attention_bias_type="alibi"), whole.chunk(size, dim=-1)[rank]


@pytest.mark.parametrize("group", [True, False])
def test_alibi_knows_which_heads_a_rank_has(ranks: Ranks, group: bool) -> None:
    for found, expected in ranks.run(alibi, group):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_alibi_without_a_group_asks_for_it() -> None:
    module, q = ottava.DotProductAttention(4, 8, tp_size=2, device="cpu"), torch.randn(6, 1, 2, 8)
    with pytest.raises(ValueError, match="which 2 it has: call set_tensor_parallel_group"):
        module(q, q, q, core_attention_bias_type="alibi")
    with pytest.raises(ValueError, match=r"must be \[2\] or \[batch, 2\], one for each head of this rank, got \(4,\)"):
        module(q, q, q, core_attention_bias_type="alibi", alibi_slopes=torch.ones(4))


def sinks() -> tuple[float, float, list[float], Any]:
    """(norm of the gradients that this rank finds, that of one process, all sinks, the box of this rank's) with plain tensors."""
    torch.manual_seed(0)
    whole = ottava.DotProductAttention(4, 8, softmax_type="learnable", device="cpu")
    part = ottava.DotProductAttention(4, 8, softmax_type="learnable", tp_group=dist.group.WORLD, device="cpu")
    size, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = (torch.randn(6, 2, 4, 8) for _ in range(3))
    whole(q, k, v).square().sum().backward()
    part(*(x.chunk(size, dim=2)[rank] for x in (q, k, v))).square().sum().backward()
    with torch.no_grad():
        part.softmax_offset.fill_(rank)  # type: ignore[union-attr, operator]
    assert whole.softmax_offset is not None and whole.softmax_offset.grad is not None
    (placed,) = placed_parameters(part)
    norm = clip_grad_norm_(part, float("inf"))
    return (
        float(norm),
        float(whole.softmax_offset.grad.norm()),
        whole_state(part)["softmax_offset"].tolist(),
        placed.boxes,
    )


def test_learnable_sinks_are_parts_of_one_vector_to_norms_and_checkpoints(ranks: Ranks) -> None:
    for rank, (norm, expected, values, boxes) in enumerate(ranks.run(sinks)):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert values == [0.0, 0.0, 1.0, 1.0]
        assert boxes == (((2 * rank,), (2,)),)


# ------------------------------------------------------------------------------------------------------------------ dropout


def layer(tracker: Any, **options: Any) -> ottava.TransformerLayer:
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "set_parallel_mode": True, "device": "cpu", **options}
    return ottava.TransformerLayer(64, 64, 4, get_rng_state_tracker=lambda: tracker, **options)


def hidden_masks(sequence_parallel: bool) -> tuple[bool, float]:
    """(whether the ranks' masks of the hidden dropout are equal, the part that was kept)."""
    made = layer(model_parallel_seed(1, dist.get_rank()), hidden_dropout=0.5, sequence_parallel=sequence_parallel)
    made.set_device_mesh(tp_mesh())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("proj.weight", "fc2_weight", "fc2_bias")):
                local(parameter).zero_()
            if name.endswith("proj.bias"):
                local(parameter).fill_(1.0)
    tracker = made.get_rng_state_tracker()  # type: ignore[misc]
    tracker.set_states(model_parallel_seed(1, dist.get_rank()).get_states())  # the default stream starts equal, too
    x = torch.zeros(8, 2, 64)
    mask = made(x)  # attention adds dropout(1), the MLP dropout(0)
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    first, second = of_all_ranks(mask)
    return torch.equal(first, second), (first != 0).float().mean().item()


def attention_masks(sequence_parallel: bool) -> bool:
    """Whether heads of different ranks drop the same weights, when their queries, keys and values are equal."""
    tracker = model_parallel_seed(1, dist.get_rank())
    attend = ottava.DotProductAttention(
        4, 16, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker, sequence_parallel=sequence_parallel
    )
    attend.set_device_mesh(tp_mesh())
    q, k, v = (torch.randn(8, 2, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    default = torch.get_rng_state()
    first, second = of_all_ranks(attend(q, k, v))
    assert torch.equal(torch.get_rng_state(), default)  # the stream that ranks share has not moved
    return torch.equal(first, second)


def test_masks_differ_between_ranks_where_their_tensors_do(ranks: Ranks) -> None:
    for equal, kept in ranks.run(hidden_masks, False):
        assert equal and 0.4 < kept < 0.6
    for equal, kept in ranks.run(hidden_masks, True):
        assert not equal and 0.4 < kept < 0.6
    assert ranks.run(attention_masks, False) == [False, False]
    assert ranks.run(attention_masks, True) == [False, False]


def recomputed(sequence_parallel: bool, name: str) -> bool:
    """Whether a checkpointed layer draws the masks of the first pass again, from both streams."""
    results = []
    for call in (
        lambda made, x, tracker: made(x),
        lambda made, x, tracker: ottava.checkpoint(made, x, get_rng_state_tracker=tracker),
    ):
        made = layer(None, hidden_dropout=0.3, attention_dropout=0.3, sequence_parallel=sequence_parallel)
        made.set_device_mesh(tp_mesh())
        tracker = model_parallel_seed(1, dist.get_rank())
        for module in made.modules():
            if hasattr(module, "get_rng_state_tracker"):
                module.get_rng_state_tracker = lambda: tracker  # noqa: B023
        x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)
        with ottava.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = call(made, x, lambda: tracker)  # noqa: B023
        y.square().sum().backward()
        assert x.grad is not None
        results.append([y, x.grad, *(local(p.grad) for p in made.parameters())])
        results[-1].append(torch.get_rng_state())
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["none", "delayed", "mxfp8"])
def test_recomputed_masks_are_those_of_the_first_pass(ranks: Ranks, name: str, sequence_parallel: bool) -> None:
    assert ranks.run(recomputed, sequence_parallel, name) == [True, True]


def warnings_of_splitting(sequence_parallel: bool, dropout: dict[str, float], tracked: bool) -> list[str]:
    """What is logged when a model of one layer is split."""
    warn_once.cache_clear()
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("ottava").addHandler(handler)
    try:
        model = nn.Sequential(layer(None, sequence_parallel=sequence_parallel, **dropout))
        model[0].get_rng_state_tracker = model[0].self_attention.core_attention.get_rng_state_tracker = None
        if tracked:
            use_tracker(model, model_parallel_seed(1, dist.get_rank()))
        split_tensors(model, tp_mesh())
    finally:
        logging.getLogger("ottava").removeHandler(handler)
    return [record.getMessage() for record in records]


def test_splitting_a_model_whose_masks_would_be_shared_is_a_warning(ranks: Ranks) -> None:
    for case, warns in (
        ((False, {"attention_dropout": 0.1}, False), True),
        ((True, {"hidden_dropout": 0.1}, False), True),
        ((True, {"hidden_dropout": 0.1, "attention_dropout": 0.1}, True), False),
        ((False, {"hidden_dropout": 0.1}, False), False),
        ((True, {}, False), False),
    ):
        for messages in ranks.run(warnings_of_splitting, *case):
            assert [("drop the same places" in m) for m in messages] == [True] * warns, (case, messages)


# -------------------------------------------------------------------------------------------------------- bytes on the wire


def gathered_bytes(mode: str, name: str, recompute: str) -> int:
    """Bytes that a rank puts into all-gathers of a step of a sequence-parallel layer."""
    sent = []
    original: Callable = collectives._ALL_GATHER

    def counted(output: Tensor, part: Tensor, **options: Any) -> Any:
        sent.append(part.numel() * part.element_size())
        return original(output, part, **options)

    linear = ottava.Linear(
        512,
        512,
        parallel_mode=mode,
        sequence_parallel=True,
        bias=False,
        params_dtype=torch.bfloat16,
        device="cpu",
        recompute=recompute,
    )
    linear.set_device_mesh(tp_mesh())
    # A column layer takes 128 tokens of each rank; a row layer all 256.
    x = torch.randn(
        128 if mode == "column" else 256, 512 if mode == "column" else 256, dtype=torch.bfloat16, requires_grad=True
    )
    collectives._ALL_GATHER = counted
    try:
        with ottava.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = linear(x)
        y.backward(torch.randn_like(y))
    finally:
        collectives._ALL_GATHER = original
    return sum(sent)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_activations_travel_as_fp8(ranks: Ranks, name: str, recompute: str) -> None:
    """Row bytes in forward, column bytes in backward: half of bfloat16, and the scales."""
    plain = ranks.run(gathered_bytes, "column", "none", recompute)[0]
    assert plain == 2 * 128 * 512 * 2  # forward, and again for the weight's gradient
    assert 0 < ranks.run(gathered_bytes, "column", name, recompute)[0] <= 0.55 * plain


def test_gradients_travel_as_fp8(ranks: Ranks) -> None:
    """bfloat16 gathers the gradient of a row-parallel layer once for both products; so do whole-tensor scales, in half the bytes.
    Blocks need rows and columns of it: two gathers of one byte an element."""
    plain = ranks.run(gathered_bytes, "row", "none", "none")[0]
    assert plain == 128 * 512 * 2
    assert ranks.run(gathered_bytes, "row", "current", "none")[0] <= 0.55 * plain
    assert ranks.run(gathered_bytes, "row", "delayed", "none")[0] <= 0.55 * plain
    for name in ("block", "mxfp8"):
        assert ranks.run(gathered_bytes, "row", name, "none")[0] <= 1.1 * plain


# ---------------------------------------------------------------------------------------------- blocks that borders would cut


def cut_blocks(mode: str, name: str) -> tuple[float, float]:
    """Errors against no quantization, of one process and of two ranks whose 96 features end inside a block of 128."""
    torch.manual_seed(0)
    whole = ottava.Linear(192, 192, parallel_mode=mode, device="cpu")
    spread, mesh = copy.deepcopy(whole), tp_mesh()
    spread.set_device_mesh(mesh)
    x = torch.randn(128, 192) * torch.linspace(0.1, 2.0, 192)
    exact = whole(x)
    with ottava.autocast(recipe=RECIPES[name]):
        one = whole(x)
        many = spread(x if mode == "column" else x.chunk(2, 1)[mesh.get_local_rank()].contiguous())
    many = many if mode == "row" else collectives.all_gather(many, mesh.get_group(), 1)
    return error(one, exact), error(many, exact)


@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("name", ["block", "block1d"])
def test_features_that_do_not_fill_blocks_are_as_accurate(ranks: Ranks, name: str, mode: str) -> None:
    for one, many in ranks.run(cut_blocks, mode, name):
        assert 0 < many <= 1.05 * one


# -------------------------------------------------------------------------------------------------------------------- copies


def copies() -> bool:
    """A copy of a spread module talks to the same ranks."""
    mesh = tp_mesh()
    made = ottava.LayerNormMLP(64, 128, set_parallel_mode=True, device="cpu")
    made.set_device_mesh(mesh, mesh)
    twin = copy.deepcopy(made)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    same = torch.equal(made(x), twin(x))
    for parameter in made.parameters():  # nothing keeps the memory of a whole weight
        assert local(parameter).untyped_storage().nbytes() == local(parameter).numel() * 4
    local(twin.fc1_weight).data.zero_()
    return same and not torch.equal(made(x), twin(x))


def test_spread_modules_can_be_copied(ranks: Ranks) -> None:
    assert ranks.run(copies) == [True, True]


# -------------------------------------------------------------------------------------------------------------------- errors


def _sharded(mesh: DeviceMesh) -> None:
    linear = ottava.Linear(64, 64, parallel_mode="column", device="cpu")
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    linear.set_device_mesh(mesh)


def _no_group(mesh: DeviceMesh) -> None:
    ottava.LayerNormMLP(64, 64, tp_size=2, set_parallel_mode=True, device="cpu")(torch.zeros(4, 64))


def _linear(size: int = 64, **options: Any) -> ottava.Linear:
    return ottava.Linear(size, size, device="cpu", **options)


def _expert_tokens(mesh: DeviceMesh) -> None:
    experts = ottava.GroupedLinear(
        2, 64, 64, parallel_mode="column", sequence_parallel=True, device="cpu", tp_mesh=mesh
    )
    experts(torch.zeros(2, 2, 64), m_splits=[2, 2])


def _unreduced(mesh: DeviceMesh) -> None:
    linear = _linear(parallel_mode="column", sequence_parallel=True, tp_mesh=mesh)
    with ottava.autocast(recipe=recipe.DelayedScaling(reduce_amax=False)):
        linear(torch.zeros(4, 64))


def _tokens_without_a_mode(mesh: DeviceMesh) -> None:
    ottava.TransformerLayer(64, 64, 4, sequence_parallel=True, device="cpu").set_device_mesh(mesh)


class Holder(nn.Module):
    """Holds a parameter itself, beside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(1)), nn.Linear(4, 4)


class Words(nn.Module):
    """Words, a layer that splits tokens, and `between`, which nobody has told."""

    def __init__(self, between: nn.Module, by_name: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = VocabParallelEmbedding(32, 64, device="cpu")
        self.mlp = ottava.LayerNormMLP(64, 64, set_parallel_mode=True, device="cpu")
        self.between, self.by_name = between, by_name
        self.head = VocabParallelHead(32, 64, device="cpu")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mlp(self.embedding(tokens))
        x = self.between(input=x) if self.by_name else self.between(x)
        return vocab_parallel_cross_entropy(self.head(x), tokens, self.head.group)


def gain_gradients(spread_by_torch: bool) -> tuple[Tensor, Tensor]:
    """(the gradient of a gain of torch's LayerNorm on tensor-parallel ranks, that in one process)."""
    model, tokens = Words(nn.LayerNorm(64), by_name=not spread_by_torch), torch.arange(16).view(8, 2)
    model(tokens).backward()
    expected = model.between.weight.grad.clone()  # type: ignore[union-attr, operator]
    model.zero_grad()
    mesh = tp_mesh()
    if spread_by_torch:
        parallelize_module(model.between, mesh, SequenceParallel(sequence_dim=0, use_local_output=True))
    split_tensors(model, mesh, sequence_parallel=spread_by_torch)
    model(tokens).backward()
    return model.between.weight.grad.full_tensor(), expected  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("spread_by_torch", [True, False])
def test_a_norm_of_torch_has_the_gradient_of_all_tokens(ranks: Ranks, spread_by_torch: bool) -> None:
    for found, expected in ranks.run(gain_gradients, spread_by_torch):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


MISTAKES: dict[str, tuple[Callable[[DeviceMesh], Any], list[str]]] = {
    "heads": (
        lambda mesh: ottava.TransformerLayer(48, 64, 3, set_parallel_mode=True, device="cpu").set_device_mesh(mesh),
        ["3", "2"],
    ),
    "kv heads": (
        lambda mesh: ottava.MultiheadAttention(
            64, 4, num_gqa_groups=1, set_parallel_mode=True, device="cpu"
        ).set_device_mesh(mesh),
        ["num_gqa_groups", "2"],
    ),
    "spread tokens, and a norm of torch": (
        lambda mesh: split_tensors(Words(nn.LayerNorm(64)), mesh, sequence_parallel=True),
        ["between (LayerNorm) does not know it", "weight, bias by its own tokens", "ottava.LayerNorm", "SequenceParallel"],
    ),
    "spread tokens, and a product that is not split": (
        lambda mesh: split_tensors(Words(nn.Sequential(_linear(64))), mesh, sequence_parallel=True),
        ["between.0 (Linear) does not know it", "parallel_mode"],
    ),
    "ffn": (
        lambda mesh: ottava.LayerNormMLP(64, 33, set_parallel_mode=True, device="cpu").set_device_mesh(mesh),
        ["LayerNormMLP.fc1_weight", "33 rows", "2 tensor-parallel ranks"],
    ),
    "features": (
        lambda mesh: _linear(33, parallel_mode="row").set_device_mesh(mesh),
        ["Linear.weight", "33 columns", "2 tensor-parallel ranks"],
    ),
    "features, in the constructor": (
        lambda mesh: _linear(33, parallel_mode="column", tp_size=2),
        ["Linear.weight", "33 rows", "2 tensor-parallel ranks"],
    ),
    "split features": (
        lambda mesh: _linear(parallel_mode="column", parameters_split={"a": 33, "b": 31}, tp_size=2),
        ["Linear.a_weight", "33 rows"],
    ),
    "no group": (_no_group, ["LayerNormMLP", "tp_size=2", "set_tensor_parallel_group(group)", "set_device_mesh"]),
    "group of another size": (
        lambda mesh: _linear(parallel_mode="row", tp_size=4).set_tensor_parallel_group(mesh.get_group()),
        ["tp_size=4", "the group has 2 ranks"],
    ),
    "mesh of another size": (
        lambda mesh: _linear(parallel_mode="row", tp_size=4).set_device_mesh(mesh),
        ["tp_size=4", "the mesh has 2 ranks"],
    ),
    "attention of another size": (
        lambda mesh: ottava.DotProductAttention(4, 16, tp_size=4).set_tensor_parallel_group(mesh.get_group()),
        ["tp_size=4", "the group has 2"],
    ),
    "two dimensions": (
        lambda mesh: _linear(parallel_mode="row").set_device_mesh(
            init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        ),
        ["one dimension of a mesh", 'mesh["tp"]'],
    ),
    "row LayerNormLinear": (
        lambda mesh: ottava.LayerNormLinear(64, 64, parallel_mode="row", device="cpu"),
        ["LayerNormLinear", "use 'column'"],
    ),
    "experts with spread tokens": (_expert_tokens, ["GroupedLinear with sequence_parallel=True takes [tokens, 64]"]),
    "fully_shard before": (_sharded, ["Linear.weight is sharded already", "set_device_mesh before fully_shard"]),
    "unreduced amax": (_unreduced, ["reduce_amax=False", "sequence_parallel"]),
    "spread tokens of a whole layer": (_tokens_without_a_mode, ["sequence_parallel=True", "set_parallel_mode"]),
    "spread tokens without an embedding that spreads them": (
        lambda mesh: split_tensors(nn.Sequential(_linear()), mesh, sequence_parallel=True),
        ["VocabParallelEmbedding"],
    ),
    "a parameter beside modules": (
        lambda mesh: split_tensors(Holder(), mesh),
        ["Holder holds the parameters scale itself", "module of its own"],
    ),
}  # fmt: skip


def mistake(name: str) -> str:
    with pytest.raises(ValueError) as raised:
        MISTAKES[name][0](tp_mesh())
    return str(raised.value)


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_named(ranks: Ranks, name: str) -> None:
    for message in ranks.run(mistake, name):
        for part in MISTAKES[name][1]:
            assert part in message, message
