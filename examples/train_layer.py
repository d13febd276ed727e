"""A small Llama-shaped language model, trained on the same data in bf16 and in FP8.

    python examples/train_layer.py --recipe block

The text is made here: each token follows from the one before by a fixed table, one time in ten at random, so that a model which
has learnt the table reaches a loss of about 0.7 from 4.2.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ottava
import ottava.optimizers
from ottava import recipe

RECIPES = {
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=16),
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
VOCABULARY, HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 128, 256, 4, 2, 2


class Llama(nn.Module):
    """tokens [b, s] -> logits [b, s, vocabulary]."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, device=device, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            ottava.TransformerLayer(
                HIDDEN,
                FFN,
                HEADS,
                num_gqa_groups=KV_HEADS,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                attn_input_format="bshd",
                fuse_qkv_params=True,
                params_dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(LAYERS)
        )
        self.rope = ottava.attention.RotaryPositionEmbedding(HIDDEN // HEADS, device=device)
        self.head = ottava.LayerNormLinear(
            HIDDEN, VOCABULARY, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device=device
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, angles = self.embedding(tokens), self.rope(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(x)


def make_text(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """tokens [batch, length + 1]."""
    table = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
    follows = torch.rand(batch, length, generator=generator) < 0.9
    for i in range(length):
        tokens[:, i + 1] = torch.where(follows[:, i], table[tokens[:, i]], tokens[:, i + 1])
    return tokens


def train(fp8_recipe: recipe.Recipe | None, steps: int, lr: float, device: torch.device) -> list[float]:
    """Losses of each step; fp8_recipe=None: bf16. Same weights and same text in both cases."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Llama(device)
    optimizer = ottava.optimizers.FusedAdam(model.parameters(), lr=lr, betas=(0.9, 0.95), master_weights=True)
    losses = []
    for _ in range(steps):
        tokens = make_text(8, 32, generator).to(device)
        optimizer.zero_grad()
        with ottava.autocast(recipe=fp8_recipe) if fp8_recipe is not None else nullcontext():
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="current")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    plain = train(None, args.steps, args.lr, device)
    quantized = train(RECIPES[args.recipe](), args.steps, args.lr, device)
    print(f"step   bf16     {args.recipe}")
    for step in range(0, args.steps, max(1, args.steps // 10)):
        print(f"{step:4d}  {plain[step]:7.4f}  {quantized[step]:7.4f}")
    print(f"final loss: bf16 {plain[-1]:.4f}, {args.recipe} {quantized[-1]:.4f}")


if __name__ == "__main__":
    main()
