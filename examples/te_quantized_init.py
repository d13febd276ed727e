"""A transformer layer whose weights exist in FP8 only, trained with float32 masters. Written for TransformerEngine.

    python -m ottava.compat examples/te_quantized_init.py --recipe block

Three things work together: `quantized_model_init` stores the weights as bytes and keeps their first values on the CPU,
`fuse_wgrad_accumulation` adds weight gradients into float32 `main_grad` buffers, and `FusedAdam` updates float32 masters and
quantizes them into the weights again.
"""

import argparse

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
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


def make_layer(fp8_recipe, device):
    with te.quantized_model_init(enabled=True, recipe=fp8_recipe, preserve_high_precision_init_val=True):
        return te.TransformerLayer(
            HIDDEN,
            FFN,
            HEADS,
            fuse_qkv_params=True,
            fuse_wgrad_accumulation=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.bfloat16,
            device=device,
        )


def seed_masters(optimizer, model):
    """Starts the masters from the values that the weights had before they were quantized."""
    for param in model.parameters():
        optimizer.initialize_state(param, store_param_remainders=False)
        if isinstance(param, QuantizedTensor):
            value = param.get_high_precision_init_val()
            optimizer.set_scaled_state(param, "master_param", value.to(param.device, torch.float32))
            param.clear_high_precision_init_val()


def gather_gradients(model):
    """Fused weight gradients are in main_grad already; those of norms and biases are in grad."""
    for param in model.parameters():
        if param.grad is not None:
            param.main_grad.copy_(param.grad)
            param.grad = None
        param.decoupled_grad = param.main_grad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fp8_recipe = RECIPES[args.recipe]()
    model = make_layer(fp8_recipe, device)
    quantized = [name for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)]
    print(f"{args.recipe}: {len(quantized)} weights are stored quantized: {', '.join(quantized)}")
    assert len(quantized) == 4

    for param in model.parameters():
        param.main_grad = torch.zeros(param.shape, dtype=torch.float32, device=device)
    optimizer = te.optimizers.FusedAdam(
        model.parameters(),
        lr=args.lr,
        master_weights=True,
        master_weight_dtype=torch.float32,
        use_decoupled_grad=True,
    )
    seed_masters(optimizer, model)

    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, device=device)
    target = torch.randn_like(x)
    losses = []
    for step in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        for param in model.parameters():
            param.main_grad.zero_()
        with te.autocast(enabled=True, recipe=fp8_recipe):
            output = model(x)
        loss = F.mse_loss(output.float(), target.float())
        loss.backward()
        gather_gradients(model)
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}")

    assert losses[-1] < 0.9 * losses[0], f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f} only"
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        assert state["master_param"].dtype == state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        assert (name in quantized) == isinstance(param, QuantizedTensor)


if __name__ == "__main__":
    main()
