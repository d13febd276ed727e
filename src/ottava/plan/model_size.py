"""`ModelSize`: how many numbers a model has, layer by layer, from its configuration alone. Nothing is built.

>>> ModelSize.of(preset("llama3-8b")).parameters
8030261248
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ottava.models import FlopsPerToken, GPTConfig
from ottava.train.config import Config

BYTE_VOCABULARY = 257


@dataclass(frozen=True, eq=False)
class ModelSize:
    """Sizes of a model, in elements. Equal to itself alone, so that what follows from it is remembered quickly."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    head_channels: int
    kv_channels: int
    """Of all key heads together; as many again for values."""
    vocabulary: int
    """With its padding."""
    gated: bool
    """fc1 has two outputs for each input of fc2."""
    rotary: bool
    tied: bool
    vectors: int
    """Norms and biases of a layer."""
    extra: int
    """Learned positions and the last norm."""
    length: int
    """Tokens of a sequence."""
    flops: FlopsPerToken

    @staticmethod
    def of(config: Config) -> ModelSize:
        """Of the model that `config` trains."""
        length = config.data.length
        shape = config.model.shape(config.model.vocab_size or BYTE_VOCABULARY, length)
        gpt = isinstance(shape, GPTConfig)
        h, f = shape.hidden_size, shape.ffn_hidden_size
        return ModelSize(
            layers=shape.layers,
            hidden=h,
            ffn=f,
            heads=shape.heads,
            head_channels=shape.head_channels,
            kv_channels=h if isinstance(shape, GPTConfig) else shape.head_channels * shape.kv_heads,
            vocabulary=shape.padded_vocab_size,
            gated=not gpt,
            rotary=not gpt,
            tied=shape.tie_embeddings,
            vectors=(4 * h + 3 * h + h + f + h) if gpt else 2 * h,
            extra=(shape.max_length * h + 2 * h) if gpt else h,
            length=length,
            flops=shape.flops_per_token(length),
        )

    @cached_property
    def qkv(self) -> int:
        """Outputs of the first product of a layer."""
        return self.hidden + 2 * self.kv_channels

    @cached_property
    def fc1(self) -> int:
        """Outputs of the third."""
        return 2 * self.ffn if self.gated else self.ffn

    @cached_property
    def products(self) -> tuple[tuple[int, int, str], ...]:
        """(outputs, inputs, the side that tensor parallelism splits) of a layer's matrices."""
        h, f = self.hidden, self.ffn
        return ((self.qkv, h, "outputs"), (h, h, "inputs"), (self.fc1, h, "outputs"), (h, f, "inputs"))

    @cached_property
    def matrices(self) -> int:
        """Elements of a layer that are multiplied."""
        return sum(outputs * inputs for outputs, inputs, _ in self.products)

    @cached_property
    def tables(self) -> int:
        """Elements of embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * (self.matrices + self.vectors) + self.tables + self.extra
