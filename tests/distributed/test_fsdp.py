"""FSDP2 with FP8 on the wire equals one process: bytes, scales, losses and weights; and it sends half of what bf16 sends.

One process that sees the global batch runs it as one microbatch a rank, since per-tensor scales of activations are those of what a
rank sees. Two ranks add two gradients, which has one order: all is equal bit for bit. More ranks add in gloo's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ottava
from distributed.ranks import Ranks
from ottava import recipe
from ottava.distributed import fsdp
from ottava.distributed.gathered import Copy, GatheredWeight, ShardedWeight
from ottava.quant.scheme import Scheme

RECIPES: dict[str, recipe.Recipe] = {
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
# What `fully_shard` takes: ranks to shard over, or (replicas, ranks to shard over).
MESHES: dict[str, Any] = {"2": [0, 1], "3 uneven": [0, 1, 2], "4": [0, 1, 2, 3], "hsdp": [[0, 1], [2, 3]]}
HIDDEN, FFN, TOKENS, STEPS = 160, 272, 32, 3  # no shard of either size starts on a multiple of 128 rows


class Block(nn.Module):
    """All four kinds of modules with quantized weights, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_linear = ottava.LayerNormLinear(HIDDEN, HIDDEN, device="cpu")
        self.experts = ottava.GroupedLinear(2, HIDDEN, HIDDEN, device="cpu")
        self.mlp = ottava.LayerNormMLP(HIDDEN, FFN, activation="swiglu", device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return x + self.mlp(self.experts(self.norm_linear(x), m_splits=[half, x.shape[0] - half]))


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = ottava.Linear(HIDDEN, 48, bias=False, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(blocks: int = 2) -> Model:
    torch.manual_seed(1)
    model = Model(blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(step: int, part: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * step + part))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


_MESHES_MADE = itertools.count()


def make_mesh(ranks: Any) -> DeviceMesh:
    """A mesh with names of its own: DTensor caches by mesh, and equal meshes of an earlier run have groups that are gone."""
    number = next(_MESHES_MADE)
    names = (f"replicate{number}", f"shard{number}")
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names if torch.tensor(ranks).dim() == 2 else names[1:])
    dist.barrier()  # a rank without work must not close its connections while others still make theirs
    return mesh


def mesh_of(name: str) -> DeviceMesh | None:
    """The mesh; None in a rank that has no place in it."""
    mesh = make_mesh(MESHES[name])
    return mesh if mesh.get_coordinate() is not None else None


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}


