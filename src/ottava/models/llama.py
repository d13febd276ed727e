"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

x = embedding(tokens)
x = x + attention(rms_norm(x));  x = x + swiglu_mlp(rms_norm(x))        for each layer
logits = head(rms_norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ottava.distributed.vocabulary import VocabParallelEmbedding, VocabParallelHead
from ottava.models.causal_lm import CausalLM, FlopsPerToken, init_methods, layer_flops, run_layers
from ottava.models.checks import check_positive, check_shape
from ottava.nn import RMSNorm, TransformerLayer
from ottava.nn.attention_documents import PackedDocuments
from ottava.nn.rotary import RotaryPositionEmbedding


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. The defaults are Llama-3-8B.

    >>> LlamaConfig(hidden_size=2048, ffn_hidden_size=8192, layers=16, tie_embeddings=True).head_channels
    64
    """

    vocab_size: int = 128256
    hidden_size: int = 4096
    ffn_hidden_size: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    """Heads of keys and values; each serves heads / kv_heads heads of queries."""
    max_length: int = 8192
    """Longest sequence, in tokens."""
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """The head multiplies by the embedding's table."""
    init_std: float = 0.02
    pad_vocab_to: int = 1
    """Rows of zeros are added to the vocabulary up to a multiple of this: choose a multiple of every tp size that will be used."""

    def __post_init__(self) -> None:
        check_shape(self)
        check_positive(self, "kv_heads", "rope_theta", "norm_eps")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}).")
        if self.head_channels % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels, but hidden_size / heads = {self.head_channels} is odd."
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary with its padding."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def head_channels(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.heads

    def flops_per_token(self, sequence: int) -> FlopsPerToken:
        """Forward and backward, for sequences of `sequence` tokens."""
        qkv = self.hidden_size * self.head_channels * (self.heads + 2 * self.kv_heads)
        matrices = qkv + self.hidden_size**2 + 3 * self.hidden_size * self.ffn_hidden_size
        return layer_flops(matrices, self.vocab_size * self.hidden_size, self.layers, self.hidden_size, sequence)


class Llama(CausalLM):
    """A Llama language model.

    params_dtype: of the weights. Activations have the embedding's dtype, or that of `torch.autocast`. recompute: "selective" as
    for `TransformerLayer`. fp8_head: under `ottava.autocast` the products of the head in `loss` are quantized too. On device="meta"
    nothing is allocated: `ottava.nn.initialize.materialize_` draws the weights later, the same on any number of ranks.

        >>> model = Llama(LlamaConfig(vocab_size=256, hidden_size=64, ffn_hidden_size=128, layers=2, heads=4, kv_heads=2), device="cpu")
        >>> model(torch.randint(256, (1, 8))).shape
        torch.Size([1, 8, 256])
    """

    def __init__(
        self,
        config: LlamaConfig,
        device: torch.device | str | None = None,
        params_dtype: torch.dtype | None = None,
        recompute: str = "none",
        fp8_head: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        where: dict[str, Any] = {"device": device, "params_dtype": params_dtype}
        init, output_init = init_methods(config.init_std, config.layers)
        vocabulary: dict[str, Any] = {"pad_to_multiple": config.pad_vocab_to, "init_method": init, **where}
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **vocabulary)
        self.rotary = RotaryPositionEmbedding(config.head_channels, rotary_base=config.rope_theta, device=device)
        self.layers = nn.ModuleList(
            TransformerLayer(
                config.hidden_size,
                config.ffn_hidden_size,
                config.heads,
                num_gqa_groups=config.kv_heads,
                layernorm_epsilon=config.norm_eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                init_method=init,
                output_layer_init_method=output_init,
                layer_number=number,
                set_parallel_mode=True,
                fuse_qkv_params=True,
                bias=False,
                activation="swiglu",
                normalization="RMSNorm",
                attn_input_format="sbhd",
                recompute=recompute,
                **where,
            )
            for number in range(1, config.layers + 1)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, **where)
        shared = self.embedding.weight if config.tie_embeddings else None
        self.head = VocabParallelHead(config.vocab_size, config.hidden_size, weight=shared, **vocabulary)
        self.head.quantized = fp8_head
        self.tables = [self.embedding]

    def hidden(
        self,
        tokens: Tensor,
        documents: Tensor | PackedDocuments | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """tokens [b, s] -> [s, b, hidden]."""
        # [s, 1, 1, channels]; relative, so they need not restart with each document
        angles = self.rotary(tokens.shape[1])
        x = self.embedding(tokens.t())
        return self.norm(*run_layers(self.layers, x, documents, is_first_microbatch, angles))

    def flops_per_token(self, sequence: int) -> FlopsPerToken:
        """Forward and backward, for sequences of `sequence` tokens."""
        return self.config.flops_per_token(sequence)
