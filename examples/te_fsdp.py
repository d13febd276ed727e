"""Transformer layers under torch's FullyShardedDataParallel. Written for TransformerEngine.

    torchrun --nproc-per-node 2 -m ottava.compat examples/te_fsdp.py --recipe delayed

The order is the documented one: build the layers, wrap the root (each TransformerLayer becomes a unit of its own), then
`prepare_te_modules_for_fsdp`. Without a GPU the ranks are CPU processes that talk through gloo.
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformer_engine.common import recipe
from transformer_engine.pytorch.distributed import prepare_te_modules_for_fsdp

RECIPES = {
    "delayed": lambda: recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=32),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 128, 256, 4, 32, 2

tracker = te.distributed.CudaRNGStatesTracker()


def get_tracker():
    return tracker


def make_model(layers, device):
    return torch.nn.Sequential(
        *[
            te.TransformerLayer(
                HIDDEN,
                FFN,
                HEADS,
                fuse_qkv_params=True,
                hidden_dropout=0.0,
                params_dtype=torch.float32,
                layer_number=i + 1,
                get_rng_state_tracker=get_tracker,
                device=device,
            )
            for i in range(layers)
        ]
    )


def wrap(model, device, strategy):
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={te.TransformerLayer}),
        use_orig_params=True,
        device_id=device,
    )


def recompute_layers(model):
    """Keeps only the inputs of each layer for backward."""
    wrapper = functools.partial(
        checkpoint_wrapper,
        checkpoint_fn=te.distributed.checkpoint,
        use_reentrant=False,
        get_rng_state_tracker=get_tracker,
    )
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, te.TransformerLayer)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=["none", *RECIPES], default="delayed")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], default="FULL_SHARD")
    parser.add_argument("--defer-init", action="store_true", help="build on the meta device")
    parser.add_argument("--recompute", action="store_true", help="run each layer again in backward")
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(1234)
    tracker.add("model-parallel-rng", 1234 + rank)
    model = wrap(make_model(args.layers, "meta" if args.defer_init else device), device, args.strategy)
    if args.recompute:
        recompute_layers(model)
    prepare_te_modules_for_fsdp(model)

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    fp8_recipe = RECIPES[args.recipe]() if args.recipe != "none" else None
    torch.manual_seed(rank)  # every rank has data of its own
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, device=device)
    target = torch.randn_like(x)
    losses = []
    for step in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        with te.autocast(enabled=fp8_recipe is not None, recipe=fp8_recipe, amax_reduction_group=dist.group.WORLD):
            output = model(x)
        loss = F.mse_loss(output.float(), target.float())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")

    assert losses[-1] < 0.95 * losses[0], f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f} only"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
