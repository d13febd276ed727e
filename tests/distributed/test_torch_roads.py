"""Roads of torch's own tools that FP8-stored weights used to leave in silence, or by an error that did not say why."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ottava
from distributed.ranks import Ranks
from ottava import recipe

RECIPES = [
    recipe.Float8CurrentScaling(),
    recipe.DelayedScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
]


def mlp(asked: recipe.Recipe, stored: bool = True, seed: int = 0) -> Any:
    """Gate and up are two parameters of one matrix."""
    torch.manual_seed(seed)
    with ottava.quantized_model_init(recipe=asked) if stored else contextlib.nullcontext():
        return ottava.LayerNormMLP(64, 64, activation="swiglu", set_parallel_mode=True, device="cpu")


def forward(model: Any, asked: recipe.Recipe) -> Tensor:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with ottava.autocast(recipe=asked):
        return model(x)


def values(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Any] = dict(model.named_parameters())
    return {n: (p.dequantize() if isinstance(p, ottava.QuantizedTensor) else p).detach() for n, p in found.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("asked", RECIPES, ids=lambda r: type(r).__name__)
def test_a_state_dict_is_contiguous_and_stays_the_weights_memory(asked: recipe.Recipe) -> None:
    model, other = mlp(asked), mlp(asked, seed=1)
    entries = model.state_dict()  # before the first forward, which joins gate and up in one memory
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    for _ in range(2):
        forward(model, asked).square().sum().backward()
        optimizer.step()
        now = model.state_dict()
        assert all(t.is_contiguous() for t in now.values())  # as safetensors wants them
        # A scale that parts share is live in the first one's entries.
        live = [name for name in now if not name.startswith("fc1_up_weight_")]
        assert all(torch.equal(entries[name], now[name]) for name in live)
    wanted = other.state_dict()
    forward(model, asked)
    with torch.no_grad():
        for name, entry in entries.items():
            entry.copy_(wanted[name])  # as `dcp.load` does
    gradients = []
    for each in (model, other):
        each.zero_grad()
        forward(each, asked).square().sum().backward()
        gradients.append({name: p.grad for name, p in each.named_parameters()})
    assert equal(*gradients)


@pytest.mark.parametrize("asked", RECIPES, ids=lambda r: type(r).__name__)
def test_values_that_come_one_parameter_at_a_time_are_rounded_once(asked: recipe.Recipe) -> None:
    """Gate and up share a scale: loading up must not round what was loaded for gate a second time."""
    source = mlp(asked, stored=False, seed=3)
    with torch.no_grad():
        source.fc1_up_weight.mul_(1.7)
    loaded, copied, at_once = (mlp(asked, seed=i) for i in range(3))
    loaded.load_state_dict(source.state_dict())
    with torch.no_grad():
        for target, value in zip(copied.parameters(), source.parameters(), strict=True):
            target.copy_(value)
        at_once.fc1_weight = source.fc1_weight
        at_once.fc2_weight.copy_(source.fc2_weight)
    assert equal(values(loaded), values(copied))
    assert torch.equal(values(loaded)["fc1_gate_weight"], values(at_once)["fc1_gate_weight"])
    assert all(weight.memory.given is None for weight in copied.stored_weights().values())


@pytest.mark.parametrize("asked", RECIPES, ids=lambda r: type(r).__name__)
def test_cloned_parameters_multiply_as_the_ones_they_were_cloned_from(asked: recipe.Recipe) -> None:
    model, twin = mlp(asked), mlp(asked)
    cloned = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with ottava.autocast(recipe=asked):
        y = torch.func.functional_call(model, {**cloned, **buffers}, (x,))
    y.square().sum().backward()
    expected = forward(twin, asked)
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    assert equal({n: p.grad for n, p in cloned.items()}, {n: p.grad for n, p in twin.named_parameters()})  # type: ignore[misc]


def test_export_of_stored_weights_says_what_to_do_and_of_others_works() -> None:
    asked = recipe.Float8CurrentScaling()
    x = torch.randn(32, 64)

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            with ottava.autocast(recipe=asked):
                return self.inner(x)

    for layer in (lambda: mlp(asked), lambda: ottava.Linear(64, 64, device="cpu")):
        with ottava.quantized_model_init(recipe=asked):
            model = layer()
        with pytest.raises(ValueError, match="is stored in FP8, which torch.export cannot hold: load the state dict"):
            torch.export.export(Wrapped(model), (x,))
    plain = ottava.Linear(64, 64, device="cpu")
    plain.load_state_dict(model.state_dict())
    assert torch.equal(torch.export.export(Wrapped(plain), (x,)).module()(x), Wrapped(plain)(x))


def test_weights_that_are_no_longer_stored_and_buffers_that_are_not_followed_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = recipe.Float8CurrentScaling()
    with ottava.quantized_model_init(recipe=asked):
        model, other = (ottava.Linear(64, 64, device="cpu", name=f"roads {i}") for i in range(2))
    nn.utils.parametrizations.weight_norm(model, "weight")
    bucket = torch.empty(2, 64, 64)
    with caplog.at_level(logging.WARNING, "ottava"), torch.no_grad():
        forward(model, asked)
        other.weight.data = bucket[0].copy_(other.weight)
    assert "'roads 0' was made inside quantized_model_init, but a weight of it is a plain tensor now" in caplog.text
    assert "parameters_as_bucket_view=True" in caplog.text
    with pytest.raises(ValueError, match=r"cannot be a stretch of a flat parameter, as FSDP1 wants it: use FSDP2"):
        other.weight.data = torch.zeros(64 * 64)


# -------------------------------------------------------------------------------------------------------------- two ranks


def same_on_all_ranks(model: nn.Module) -> bool:
    for value in values(model).values():
        first = value.clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, value):
            return False
    return True


def collectives_write() -> None:
    """`dist.broadcast(weight)` and the like reach the bytes, also where nobody waits for them."""
    for asked in RECIPES:
        model, wanted = mlp(asked, seed=dist.get_rank()), values(mlp(asked, seed=0))
        with torch.no_grad():
            works: Any = [dist.broadcast(parameter.data, 0, async_op=True) for parameter in model.parameters()]
            for work in works:
                work.wait()
        assert equal(values(model), wanted), type(asked).__name__
        with torch.no_grad():
            dist.all_reduce(model.fc2_weight)
        assert torch.equal(values(model)["fc2_weight"], 2 * wanted["fc2_weight"])


def ranks_that_start_apart_meet() -> None:
    for asked in RECIPES:
        alone = mlp(asked, seed=0)
        model = DistributedDataParallel(mlp(asked, seed=dist.get_rank()))
        assert equal(values(model.module), values(alone)), type(asked).__name__
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=10.0)
        for _ in range(2):
            optimizer.zero_grad()
            forward(model, asked).square().mean().backward()
            optimizer.step()
        assert same_on_all_ranks(model.module)
        moved, start = values(model.module), values(alone)
        assert not any(torch.equal(moved[name], start[name]) for name in moved if moved[name].dim() == 2)


def dtensor_inputs_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    x: Any = distribute_tensor(torch.randn(32, 64), mesh, [Replicate()])
    for module in (ottava.RMSNorm(64, device="cpu"), ottava.Linear(64, 64, device="cpu")):
        with pytest.raises(ValueError, match="is a DTensor .*leave them out of torch's parallelize_module"):
            module(x)


def columns_are_not_sharded_and_the_first_forward_may_be_in_inference_mode() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2,))
    for asked in RECIPES:
        with pytest.raises(ValueError, match=r"cut it into rows only, not by .*: let shard_placement_fn return None"):
            fully_shard(mlp(asked), mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
        for trained in (False, True):  # (torch cannot train what it has first gathered in inference mode)
            alone, model = mlp(asked), fully_shard(mlp(asked), mesh=mesh)
            for each in (alone, model) if trained else ():
                forward(each, asked).sum().backward()
            with torch.inference_mode():
                assert torch.equal(forward(model, asked), forward(alone, asked)), type(asked).__name__
        forward(model, asked).sum().backward()


def biases_outlive_the_modules_that_return_them() -> None:
    """A layer adds the biases of its attention and its MLP, whose gathered memory FSDP has freed by then."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mesh, asked = init_device_mesh("cpu", (2,)), recipe.Float8CurrentScaling()

    def layer() -> Any:
        torch.manual_seed(0)
        made = ottava.TransformerLayer(64, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        return made

    alone, parts = layer(), layer()
    for part in (parts.self_attention, parts.layernorm_mlp, parts):
        fully_shard(part, mesh=mesh)
    policy = ModuleWrapPolicy({ottava.MultiheadAttention, ottava.LayerNormMLP})
    flat = FullyShardedDataParallel(
        layer(), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    x = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(1))
    outputs = []
    for model in (alone, parts, flat):
        with ottava.autocast(recipe=asked):
            outputs.append(model(x))
        outputs[-1].square().mean().backward()
        assert torch.equal(outputs[-1], outputs[0]), type(model).__name__
    for (name, wanted), found in zip(alone.named_parameters(), parts.parameters(), strict=True):
        assert torch.allclose(found.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-7), name


def all_roads() -> None:
    biases_outlive_the_modules_that_return_them()
    columns_are_not_sharded_and_the_first_forward_may_be_in_inference_mode()
    collectives_write()
    ranks_that_start_apart_meet()
    dtensor_inputs_are_refused()


def test_collectives_ddp_and_sharded_optimizers_reach_the_bytes_of_stored_weights() -> None:
    with Ranks(2) as ranks:
        ranks.run(all_roads, timeout=200)


# -------------------------------------------------------------------------------------------------------------- four ranks


def other_shards_after_forward_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (4,))
    for asked in RECIPES:
        with pytest.raises(ValueError, match=r"into 4 shards.*reshard_after_forward=True or False"):
            fully_shard(mlp(asked), mesh=mesh, reshard_after_forward=2)
        alone, model = mlp(asked), mlp(asked)
        # To look at rows, these shards among them, is not to shard them.
        seen = [rows for number in (2, 3, 4) for rows in model.fc2_weight.chunk(number) if rows.norm() > 0]
        assert len(seen) == 9
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for each in (alone, model):
            forward(each, asked).square().mean().backward()
            torch.optim.SGD(each.parameters(), lr=10.0).step()
        found = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        assert equal(found, values(alone)), type(asked).__name__


def rows_handed_out_are_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with ottava.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        layer = ottava.Linear(64, 64, device="cpu")
    with pytest.raises(ValueError, match=r"Linear.weight is stored in FP8.*call set_device_mesh\(mesh\) of its module"):
        distribute_tensor(layer.weight, mesh, [Shard(0)])
    values = layer.weight.detach().dequantize()
    assert torch.equal(distribute_tensor(values, mesh, [Shard(0)]).full_tensor(), values)


def test_a_stored_weight_that_distribute_tensor_cuts_says_who_cuts_it(four_ranks: Ranks) -> None:
    four_ranks.run(rows_handed_out_are_refused)


def test_a_number_of_ranks_to_reshard_to_is_refused(four_ranks: Ranks) -> None:
    four_ranks.run(other_shards_after_forward_are_refused)
