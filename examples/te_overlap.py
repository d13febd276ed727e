"""Tensor-parallel layers whose collectives hide under their products, with DistributedDataParallel outside. Written for TransformerEngine.

    torchrun --nproc-per-node 4 -m ottava.compat examples/te_overlap.py --replicas 2 --fp8

Every kind of layer is trained twice from the same weights on the same batches, first with the communication waited for, then with it under
the products, and both rows of losses are printed. Without a GPU the ranks are CPU processes that talk through gloo.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
import transformer_engine.pytorch.cpp_extensions as tex
from torch.nn.parallel import DistributedDataParallel
from transformer_engine.common import recipe

HEADS, HEAD, SEQUENCE, BATCH = 4, 32, 64, 2
HIDDEN, FFN = HEADS * HEAD, 2 * HEADS * HEAD
LAYERS = ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")


def make_layer(name, overlap, group, device):
    """(layer, shape of this rank's input, shape of its output)."""
    ranks = dist.get_world_size(group)
    common = {
        "tp_group": group,
        "tp_size": ranks,
        "sequence_parallel": True,
        "params_dtype": torch.float32,
        "device": device,
    }
    common["ub_overlap_ag"] = overlap
    spread = (SEQUENCE // ranks, BATCH, HIDDEN)  # tokens are spread over the tensor-parallel ranks
    if name == "Linear":
        layer = te.Linear(HIDDEN, HIDDEN, parallel_mode="row", ub_overlap_rs=overlap, ub_name="proj", **common)
        return layer, (SEQUENCE, BATCH, HIDDEN // ranks), spread
    common |= {"ub_bulk_dgrad": overlap, "ub_bulk_wgrad": overlap}
    if name == "LayerNormLinear":
        layer = te.LayerNormLinear(HIDDEN, 3 * HIDDEN, parallel_mode="column", ub_name="qkv", **common)
        return layer, spread, (SEQUENCE, BATCH, 3 * HIDDEN // ranks)
    common |= {"set_parallel_mode": True, "ub_overlap_rs": overlap}
    if name == "LayerNormMLP":
        return te.LayerNormMLP(HIDDEN, FFN, seq_length=SEQUENCE, **common), spread, spread
    common |= {"attention_dropout": 0.0, "fuse_qkv_params": True}
    if name == "MultiheadAttention":
        return te.MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, **common), spread, spread
    common |= {"hidden_dropout": 0.0, "seq_length": SEQUENCE, "ub_tp_comm_overlap": overlap}
    return te.TransformerLayer(HIDDEN, FFN, HEADS, **common), spread, spread


def train(name, overlap, fp8, steps, groups, device):
    """The losses of this rank."""
    tp_group, dp_group = groups
    torch.manual_seed(1234 + dist.get_rank(tp_group))
    layer, shape, out_shape = make_layer(name, overlap, tp_group, device)
    model = DistributedDataParallel(layer, process_group=dp_group)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaling = recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=8, amax_compute_algo="max")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(shape, device=device, requires_grad=True)
    target = torch.randn(out_shape, device=device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with (
            torch.amp.autocast(device.type, dtype=torch.bfloat16),
            te.autocast(enabled=fp8, recipe=scaling, amax_reduction_group=dist.group.WORLD),
        ):
            out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        loss = F.mse_loss(out.float(), target)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def make_groups(replicas):
    """(tensor-parallel group, data-parallel group) of this rank: neighbours hold parts of one layer."""
    ranks = dist.get_world_size() // replicas
    rows = [list(range(i * ranks, (i + 1) * ranks)) for i in range(replicas)]
    tp_group, _ = dist.new_subgroups_by_enumeration(rows)
    dp_group, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*rows)])
    return tp_group, dp_group


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=["all", *LAYERS], default="all")
    parser.add_argument("--fp8", action="store_true", help="DelayedScaling instead of bfloat16")
    parser.add_argument("--replicas", type=int, default=1, help="data-parallel copies of the layer")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if not tex.device_supports_multicast():
        os.environ["UB_SKIPMC"] = "1"
    dist.init_process_group("nccl" if gpu else "gloo")
    groups = make_groups(args.replicas)

    mode = te.module.base.UserBufferQuantizationMode
    for name in LAYERS if args.layer == "all" else (args.layer,):
        for overlap in (False, True):
            if overlap:
                te.module.base.initialize_ub(
                    [SEQUENCE * BATCH, HIDDEN],
                    dist.get_world_size(groups[0]),
                    quantization_modes=[mode.FP8 if args.fp8 else mode.NONE],
                    dtype=torch.bfloat16,
                    bootstrap_backend="nccl" if gpu else "gloo",
                )
            losses = train(name, overlap, args.fp8, args.steps, groups, device)
            if overlap:
                te.module.base.destroy_ub()
            if dist.get_rank() == 0:
                print(f"{name} overlap {'on' if overlap else 'off'}:", *(f"{loss:.5f}" for loss in losses), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
