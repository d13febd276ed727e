"""What TransformerEngine's FSDP2 programs rely on: gradients of fused accumulation, memory between forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ottava
from distributed.ranks import Ranks
from ottava import compat, recipe
from ottava.nn.construction import ORDER
from ottava.quant.weight import Weight

RECIPES = [
    recipe.DelayedScaling(),
    recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.NVFP4BlockScaling(),
]


def shard(model: Any, ranks: int = 2) -> Any:
    mesh = init_device_mesh("cpu", (ranks,))
    for child in model.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def two_steps(model: Any, x: Tensor, asked: recipe.Recipe) -> list[Tensor]:
    """Outputs and input gradients of two steps, the second with new delayed scales, and a weight's gradient."""
    seen = []
    for _ in range(2):
        x.grad = None
        torch.manual_seed(2)  # of stochastic rounding
        with ottava.autocast(recipe=asked):
            y = model(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        seen += [y.detach(), x.grad.clone()]
    grad = model[0].fc1_weight.grad
    return [*seen, grad.full_tensor() if hasattr(grad, "full_tensor") else grad]


def kept_for_backward(output: Tensor) -> list[Tensor]:
    """What the modules' autograd functions hold."""
    found: list[Tensor] = []
    waiting, done = [output.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in done:
            continue
        done.add(node)
        if "ChainFunction" in type(node).__name__:
            found += [t for t in node.saved_tensors if t is not None]
        waiting += [n for n, _ in node.next_functions]
    return found


def gathered_weights() -> None:
    for asked in RECIPES:
        results = []
        for sharded in (False, True):
            torch.manual_seed(0)
            layers = [ottava.LayerNormMLP(128, 256, params_dtype=torch.bfloat16, device="cpu") for _ in range(2)]
            model: Any = torch.nn.Sequential(*layers)
            model = shard(model) if sharded else model
            torch.manual_seed(1)
            x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
            results.append(two_steps(model, x, asked))
        for one_process, ranks in zip(*results, strict=True):
            assert torch.equal(one_process, ranks), type(asked).__name__
        with ottava.autocast(recipe=asked):
            kept = kept_for_backward(model(x))
        held = [t for t in kept if t.dtype == torch.uint8]
        packed = 2 if isinstance(asked, recipe.NVFP4BlockScaling) else 1
        assert all(t.numel() <= 64 * 256 // packed for t in held), "more is held than activations of 64 tokens"


def fused_accumulation() -> None:
    losses = []
    for fused in (False, True):
        torch.manual_seed(0)
        ORDER.restart()
        asked = recipe.Float8CurrentScaling()
        with ottava.quantized_model_init(recipe=asked):
            layer = ottava.LayerNormMLP(64, 128, fuse_wgrad_accumulation=fused, device="meta")
        if fused:
            for parameter in layer.parameters():
                parameter.main_grad = torch.zeros(parameter.shape)
        before = {name: vars(p).get("main_grad") for name, p in layer.named_parameters()}
        model = shard(torch.nn.Sequential(layer))
        model[0].reset_parameters()
        if fused:
            for name, parameter in model[0].named_parameters():
                parameter.main_grad = before[name]
        optimizer = ottava.optimizers.FusedAdam(
            model.parameters(), lr=1e-3, master_weights=True, use_decoupled_grad=fused
        )
        torch.manual_seed(1)
        x = torch.randn(32, 64)
        steps = []
        for _ in range(3):
            optimizer.zero_grad()
            with ottava.autocast(recipe=asked):
                loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0], losses


def gathers_by_hand() -> None:
    """FSDP2's hooks with all five of torch's arguments, between two forwards that must not see it."""
    for asked in RECIPES[1:4]:
        with compat.installed(), ottava.quantized_model_init(recipe=asked):
            model = shard(torch.nn.Sequential(ottava.LayerNormMLP(64, 128, activation="swiglu", device="meta")))
            model[0].reset_parameters()
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
            with ottava.autocast(recipe=asked):
                before = model(x)
            for parameter in (p for p in model.parameters() if isinstance(p.to_local(), Weight)):
                local: Any = parameter.to_local()
                sent, meta = local.fsdp_pre_all_gather(
                    mesh=None, orig_size=local.shape, contiguous_orig_stride=None, module=None, mp_policy=None
                )
                received = []
                for message in sent:
                    parts = [torch.empty_like(message) for _ in range(2)]
                    torch.distributed.all_gather(parts, message)
                    received.append(torch.cat(parts))
                whole, _ = local.fsdp_post_all_gather(tuple(received), meta, local.dtype, out=None)
                assert torch.equal(whole.dequantize(), parameter.full_tensor())
                same_buffers(local, whole)
            with ottava.autocast(recipe=asked):
                assert torch.equal(model(x), before)


def same_buffers(local: Any, whole: Any) -> None:
    for direction in ("rowwise", "columnwise"):
        buffers, _ = getattr(local, f"_{direction}_storage").fsdp_extract_buffers()
        joined, _ = getattr(whole, f"_{direction}_storage").fsdp_extract_buffers()
        for buffer, expected in zip(buffers, joined, strict=True):
            parts = [torch.empty_like(buffer) for _ in range(2)]
            torch.distributed.all_gather(parts, buffer)
            assert torch.equal(torch.cat(parts), expected), direction


def all_cases() -> None:
    gathered_weights()
    fused_accumulation()
    gathers_by_hand()


def test_fsdp2_frees_weights_reduces_fused_gradients_and_can_be_gathered_by_hand() -> None:
    with Ranks(2) as ranks:
        ranks.run(all_cases, timeout=200)
