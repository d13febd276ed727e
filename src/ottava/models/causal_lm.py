"""What all models here share: tokens in, logits or a loss out, and how large and how expensive the model is."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from ottava import torch_private
from ottava.distributed.recompute import is_recomputed
from ottava.distributed.vocabulary import VocabParallelHead, vocab_parallel_cross_entropy
from ottava.models.head_loss import head_loss
from ottava.nn import TransformerLayer
from ottava.nn.attention_documents import PackedDocuments

MAX_LOGITS = 2**29
"""Logits that exist at a time in a loss: 1 GiB in bf16. On a CPU as much again for their gradient, which else takes their place."""


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations of forward and backward for one token; a multiply-add is two.

    layers + head = 6 N, with N the weights that are multiplied (no norms, biases or embedding tables). `attention` counts
    q k^T and its product with v over the whole square; a causal kernel needs half of that. Recomputation does not count.

        >>> flops = FlopsPerToken(layers=6.0e9, head=1.0e9, attention=2.0e9)
        >>> flops.full, flops.causal
        (9000000000.0, 8000000000.0)
    """

    layers: float
    head: float
    attention: float

    @property
    def full(self) -> float:
        """With attention over the whole square."""
        return self.layers + self.head + self.attention

    @property
    def causal(self) -> float:
        """With the half of attention that a causal mask leaves."""
        return self.layers + self.head + self.attention / 2


