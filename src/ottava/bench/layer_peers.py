"""The layers of `ottava bench layer` as others run them, with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ottava.bench.peers import best_attention, compile_blocks, convert_to_float8
from ottava.bench.plain_llama import Block
from ottava.bench.shape_of_layers import Shape
from ottava.models import LlamaConfig

PEERS = {
    "torch": "torch's own operations in bf16",
    "torch-compile": "the same, each layer compiled",
    "torchao": "compiled, with torchao's tensorwise float8 linear layers",
    "te": "TransformerEngine's TransformerLayer under DelayedScaling",
}
"""Others by name."""
ROPE_BASE = 10000.0
"""The default of RotaryPositionEmbedding, which the layers here use."""


@torch.no_grad()
def plain_blocks(layers: Any, config: LlamaConfig, device: torch.device) -> nn.ModuleList:
    """Blocks of torch's operations with the weights of Ottava's `layers`: bf16, on a CPU float32."""
    blocks = nn.ModuleList(Block(config, device).to(_dtype(device)) for _ in layers)
    made: Any = blocks
    for block, layer in zip(made, layers):
        qkv, mlp = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
        gate, up = mlp.fc1_weight.chunk(2)
        for target, source in (
            (block.input_layernorm, qkv.layer_norm_weight), (block.q_proj, qkv.query_weight), (block.k_proj, qkv.key_weight),
            (block.v_proj, qkv.value_weight), (block.o_proj, layer.self_attention.proj.weight),
            (block.post_attention_layernorm, mlp.layer_norm_weight), (block.gate_proj, gate), (block.up_proj, up),
            (block.down_proj, mlp.fc2_weight),
        ):  # fmt: skip
            target.weight.copy_(source)
    return blocks


def _dtype(device: torch.device) -> torch.dtype:
    """Some CPUs stop at torch's bf16 attention."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def layer_peer(name: str, model: Any, shape: Shape, x: Tensor, dy: Tensor) -> tuple[Callable[[], Tensor], bool]:
    """(forward + backward, which gives the output [s, b, hidden]; whether its products are quantized)."""
    device = x.device
    config = LlamaConfig(
        hidden_size=shape.hidden, ffn_hidden_size=shape.ffn, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads,
        max_length=shape.sequence, rope_theta=ROPE_BASE,
    )  # fmt: skip
    blocks = plain_blocks(model.layers, config, device)
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    if name == "torchao":
        convert_to_float8(blocks, device)
    if name in ("torchao", "torch-compile"):
        compile_blocks(blocks)
    if name == "te":
        blocks, scope = _te_blocks(blocks, config, device)
    angle = model.rotary(shape.sequence)[:, 0].float()  # [s, 1, d]
    cos, sin = angle.cos(), angle.sin()
    leaf, grad = (t.detach().transpose(0, 1).to(_dtype(device)).contiguous() for t in (x, dy))
    leaf.requires_grad_()

    def step() -> Tensor:
        blocks.zero_grad(set_to_none=True)
        leaf.grad = None
        y: Tensor = leaf
        with best_attention(device), scope():
            for block in blocks:
                y = block(y, cos, sin)
        y.backward(grad)
        return y.transpose(0, 1)

    return step, name in ("torchao", "te")


def _te_blocks(blocks: Any, config: LlamaConfig, device: torch.device) -> tuple[nn.ModuleList, Callable[[], Any]]:
    from ottava.bench.te_peer import TeBlock, require_te, te_autocast

    require_te(device)
    made = nn.ModuleList(TeBlock(block, config, i + 1, device) for i, block in enumerate(blocks))
    return made, te_autocast
