"""TransformerEngine's layers in the plain model, with the same weights."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ottava.bench.peers import Unavailable
from ottava.bench.plain_llama import Block, PlainLlama
from ottava.compat.stand_in import StandIn
from ottava.models import LlamaConfig


class TeBlock(nn.Module):
    """A `transformer_engine.pytorch.TransformerLayer` that takes what `Block` takes."""

    def __init__(self, block: Block, config: LlamaConfig, number: int, device: torch.device) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.layer = te.TransformerLayer(
            config.hidden_size, config.ffn_hidden_size, config.heads, num_gqa_groups=config.kv_heads,
            layernorm_epsilon=config.norm_eps, hidden_dropout=0.0, attention_dropout=0.0, layer_number=number, bias=False,
            normalization="RMSNorm", activation="swiglu", self_attn_mask_type="causal", attn_input_format="bshd",
            fuse_qkv_params=False, params_dtype=block.q_proj.weight.dtype, device=device,
        )  # fmt: skip
        self.rotary = te.attention.RotaryPositionEmbedding(config.head_channels, rotary_base=config.rope_theta)
        copy_block(block, self.layer)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [b, s, hidden]; the angles are made by TransformerEngine's own module."""
        return self.layer(x, rotary_pos_emb=self.rotary(x.shape[1]).to(x.device))


@torch.no_grad()
def copy_block(block: Block, layer: Any) -> None:
    """The weights of a plain block, as TransformerLayer names and joins them."""
    qkv, mlp = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
    pairs = [
        (qkv.layer_norm_weight, block.input_layernorm.weight), (qkv.query_weight, block.q_proj.weight),
        (qkv.key_weight, block.k_proj.weight), (qkv.value_weight, block.v_proj.weight),
        (layer.self_attention.proj.weight, block.o_proj.weight),
        (mlp.layer_norm_weight, block.post_attention_layernorm.weight),
        (mlp.fc1_weight, torch.cat([block.gate_proj.weight, block.up_proj.weight])),
        (mlp.fc2_weight, block.down_proj.weight),
    ]  # fmt: skip
    for theirs, ours in pairs:
        theirs.copy_(ours)


def te_autocast() -> AbstractContextManager[Any]:
    """TransformerEngine's FP8 with DelayedScaling, as this version of it spells that."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe.DelayedScaling())
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe.DelayedScaling())


class TeLlama(nn.Module):
    """The plain model with TransformerEngine's layers, under its autocast and torch's to bf16."""

    def __init__(self, plain: PlainLlama, device: torch.device) -> None:
        super().__init__()
        for i in range(len(plain.layers)):
            block: Any = plain.layers[i]
            plain.layers[i] = TeBlock(block, plain.config, i + 1, device)
        self.plain = plain
        self.device_type = device.type

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        with (
            torch.autocast(self.device_type, torch.bfloat16),
            te.autocast(enabled=True, recipe=recipe.DelayedScaling()),
        ):
            return self.plain(tokens, targets)


def te_model(plain: PlainLlama, device: torch.device) -> TeLlama:
    """Raises Unavailable where TransformerEngine cannot be imported, or there is no GPU."""
    require_te(device)
    return TeLlama(plain, device)


def require_te(device: torch.device) -> None:
    """Raises Unavailable where TransformerEngine cannot run."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise Unavailable("transformer_engine cannot be imported: pip install transformer-engine[pytorch]")
    if isinstance(importlib.import_module("transformer_engine"), StandIn):
        raise Unavailable("transformer_engine is Ottava's own stand-in here: it would be timed against itself")
    if device.type != "cuda":
        raise Unavailable("TransformerEngine needs a GPU")