class CausalLM(nn.Module):
    """A stack of `TransformerLayer` between an embedding and a head. `Llama` and `GPT` say what lies in between.

    Activations are [s, b, hidden]: the sequence first, so that tensor-parallel ranks split it without a copy.
    """

    layers: nn.ModuleList
    """Of TransformerLayer: what `parallelize` shards one by one."""
    head: VocabParallelHead
    vocab_size: int
    hidden: Callable[[Tensor, Tensor | PackedDocuments | None, bool | None], Tensor]
    """tokens [b, s] -> what the head takes, [s, b, hidden]; [s/tp, b, hidden] under sequence parallelism."""
    tables: list[nn.Module]
    """Modules whose weight is looked up, not multiplied (unless the head shares it)."""

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | PackedDocuments | None = None,
        is_first_microbatch: bool | None = None,
        **loss: Any,
    ) -> Tensor:
        """tokens [b, s] -> logits [b, s, vocabulary]; with `targets` the loss, see `loss`.

        documents [b, s]: the number of each token's document within its row; a token sees its own document only. Documents lie
        end to end. A `PackedDocuments` made from a tensor on the CPU lets a GPU use the fastest kernels without being waited for.
        is_first_microbatch: as for TransformerLayer. Logits of a vocabulary that is split over ranks are gathered, without a
        gradient: training goes through the loss.
        """
        x = self.hidden(tokens, documents, is_first_microbatch)
        if targets is not None:
            return self._loss(x, targets.t(), **loss)
        if loss:
            raise ValueError(f"{', '.join(loss)} belong to a loss: pass targets too.")
        return _whole_rows(self.head(x), self.head.group)[..., : self.vocab_size].transpose(0, 1)

    def loss(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | PackedDocuments | None = None, **options: Any
    ) -> Tensor:
        """Cross-entropy of the logits of `tokens` [b, s] with `targets` [b, s]; a target of -100 does not count.

        Options: z_loss, label_smoothing and ignore_index of `vocab_parallel_cross_entropy`; reduction, "mean" or "sum";
        max_logits: how many logits may exist at a time; more tokens are taken in pieces. Gradients of the head are made in forward
        (`models/head_loss.py`), so backward runs once; on a CPU logits of pieces are made again in backward.

            >>> model = Llama(LlamaConfig(vocab_size=64, hidden_size=32, ffn_hidden_size=64, layers=1, heads=2, kv_heads=1))
            >>> tokens = torch.randint(64, (2, 17))
            >>> model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        """
        # Through __call__, because that is where FSDP, DDP and torch.compile hang their hooks.
        return self(tokens, targets, documents, **options)

    def _loss(
        self, x: Tensor, targets: Tensor, reduction: str = "mean", max_logits: int = MAX_LOGITS, **options: Any
    ) -> Tensor:
        """x [s, b, hidden], targets [s, b]. Under sequence parallelism x is [s/tp, b, hidden]: a piece is a slice of all parts."""
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction of a model's loss must be 'mean' or 'sum', got {reduction!r}.")
        if x.is_cuda or torch_private.is_fake(x) or self.head.quantized:
            total = head_loss(self.head, x, targets, max_logits, **options)
        else:
            total = self._loss_on_cpu(x, targets, max_logits, **options)
        if reduction == "sum":
            return total
        return total / (targets != options.get("ignore_index", -100)).sum().clamp(min=1)

    def _loss_on_cpu(self, x: Tensor, targets: Tensor, max_logits: int, **options: Any) -> Tensor:
        """The sum in the order in which a mesh of any size adds: see `kernels/cross_entropy.py`. Pieces are made again in backward."""
        parts = targets.reshape(-1, *x.shape[:2])  # [tp, s/tp, b], or [1, s, b]

        def piece(x: Tensor, targets: Tensor) -> Tensor:
            size = self.vocab_size
            return vocab_parallel_cross_entropy(
                self.head(x), targets, self.head.group, reduction="sum", vocabulary_size=size, **options
            )

        a_position = parts.shape[0] * x.shape[1] * self.head.rows  # logits of one position of x
        step = max(max_logits // a_position, 1)
        if step >= x.shape[0]:
            return piece(x, parts.flatten(0, 1))
        total = x.new_zeros((), dtype=torch.float32)
        for i in range(0, x.shape[0], step):
            some = parts[:, i : i + step].flatten(0, 1)
            total = total + checkpoint(piece, x[i : i + step], some, use_reentrant=False)
        return total

    def num_parameters(self, tables: bool = True) -> int:
        """Parameters of the whole model, tied ones once. tables=False leaves out embeddings that are only looked up."""
        found = {id(p): p.numel() for p in self.parameters()}
        if not tables:
            for table in self.tables:
                if table.weight is not self.head.weight:
                    found.pop(id(table.weight))
        return sum(found.values())


def layer_flops(matrices: int, head: int, layers: int, query_channels: int, sequence: int) -> FlopsPerToken:
    """matrices: weights of one layer that are multiplied; head: of the head; query_channels: heads x channels of a head.

    >>> layer_flops(12 * 64**2, 1000 * 64, layers=2, query_channels=64, sequence=128).attention == 12 * 2 * 64 * 128
    True
    """
    # q k^T and p v: 2 x 2 s channels forward, twice that backward.
    return FlopsPerToken(6.0 * layers * matrices, 6.0 * head, 12.0 * layers * query_channels * sequence)


def init_methods(std: float, layers: int) -> tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]:
    """(weights, weights whose output is added to the residual): the latter are smaller by sqrt(2 layers), so that the
    residual's variance at the start does not grow with depth. Both are elementwise: a rank draws its own part only."""
    normal = nn.init.normal_
    return functools.partial(normal, std=std), functools.partial(normal, std=std / math.sqrt(2 * layers))


def run_layers(
    layers: nn.ModuleList,
    x: Tensor,
    documents: Tensor | PackedDocuments | None,
    is_first_microbatch: bool | None,
    rotary: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [s, b, hidden] through all layers: (the output of the last one, what is still to be added to it, if anything).

    Where documents lie is found once for all of them.
    """
    mask = PackedDocuments.of(documents, x.device)
    kind = "causal" if documents is None else "arbitrary"
    options = {"self_attn_mask_type": kind, "rotary_pos_emb": rotary, "is_first_microbatch": is_first_microbatch}
    residual: Tensor | None = None
    for layer in layers:
        if _adds_later(layer):
            x, residual = layer(x, mask, **options, residual=residual, return_residual=True)
        else:
            x, residual = layer(x if residual is None else residual + x, mask, **options), None
    return x, residual


def _adds_later(layer: nn.Module) -> bool:
    """Whether the norm of the next layer may add. A layer that is recomputed keeps its input: that should be one tensor, not two."""
    return isinstance(layer, TransformerLayer) and layer.adds_later() and not is_recomputed(layer)


def _whole_rows(logits: Tensor, group: Any) -> Tensor:
    """[..., V/tp] -> [..., V]."""
    if group is None or dist.get_world_size(group) == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.detach().contiguous(), group=group)
    return torch.cat(parts, dim=-1)