def one_process(name: str, parts: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses [step][part] and the weights at the end."""
    model = build()
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        with ottava.autocast(recipe=RECIPES[name]):
            each = [model(batch(step, part)).square().mean() for part in range(parts)]
        torch.stack(each).sum().backward()
        for parameter in model.parameters():  # gradients are quantized before they are averaged, as on a rank
            assert parameter.grad is not None
            parameter.grad /= parts
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, model.state_dict()


def compare_gathered(model: nn.Module, name: str) -> int:
    """Asserts that the bytes and scales of every gathered weight are those of the whole weight; returns how many there are."""
    masters = whole(model)
    scales = {
        local.copy.name: local.copy.delayed.fwd_scale[local.copy.column].item()
        for _, local in fsdp._sharded(model)
        if local.copy.delayed is not None
    }
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    gathered = {n: p for n, p in model.named_parameters() if isinstance(p, GatheredWeight)}
    for key, weight in gathered.items():
        expected = ottava.quantize(masters[key], RECIPES[name], role="weight", scale=scales.get(key))
        for part, tensor in weight._parts.items():
            assert torch.equal(tensor, expected._parts[part]), (name, key, part)
            assert tensor.is_contiguous(), (key, part)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return len(gathered)


class Counted:
    """Counts the bytes that this rank gives to all-gathers, and the MAX all-reduces."""

    def __enter__(self) -> Counted:
        self.bytes = self.maxima = 0
        self._kept = {
            n: getattr(dist, n)
            for n in ("all_gather_into_tensor", "all_gather_single", "all_reduce")
            if hasattr(dist, n)
        }

        def gather(original: Any) -> Any:
            def counted(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.bytes += input_tensor.nbytes
                return original(output_tensor, input_tensor, *args, **kwargs)

            return counted

        def reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
            self.maxima += op == dist.ReduceOp.MAX
            return self._kept["all_reduce"](tensor, op, *args, **kwargs)

        for name, original in self._kept.items():
            setattr(dist, name, reduce if name == "all_reduce" else gather(original))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, original in self._kept.items():
            setattr(dist, name, original)


# ------------------------------------------------------------------------------------------------------------ run in ranks


def train(name: str, mesh_name: str, reshard: bool) -> tuple[list[float], dict[str, Tensor], int] | None:
    """Losses, weights at the end, and how many gathered weights were compared."""
    mesh = mesh_of(mesh_name)
    if mesh is None:
        return None
    model = build()
    fsdp.shard_model(model, mesh, RECIPES[name], reshard_after_forward=reshard)
    optimizer, losses = adamw(model), []
    fsdp.attach(optimizer, model)
    group = None if dist.get_world_size() == mesh.size() else mesh.get_group()
    for step in range(STEPS):
        with ottava.autocast(recipe=RECIPES[name], amax_reduction_group=group):
            loss = model(batch(step, dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    compared = compare_gathered(model, name)
    assert all(type(t) is Tensor for s in optimizer.state.values() for t in map(_local, s.values()))
    state = model.state_dict()
    assert all(type(_local(t)) is Tensor for t in state.values())
    return losses, whole(model), compared


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


# ------------------------------------------------------------------------------------------------------------------ tests


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, int], Any]:
    return {}


CASES = [
    *((name, "2", True) for name in RECIPES),
    ("current", "2", False),
    ("block", "2", False),
    ("block", "3 uneven", True),
    ("nvfp4", "3 uneven", True),
    ("current", "4", True),
    ("delayed", "3 uneven", False),
    *((name, "hsdp", True) for name in ("current", "block", "delayed")),
]


@pytest.mark.parametrize(("name", "mesh", "reshard"), CASES)
def test_training_equals_one_process(ranks: Ranks, references: dict, name: str, mesh: str, reshard: bool) -> None:
    parts = torch.tensor(MESHES[mesh]).numel()
    answers = [a for a in ranks.run(train, name, mesh, reshard) if a is not None]
    if (name, parts) not in references:
        torch.set_num_threads(1)
        references[name, parts] = one_process(name, parts)
    losses, weights = references[name, parts]
    assert len(answers) == parts
    for part, (own, own_weights, compared) in enumerate(answers):
        assert compared == 2 * 5 + 1
        assert own[0] == losses[0][part]
        for key, weight in weights.items():
            if key.endswith("fwd_amax_history"):  # `refresh` has recorded the amax that the next forward would record
                assert own_weights[key][0, 1::3].all()
                own_weights[key][0] = 0
            if parts == 2:
                assert torch.equal(own_weights[key], weight), key
            else:
                error = (own_weights[key] - weight).norm() / weight.norm().clamp_min(1e-12)
                assert error <= 1e-5, (key, error)
        if parts == 2:
            assert own == [step[part] for step in losses]


def one_rank_mesh() -> DeviceMesh:
    """Every rank alone: a mesh of one rank to shard over."""
    mesh = make_mesh([[0], [1], [2], [3]])
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[1]]


def two_ranks() -> DeviceMesh | None:
    """Ranks 0 and 1; None in the others."""
    return mesh_of("2")


def step(model: nn.Module, name: str, number: int, part: int) -> Tensor:
    with ottava.autocast(recipe=RECIPES[name]):
        loss = model(batch(number, part)).square().mean()
    loss.backward()
    return loss.detach()


def train_alone(name: str) -> bool:
    mesh = one_rank_mesh()
    model, alone = build(1), build(1)
    fsdp.shard_model(model, mesh, RECIPES[name])
    compare_gathered(model, name)
    optimizer, optimizer_alone = adamw(model), adamw(alone)
    fsdp.attach(optimizer, model)
    for number in range(2):
        losses = step(model, name, number, 0), step(alone, name, number, 0)
        assert torch.equal(*losses)
        optimizer.step(), optimizer_alone.step()
        optimizer.zero_grad(), optimizer_alone.zero_grad()
    return all(torch.equal(p, q) for p, q in zip(whole(model).values(), alone.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["current", "block", "nvfp4"])
def test_world_size_one(ranks: Ranks, name: str) -> None:
    assert all(ranks.run(train_alone, name))


def wire_bytes(name: str) -> tuple[int, int, int] | None:
    """(bytes of one step with FP8 weights, with bf16 weights, MAX all-reduces of two steps)."""
    mesh = two_ranks()
    if mesh is None:
        return None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def linears() -> nn.Sequential:
        return nn.Sequential(*(ottava.Linear(HIDDEN, HIDDEN, bias=False, device="cpu") for _ in range(3)))

    model, plain = linears(), linears()
    fsdp.shard_model(model, mesh, RECIPES[name], mp_policy=policy)
    for layer in plain:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(plain, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model)
    fsdp.attach(optimizer, model)
    with Counted() as fp8:
        step(model, name, 0, 0)
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor) and parameter.grad.dtype == torch.float32
    with Counted() as bf16:
        step(plain, name, 0, 0)
    with Counted() as counted:
        for _ in range(2):
            step(model, name, 0, 0)
            optimizer.step()
    return fp8.bytes, bf16.bytes, counted.maxima


@pytest.mark.parametrize(("name", "bar"), [("current", 0.55), ("block", 0.55), ("nvfp4", 0.3)])
def test_bytes_on_the_wire_and_one_amax_reduction_a_step(ranks: Ranks, name: str, bar: float) -> None:
    for fp8, bf16, maxima in filter(None, ranks.run(wire_bytes, name)):
        assert (
            bf16 == 2 * 3 * 2 * HIDDEN * HIDDEN // 2
        )  # forward and backward, 3 weights, 2 bytes, half of each on a rank
        assert 0 < fp8 <= bar * bf16
        assert maxima == 2


def mixed_precision(name: str) -> bool | None:
    """Whether 2 ranks end with the weights of 1 rank that runs their two microbatches, both computing in bf16."""
    alone, pair = one_rank_mesh(), two_ranks()
    if pair is None:
        return None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ends = []
    for mesh, parts in ((pair, [dist.get_rank()]), (alone, [0, 1])):
        model: Any = build()
        fsdp.shard_model(model, mesh, RECIPES[name], mp_policy=policy)
        optimizer = adamw(model)
        fsdp.attach(optimizer, model)
        for number in range(STEPS):
            for part in parts:
                model.set_requires_gradient_sync(part == parts[-1])
                step(model, name, number, part)
            for parameter in model.parameters():
                assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype == torch.float32
                parameter.grad /= len(parts)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(whole(model))
    return all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("name", ["current", "block"])
def test_bf16_compute_with_float32_masters(ranks: Ranks, name: str) -> None:
    assert [a for a in ranks.run(mixed_precision, name) if a is not None] == [True, True]


def accumulate(reshard: bool) -> tuple[dict[str, Tensor], float, int] | None:
    """Gradients of 2 microbatches on each of 2 ranks, their norm, and the all-reduces meanwhile."""
    mesh = two_ranks()
    if mesh is None:
        return None
    model = build(1)
    fsdp.shard_model(model, mesh, RECIPES["block"], reshard_after_forward=reshard)
    with Counted() as counted:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            step(model, "block", micro, dist.get_rank())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    assert isinstance(norm, DTensor)
    return grads, float(norm.full_tensor()), counted.maxima


@pytest.mark.parametrize("reshard", [True, False])
def test_gradient_accumulation(ranks: Ranks, reshard: bool) -> None:
    model = build(1)
    for part in range(2):
        for micro in range(2):
            step(model, "block", micro, part)
    norm = torch.stack([p.grad.norm() / 2 for p in model.parameters() if p.grad is not None]).norm()
    for grads, own_norm, maxima in filter(None, ranks.run(accumulate, reshard)):
        assert maxima == 0
        assert own_norm == pytest.approx(float(norm), rel=1e-6)
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(grads[key], parameter.grad / 2, rtol=1e-5, atol=1e-6)


OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "FusedAdam": ottava.optimizers.FusedAdam,
}


def optimize() -> dict[str, bool] | None:
    """For each optimizer: do 2 ranks that see the same data end with the weights of one that is alone?"""
    mesh = two_ranks()
    if mesh is None:
        return None
    equal = {}
    for key, make in OPTIMIZERS.items():
        model, alone = build(1), build(1)
        fsdp.shard_model(model, mesh, RECIPES["block"])
        pairs = [(model, make(model.parameters())), (alone, make(alone.parameters()))]
        fsdp.attach(pairs[0][1], model)
        for number in range(2):
            for each, optimizer in pairs:
                step(each, "block", number, 0)
                optimizer.step()
                optimizer.zero_grad()
        compare_gathered(model, "block")
        weights = whole(model)
        equal[key] = all(torch.equal(weights[n], w) for n, w in alone.state_dict().items())
    return equal


def test_any_optimizer(ranks: Ranks) -> None:
    expected = dict.fromkeys(OPTIMIZERS, True)
    assert [a for a in ranks.run(optimize) if a is not None] == [expected, expected]


def stale() -> list[str] | None:
    """What goes wrong where masters change and nobody refreshes."""
    mesh = mesh_of("3 uneven")
    if mesh is None:
        return None
    errors: list[str] = []

    def attempt() -> None:
        try:
            step(model, "current", 0, 0)
        except ValueError as error:
            errors.append(str(error))
        else:
            errors.append("")

    model = build(1)
    fsdp.shard_model(model, mesh, RECIPES["current"])
    optimizer = adamw(model)
    attempt()  # fresh from the start, though FSDP moves uneven shards into new memory now
    optimizer.step()
    attempt()  # stale by an optimizer without the hook
    fsdp.refresh(model)
    attempt()
    state = model.state_dict()
    next(iter(v for n, v in state.items() if n.endswith("norm_linear.weight")))._local_tensor.mul_(2)
    attempt()  # stale by a write into the state dict, as a checkpoint loader does it
    fsdp.refresh(model)
    compare_gathered(model, "current")
    model.load_state_dict({n: v.clone() for n, v in state.items()})  # refreshes by itself
    compare_gathered(model, "current")
    attempt()
    handle = fsdp.attach(optimizer, model)
    optimizer.step()
    attempt()
    handle.remove()
    optimizer.step()
    attempt()  # stale again
    return errors


def test_a_stale_copy_is_an_error(ranks: Ranks) -> None:
    answers = [a for a in ranks.run(stale) if a is not None]
    assert len(answers) == 3
    for errors in answers:
        assert [bool(e) for e in errors] == [False, True, False, True, False, False, True]
        assert "has changed since its FP8 copy was made" in errors[1] and "attach(optimizer, model)" in errors[1]


def evaluate_and_free() -> tuple[Tensor, int] | None:
    """Output outside autocast, and the bytes of gathered weights that are left after a forward."""
    mesh = two_ranks()
    if mesh is None:
        return None
    model = build(1)
    fsdp.shard_model(model, mesh, RECIPES["current"])
    kept: list[Tensor] = []

    def look(module: nn.Module, args: Any) -> None:
        weight = module.weight
        assert isinstance(weight, GatheredWeight)
        kept.extend((weight.rowwise_data, weight.columnwise_data))  # type: ignore[arg-type]

    block: Any = model.blocks[0]
    block.norm_linear.register_forward_pre_hook(look)
    with torch.no_grad():
        y = model(batch(0, 0))
    return y, sum(t.untyped_storage().size() for t in kept)


def test_evaluation_in_high_precision_and_freed_memory(ranks: Ranks) -> None:
    model = build(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("weight", "weight0", "weight1")) and "layer_norm" not in name:
                parameter.copy_(ottava.quantize(parameter, RECIPES["current"], role="weight").dequantize())
        expected = model(batch(0, 0))
    for y, left in filter(None, ranks.run(evaluate_and_free)):
        assert torch.equal(y, expected)
        assert left == 0


def transformer(name: str) -> tuple[list[float], list[float]] | None:
    """Losses of a TransformerLayer with query, key and value in parameters of their own: recomputed and frozen in part."""
    mesh = two_ranks()
    if mesh is None:
        return None
    results = []
    for sharded in (True, False):
        torch.manual_seed(3)
        layer: nn.Module = ottava.TransformerLayer(
            128, 256, 2, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=False, device="cpu"
        )
        model = nn.Sequential(layer)
        next(p for n, p in model.named_parameters() if n.endswith("fc1_weight")).requires_grad_(False)
        if sharded:
            fsdp.shard_model(model, mesh, RECIPES[name])
        optimizer, losses = adamw(model), []
        if sharded:
            fsdp.attach(optimizer, model)
        for number in range(2):
            x = torch.randn(16, 2, 128, generator=torch.Generator().manual_seed(number)).requires_grad_()
            with ottava.autocast(recipe=RECIPES[name]):
                loss = ottava.checkpoint(model, x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    return results[0], results[1]


@pytest.mark.parametrize("name", ["block", "current"])
def test_transformer_layer_with_recompute_and_a_frozen_weight(ranks: Ranks, name: str) -> None:
    for sharded, alone in filter(None, ranks.run(transformer, name)):
        # Parts of one weight that share one scale are put together in high precision and rounded to the same bytes again, with a
        # scale that may differ in its last bits. Blocks are put together as they are.
        assert sharded == alone if name == "block" else sharded == pytest.approx(alone, rel=1e-5)


def save_and_load(folder: str) -> bool | None:
    """Whether a checkpoint of 2 ranks, loaded by 3, goes on as it would have."""
    checkpoint = torch.distributed.checkpoint
    pair, three = mesh_of("2"), mesh_of("3 uneven")
    losses = []
    for mesh in (pair, three):
        if mesh is not None:
            model = build(1)
            fsdp.shard_model(model, mesh, RECIPES["block"])
            if mesh is pair:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)
                fsdp.refresh(model)
                checkpoint.save(model.state_dict(), checkpoint_id=folder, process_group=mesh.get_group())
            else:
                state = model.state_dict()
                checkpoint.load(state, checkpoint_id=folder, process_group=mesh.get_group())
                model.load_state_dict(state)
            losses.append(float(step(model, "block", 0, 0)))
        dist.barrier()
    return losses[0] == losses[1] if len(losses) == 2 else None


def test_checkpoint_is_plain_and_reshards(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(save_and_load, str(tmp_path))
    assert answers == [True, True, None, None]


def deferred() -> bool | None:
    mesh = two_ranks()
    if mesh is None:
        return None
    model = ottava.Linear(HIDDEN, HIDDEN, device="meta")
    fsdp.shard_model(model, mesh, RECIPES["block"])
    with pytest.raises(ValueError, match="meta device"):
        fsdp.refresh(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.delayed.reset()
    fsdp.refresh(model)
    compare_gathered(model, "block")
    with ottava.autocast(recipe=RECIPES["block"]):
        y = model(torch.ones(4, HIDDEN))
    return bool((y == 0.5 * HIDDEN + 0.5).all())


def test_deferred_initialization(ranks: Ranks) -> None:
    assert [a for a in ranks.run(deferred) if a is not None] == [True, True]


def refusals() -> list[str]:
    mesh = one_rank_mesh()
    messages = []

    def refused(model: nn.Module, chosen: recipe.Recipe, **options: Any) -> None:
        with pytest.raises(ValueError) as error:
            fsdp.shard_model(model, options.pop("mesh", mesh), chosen, **options)
        messages.append(str(error.value))

    def linear(**options: Any) -> nn.Module:
        return ottava.Linear(64, 96, device="cpu", **options)

    refused(linear(), recipe.MXFP8BlockScaling())
    refused(linear(), recipe.Float8BlockScaling(w_block_scaling_dim=1))
    refused(linear(), recipe.NVFP4BlockScaling(disable_2d_quantization=True))
    refused(linear(), RECIPES["current"], reshard_after_forward=2)
    refused(linear(), RECIPES["current"], mesh="cpu")
    refused(linear(parameters_split=("a", "b")), RECIPES["delayed"])
    refused(linear(parameters_split=("a", "b")), RECIPES["block"])
    with ottava.quantized_model_init(recipe=RECIPES["current"]):
        stored = linear()
    refused(stored, RECIPES["current"])
    refused(ottava.Linear(64, 40, device="cpu"), RECIPES["current"])
    sharded = linear()
    fully_shard(sharded, mesh=mesh)
    refused(sharded, RECIPES["current"])
    return messages


def test_refusals_say_what_to_do(ranks: Ranks) -> None:
    messages = ranks.run(refusals)[0]
    expected = [
        "MXFP8BlockScaling", "w_block_scaling_dim=2", "NVFP4BlockScaling", "True or False, got 2", "ParallelPlan().meshes().dp",
        "DelayedScaling", "multiples of 128", "quantized_model_init", "(40, 64)", "sharded already",
    ]  # fmt: skip
    for message, words in zip(messages, expected, strict=True):
        assert words in message


@pytest.mark.parametrize("name", ["current", "block", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shard_of_a_weight_gives_its_part_of_the_whole(name: str, dtype: torch.dtype) -> None:
    """Also empty shards, NaN and infinity: what is reduced over ranks makes the scales of the whole weight."""
    weight = torch.randn(304, 208).to(dtype)
    weight[7, 3], weight[290, 200] = float("nan"), float("inf")
    weight[16:48] = 0
    scheme = Scheme.of(RECIPES[name], "weight")
    cuts = [0, 3, 130, 256, 304, 304]
    copies, shards = [], []
    for start, end in itertools.pairwise(cuts):
        copy = Copy("weight", scheme, (304, 208), None, 0)
        copy.offset, copy.padded_rows = (start, 0), end - start + 2
        copies.append(copy)
        shards.append(weight[start:end].contiguous())
    reduced = torch.stack([c.local_amax(s) for c, s in zip(copies, shards, strict=True)]).amax(dim=0)
    for copy, shard in zip(copies, shards, strict=True):
        copy.renew(shard, reduced)
    expected = ottava.quantize(weight, RECIPES[name], role="weight")
    joined = torch.cat([c.data[: s.shape[0]] for c, s in zip(copies, shards, strict=True)])  # type: ignore[index]
    assert torch.equal(joined, expected.rowwise_data)  # type: ignore[arg-type]
    for copy in copies:
        parts = copy.parts(joined, copy.transposed(joined))
        assert all(torch.equal(tensor, expected._parts[part]) for part, tensor in parts.items())


def test_sharded_weight_is_an_ordinary_tensor_to_others() -> None:
    copy = Copy("weight", Scheme("e4m3"), (4, 16), None, 0)
    weight = ShardedWeight(torch.ones(4, 16), copy)
    copy.renew(weight.master, copy.local_amax(weight.master))
    assert copy.fresh(weight.master)
    for made in (weight + 1, weight.clone(), torch.zeros_like(weight), weight.to(torch.bfloat16), weight.sum()):
        assert type(made) is Tensor
    for kept in (weight.detach(), weight.view(-1), weight[:2], torch.empty_like(weight), weight.new_zeros(2, 2)):
        assert isinstance(kept, ShardedWeight)
    assert copy.fresh(weight.master)
    assert weight.add_(1) is weight and not copy.fresh(weight.master)
    assert torch.equal(weight.master, torch.full((4, 16), 2.0))
    assert "e4m3:tensor" in repr(weight)
