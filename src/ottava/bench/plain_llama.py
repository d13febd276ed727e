"""A Llama from torch's own operations: what others train with, and what Ottava's losses are compared with.

Weights have Hugging Face's shapes, so that `ottava.models.hf_llama` translates between this model and ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ottava.models import LlamaConfig
from ottava.models.hf_llama import rows
from ottava.models.llama import Llama


def _linear(inputs: int, outputs: int, device: torch.device | str) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device=device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, s, heads, d] turned by angles whose cos and sin are [s, 1, d], in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Block(nn.Module):
    """One layer. x [b, s, hidden]."""

    def __init__(self, config: LlamaConfig, device: torch.device | str) -> None:
        super().__init__()
        hidden, ffn, self.channels = config.hidden_size, config.ffn_hidden_size, config.head_channels
        keys = config.kv_heads * self.channels
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.norm_eps, device=device)
        self.q_proj = _linear(hidden, hidden, device)
        self.k_proj = _linear(hidden, keys, device)
        self.v_proj = _linear(hidden, keys, device)
        self.o_proj = _linear(hidden, hidden, device)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.norm_eps, device=device)
        self.gate_proj = _linear(hidden, ffn, device)
        self.up_proj = _linear(hidden, ffn, device)
        self.down_proj = _linear(ffn, hidden, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor | None = None) -> Tensor:
        """x [b, s, hidden]; cos, sin [s, 1, d]; seen [b, 1, s, s]: which keys a query sees, if not all before it."""
        h = self.input_layernorm(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.channels)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [b, heads, s, d]
        context = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=True)
        x = x + self.o_proj(context.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits [b, s, vocabulary] with targets [b, s], in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainLlama(nn.Module):
    """tokens [b, s], targets [b, s] -> mean loss. recompute: layers are computed again in backward.

    >>> PlainLlama(LlamaConfig(vocab_size=64, hidden_size=32, ffn_hidden_size=64, layers=1, heads=2, kv_heads=1), "cpu")
    """

    def __init__(self, config: LlamaConfig, device: torch.device | str, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device=device)
        self.layers = nn.ModuleList(Block(config, device) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps, device=device)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, device)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.loss = mean_loss
        """May be replaced by a compiled one."""

    def angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin of all positions, float32 [length, 1, d]."""
        channels = self.config.head_channels
        exponent = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
        position = torch.arange(length, dtype=torch.float32, device=device)
        angle = position[:, None] * (1.0 / self.config.rope_theta**exponent)
        both = torch.cat([angle, angle], dim=-1)[:, None]
        return both.cos(), both.sin()

    def forward(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """The mean loss. documents [b, s]: tokens see their own document only (angles between them are the same wherever it begins)."""
        cos, sin = self.angles(tokens.shape[1], tokens.device)
        seen = None if documents is None else (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(layer, x, cos, sin, seen, use_reentrant=False)
            else:
                x = layer(x, cos, sin, seen)
        return self.loss(self.lm_head(self.norm(x)), targets)


def plain_name(theirs: str) -> str:
    """Hugging Face's name of a weight -> the name here.

    >>> plain_name("model.layers.0.self_attn.q_proj.weight")
    'layers.0.q_proj.weight'
    """
    return theirs.removeprefix("model.").replace(".self_attn.", ".").replace(".mlp.", ".")


@torch.no_grad()
def copy_weights(ours: Llama, plain: PlainLlama) -> None:
    """Gives `plain` the weights of `ours`, a model of one process with the same configuration."""
    found, wanted = dict(ours.named_parameters()), dict(plain.named_parameters())
    for row in rows(plain.config):
        for theirs, value in row.export(found[row.ours]).items():
            wanted[plain_name(theirs)].copy_(value)
