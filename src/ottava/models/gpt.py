"""GPT, as GPT-2 has it: learned positions, LayerNorm, GELU, biases, dropout, a head that shares the embedding's table.

x = dropout(embedding(tokens) + positions(0, 1, 2, ...))
x = x + attention(layer_norm(x));  x = x + gelu_mlp(layer_norm(x))      for each layer
logits = head(layer_norm(x))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ottava.distributed.vocabulary import VocabParallelEmbedding, VocabParallelHead
from ottava.models.causal_lm import (
    CausalLM,
    FlopsPerToken,
    init_methods,
    layer_flops,
    run_layers,
)
from ottava.models.checks import check_positive, check_shape
from ottava.nn import LayerNorm, TransformerLayer
from ottava.nn.attention_documents import PackedDocuments, document_positions
from ottava.nn.random_replay import drawing_own_masks


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. The defaults are GPT-2, 124M parameters.

    >>> GPTConfig().head_channels
    64
    """

    vocab_size: int = 50257
    hidden_size: int = 768
    ffn_hidden_size: int = 3072
    layers: int = 12
    heads: int = 12
    max_length: int = 1024
    """Longest sequence, in tokens: the positions that are learned."""
    norm_eps: float = 1e-5
    dropout: float = 0.1
    """Of the embedding, of each layer's outputs and of attention weights."""
    tie_embeddings: bool = True
    """The head multiplies by the embedding's table."""
    init_std: float = 0.02
    pad_vocab_to: int = 1
    """Rows of zeros are added to the vocabulary up to a multiple of this: choose a multiple of every tp size that will be used."""

    def __post_init__(self) -> None:
        check_shape(self)
        check_positive(self, "norm_eps")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig: dropout is a probability below 1, got {self.dropout}.")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the vocabulary with its padding."""
        return -(-self.vocab_size // self.pad_vocab_to) * self.pad_vocab_to

    @property
    def learned_positions(self) -> int:
        """Rows of the table of positions, which tensor-parallel ranks split evenly."""
        return self.max_length

    @property
    def head_channels(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.heads

    def flops_per_token(self, sequence: int) -> FlopsPerToken:
        """Forward and backward, for sequences of `sequence` tokens."""
        matrices = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.ffn_hidden_size
        return layer_flops(matrices, self.vocab_size * self.hidden_size, self.layers, self.hidden_size, sequence)


class GPT(CausalLM):
    """A GPT language model. Arguments as for `Llama`, and `get_rng_state_tracker` as for `TransformerLayer`: where dropout of
    tensor-parallel ranks draws what must differ between them. `parallelize` gives a model one that has none.

    >>> config = GPTConfig(vocab_size=256, hidden_size=64, ffn_hidden_size=128, layers=2, heads=4, max_length=32)
    >>> GPT(config, device="cpu")(torch.randint(256, (1, 8))).shape
    torch.Size([1, 8, 256])
    """

    def __init__(
        self,
        config: GPTConfig,
        device: torch.device | str | None = None,
        params_dtype: torch.dtype | None = None,
        recompute: str = "none",
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fp8_head: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.get_rng_state_tracker = get_rng_state_tracker
        where: dict[str, Any] = {"device": device, "params_dtype": params_dtype}
        init, output_init = init_methods(config.init_std, config.layers)
        vocabulary: dict[str, Any] = {"pad_to_multiple": config.pad_vocab_to, "init_method": init, **where}
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size, **vocabulary)
        # Split over ranks as the vocabulary is, and so scattered along the sequence in the same way.
        self.positions = VocabParallelEmbedding(config.max_length, config.hidden_size, init_method=init, **where)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                config.hidden_size,
                config.ffn_hidden_size,
                config.heads,
                layernorm_epsilon=config.norm_eps,
                hidden_dropout=config.dropout,
                attention_dropout=config.dropout,
                init_method=init,
                output_layer_init_method=output_init,
                layer_number=number,
                set_parallel_mode=True,
                fuse_qkv_params=True,
                bias=True,
                activation="gelu",
                normalization="LayerNorm",
                attn_input_format="sbhd",
                recompute=recompute,
                get_rng_state_tracker=get_rng_state_tracker,
                **where,
            )
            for number in range(1, config.layers + 1)
        )
        self.norm = LayerNorm(config.hidden_size, eps=config.norm_eps, **where)
        shared = self.embedding.weight if config.tie_embeddings else None
        self.head = VocabParallelHead(config.vocab_size, config.hidden_size, weight=shared, **vocabulary)
        self.head.quantized = fp8_head
        self.tables = [self.embedding, self.positions]

    def hidden(
        self,
        tokens: Tensor,
        documents: Tensor | PackedDocuments | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """tokens [b, s] -> [s, b, hidden]."""
        length = tokens.shape[1]
        if length > self.config.max_length:
            raise ValueError(f"GPT learned {self.config.max_length} positions, got a sequence of {length} tokens.")
        packed = PackedDocuments.of(documents, tokens.device)
        if packed is None:
            positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        else:
            positions = document_positions(packed.documents)
        x = self.embedding(tokens.t()) + self.positions(positions.t())
        with drawing_own_masks(self.get_rng_state_tracker, self.embedding.sequence_parallel):
            x = self.dropout(x)
        return self.norm(*run_layers(self.layers, x, packed, is_first_microbatch))

    def flops_per_token(self, sequence: int) -> FlopsPerToken:
        """Forward and backward, for sequences of `sequence` tokens."""
        return self.config.flops_per_token(sequence)
