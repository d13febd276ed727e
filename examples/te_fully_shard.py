"""Transformer layers under torch's `fully_shard` (FSDP2), trained by FusedAdam. Written for TransformerEngine.

    torchrun --nproc-per-node 2 -m ottava.compat examples/te_fully_shard.py --recipe block

Parameters are bfloat16 and sharded; FusedAdam keeps float32 masters of the shards. With --fp8-init the sharded parameters are FP8
bytes, and the masters start from the values that the weights had before they were quantized. Without a GPU the ranks are CPU
processes that talk through gloo.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformer_engine.common import recipe
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

RECIPES = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=16),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 128, 256, 4, 32, 2


def make_model(layers, fp8_recipe, fp8_init, device):
    stored = te.quantized_model_init(enabled=True, recipe=fp8_recipe, preserve_high_precision_init_val=True)
    with stored if fp8_init else contextlib.nullcontext():
        return torch.nn.Sequential(
            *[
                te.TransformerLayer(
                    HIDDEN,
                    FFN,
                    HEADS,
                    fuse_qkv_params=True,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    params_dtype=torch.bfloat16,
                    device=device,
                )
                for _ in range(layers)
            ]
        )


def shard(model, mesh):
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local(param):
    """What this rank holds of a sharded parameter."""
    return param._local_tensor if isinstance(param, DTensor) else param


def seed_masters(optimizer, model):
    """Starts the masters from the values that the weights had before they were quantized."""
    for param in model.parameters():
        optimizer.initialize_state(param, store_param_remainders=False)
        if isinstance(local(param), QuantizedTensor):
            value = local(param).get_high_precision_init_val()
            optimizer.set_scaled_state(param, "master_param", value.to(param.device, torch.float32))
            local(param).clear_high_precision_init_val()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="current")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--fp8-init", action="store_true", help="store the weights in FP8")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(42)  # every rank draws the same weights, and keeps its shards
    fp8_recipe = RECIPES[args.recipe]()
    model = shard(
        make_model(args.layers, fp8_recipe, args.fp8_init, device), DeviceMesh(device.type, list(range(ranks)))
    )
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert args.fp8_init == any(isinstance(local(param), QuantizedTensor) for param in model.parameters())

    optimizer = te.optimizers.FusedAdam(
        model.parameters(), lr=2e-3, master_weights=True, master_weight_dtype=torch.float32
    )
    if args.fp8_init:
        seed_masters(optimizer, model)

    torch.manual_seed(rank)  # every rank has data of its own
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, device=device)
    target = torch.randn_like(x)
    losses = []
    for step in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        with te.autocast(enabled=True, recipe=fp8_recipe):
            output = model(x)
        loss = F.mse_loss(output.float(), target.float())
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")

    assert losses[-1] < 0.95 * losses[0], f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f} only"
    for param in model.parameters():
        state = optimizer.state[param]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
