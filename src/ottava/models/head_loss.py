"""Head and loss as one op: hidden states and the head's weight -> the sum of the tokens' losses, and both gradients at once.

    logits = x[t, h] @ weight[V, h].T           for some tokens t at a time, so that all logits never exist
    losses, dlogits = cross_entropy(logits)     dlogits over the logits, in their place
    dx[t, h] = dlogits @ weight;  dweight[V, h] += dlogits.T @ x

[Note: gradients in forward] The loss is a sum, so the gradient that comes back is one number, and both gradients are known up to it when
the logits exist: three products a token, none of them twice. Kept for backward are dx [T, h] and dweight [V, h], instead of logits. With
128,256 words, hidden size 2048, 16,384 tokens and max_logits 2^29 on an H200: dlogits of all tokens would be 4.2 GB in bf16, dweight in
float32 is 1.05 GB. Adding to it in four chunks moves 6.3 GB, 1.5 ms; making the logits a second time, as a checkpoint does, takes 11.
Where one chunk holds all tokens there is nothing to add, and dweight is written in the dtype that the weight wants its gradient in.

Vocabulary-parallel ranks exchange four numbers a token and chunk, and sum dx once (a reduce-scatter where the sequence is split).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ottava.distributed.vocabulary import VocabParallelHead, sum_over_ranks
from ottava.kernels import tally
from ottava.kernels.cast import Buffers, operand_amax
from ottava.kernels.cross_entropy import check_loss, check_targets, fixed_sum
from ottava.kernels.head_loss import Terms, add_product_
from ottava.nn import operand
from ottava.overlap.collectives import all_gather, all_reduce_max, readable, size_of
from ottava.quant.quantization import Quantization
from ottava.quant.scheme import Scheme
from ottava.quant.state import CURRENT
from ottava.quant.weight import gradient_dtype

ops = torch.ops.ottava

TILE = 128
"""Tokens of a chunk are a multiple of this where they can be: the tiles of a GEMM, and the longest blocks of a recipe."""


ALIGNED = 16
"""Logits of a row on a GPU are padded to a multiple of this: cuBLAS and loads of 16 bytes are several times slower on other rows."""


class _Plan(NamedTuple):
    """All but the tensors."""

    terms: Terms
    group: Any
    gather: int | None
    """The dimension along which x is split over ranks."""
    chunk: int
    """Tokens at a time."""
    wants_dx: bool
    wants_dweight: bool
    dtype: torch.dtype
    """Of dweight."""
    quantization: Quantization | None


def head_loss(
    head: VocabParallelHead,
    x: Tensor,
    targets: Tensor,
    max_logits: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The sum of the losses of x [..., h] (this rank's part, under sequence parallelism) and all tokens' targets.

    Options as in `vocab_parallel_cross_entropy`. max_logits: how many logits of this rank may exist at a time. If `head.quantized`, the
    three products run by the recipe of `ottava.autocast`. Backward runs once: what forward made is used up.

        >>> loss = head_loss(model.head, hidden, targets, max_logits=2**29) / targets.numel()
    """
    x = head.checked(x)
    targets = targets.reshape(-1).to(torch.int64)
    terms = Terms(head.first_row, head.real_rows, head.num_embeddings, ignore_index, label_smoothing, z_loss)
    check_loss("sum", label_smoothing, head.num_embeddings, head.padded_embeddings)
    if readable(targets):
        check_targets(targets, ignore_index, head.num_embeddings)
    quantization = _quantization(head)
    weight = head.local_weight()
    gradients = torch.is_grad_enabled()
    plan = _Plan(
        terms,
        head.group,
        head.sequence_dim if head.sequence_parallel else None,
        chunk_of(targets.numel(), max_logits // head.rows),
        gradients and x.requires_grad,
        gradients and weight.requires_grad,
        gradient_dtype(head.weight),
        quantization,
    )
    return _HeadLoss.apply(x, weight, targets, plan)


def chunk_of(tokens: int, most: int) -> int:
    """Tokens of a chunk: at most `most`, in as few chunks as that allows, and whole tiles of them where there are several.

    >>> chunk_of(16384, 4186), chunk_of(100, 4186), chunk_of(100, 60)
    (4096, 100, 50)
    """
    most = max(most, 1)
    if tokens <= most:
        return max(tokens, 1)
    even = -(-tokens // -(-tokens // most))
    tiles = -(-even // TILE) * TILE
    return tiles if tiles <= most else even


def _quantization(head: VocabParallelHead) -> Quantization | None:
    """How the products of this head are quantized now; None: not at all."""
    if not head.quantized or CURRENT.recipe is None or CURRENT.calibrating:
        return None
    quantization = Quantization.of(CURRENT.recipe)
    if quantization.backward != "quantized":
        raise ValueError(
            f"A quantized head goes back quantized, but {quantization.name} asks for {quantization.backward!r} in backward: build the "
            "model without fp8_head (precision.fp8_head = false), or leave the recipe's backward as it is."
        )
    multiple = quantization.feature_multiple
    fills = quantization.weight.fills_blocks(head.rows) and quantization.grad.fills_blocks(head.rows)
    if head.rows % multiple or head.hidden_size % multiple or not fills:
        raise ValueError(
            f"{quantization.name} quantizes the head in whole blocks, but its weight has {head.rows} rows a rank and {head.hidden_size} "
            f"columns: pad the vocabulary with pad_vocab_to={TILE * head.tp_size} (model.pad_vocab_to), or leave fp8_head off."
        )
    return quantization


# ------------------------------------------------------------------------------------------------------------------ products


class _Products:
    """The three products of a chunk in the dtype of x. `logits` and `take` come first, `release` last: two chunks never exist at once."""

    def __init__(self, weight: Tensor, plan: _Plan, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)

    def logits(self, x: Tensor) -> Tensor:
        """[t, V/tp]; on a GPU with columns of no meaning behind them where rows would not be aligned."""
        self.x = x
        missing = -self.weight.shape[0] % ALIGNED if x.is_cuda else 0
        if not missing:
            return ops.mm(x, self.weight, None, x.dtype)
        out = x.new_empty(x.shape[0], self.weight.shape[0] + missing)
        torch.mm(x, self.weight.t(), out=out[:, :-missing])
        return out

    def take(self, dlogits: Tensor) -> None:
        self.dlogits = dlogits

    def release(self) -> None:
        del self.dlogits

    def dx(self) -> Tensor:
        return ops.mm(self.dlogits, self.weight.t(), None, self.dlogits.dtype)

    def dweight(self, dtype: torch.dtype) -> Tensor:
        return ops.mm(self.dlogits.t(), self.x.t(), None, dtype)

    def add_dweight_(self, out: Tensor) -> None:
        add_product_(out, self.dlogits.t(), self.x)


class _QuantizedProducts(_Products):
    """The same by a recipe. Scales are those of the chunk at hand, also under DelayedScaling: a head keeps no history.

    What is split over the vocabulary (weight, dlogits) has one scale on all ranks where a scale is a tensor's.
    """

    def __init__(self, weight: Tensor, plan: _Plan, dtype: torch.dtype) -> None:
        assert plan.quantization is not None
        tally.slot = tally.ELSEWHERE
        self.plan, self.dtype, self.quantization = plan, dtype, plan.quantization
        self.w = self._split(weight, self.quantization.weight, True, plan.wants_dx)

    def _split(self, x: Tensor, scheme: Scheme, row: bool, column: bool) -> Buffers:
        """Quantizes this rank's part of a tensor."""
        amax = None
        if scheme.needs_tensor_amax and size_of(self.plan.group) > 1:
            amax = all_reduce_max(operand_amax(x, scheme), self.plan.group)
        return Buffers(*ops.quantize(x, str(scheme), None, amax, row, column))

    def logits(self, x: Tensor) -> Tensor:
        q = self.quantization
        self.q_x = Buffers(*ops.quantize(x, str(q.input), None, None, True, self.plan.wants_dweight))
        return _product(self.q_x, self.w, q.input, q.weight, (0, 0), self.dtype, q.split_fprop)

    def release(self) -> None:
        del self.q_grad

    def take(self, dlogits: Tensor) -> None:
        self.q_grad = self._split(dlogits, self.quantization.grad, self.plan.wants_dx, self.plan.wants_dweight)

    def dx(self) -> Tensor:
        q = self.quantization
        return _product(self.q_grad, self.w, q.grad, q.weight, (0, 1), self.dtype, q.split_dgrad)

    def dweight(self, dtype: torch.dtype) -> Tensor:
        q = self.quantization
        return _product(self.q_grad, self.q_x, q.grad, q.input, (1, 1), dtype, q.split_wgrad)

    def add_dweight_(self, out: Tensor) -> None:
        out.add_(self.dweight(out.dtype))


def _product(
    a: Buffers, b: Buffers, a_scheme: Scheme, b_scheme: Scheme, columnwise: tuple[int, int], dtype: torch.dtype, split: bool
) -> Tensor:  # fmt: skip
    """A @ B.T. columnwise: 1 for an operand whose columnwise copy is multiplied."""
    x, y = (
        operand.columnwise(buffers, scheme) if column else operand.rowwise(buffers, scheme)
        for buffers, scheme, column in zip((a, b), (a_scheme, b_scheme), columnwise)
    )
    return ops.scaled_mm(*x[:3], *y[:3], str(x.scheme), str(y.scheme), None, dtype, split)


# ------------------------------------------------------------------------------------------------------------------- the op


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, plan: _Plan) -> Tensor:
        whole = x if plan.gather is None else all_gather(x, plan.group, plan.gather)
        flat, tokens = whole.reshape(-1, whole.shape[-1]), targets.numel()
        if flat.shape[0] != tokens:
            raise ValueError(
                f"{tokens} targets for {flat.shape[0]} hidden states: pass a target (or ignore_index) for each."
            )
        if plan.quantization is not None:  # whole blocks of tokens; those added are ignored
            flat = pad(flat, (0, 0, 0, -tokens % TILE))
            targets = pad(targets, (0, -tokens % TILE), value=plan.terms.ignore_index)
        losses, dx, dweight = _in_chunks(flat, weight, targets, plan)
        if dx is not None:
            dx = sum_over_ranks(dx[:tokens].view(whole.shape), plan.group, plan.gather)
        ctx.made, ctx.dtype = (dx, dweight), plan.dtype
        return fixed_sum(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.made is None:
            raise RuntimeError(
                "The loss of a model goes back once: its gradients are made in forward and used up. Call the model again."
            )
        (dx, dweight), ctx.made = ctx.made, None
        if dx is not None:
            dx.mul_(grad)
        if dweight is not None and dweight.dtype == ctx.dtype:
            dweight.mul_(grad)
        elif dweight is not None:  # one pass: float32 is read, what the weight wants is written
            dweight = ops.scaled_copy(dweight, grad, ctx.dtype)
        return dx, dweight, None, None


def _in_chunks(x: Tensor, weight: Tensor, targets: Tensor, plan: _Plan) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x [T, h] -> losses [T], dx [T, h] of this rank's part of the vocabulary, dweight [V/tp, h] (float32 if added up)."""
    kind = _Products if plan.quantization is None else _QuantizedProducts
    products = kind(weight, plan, x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    losses = x.new_empty(x.shape[0], dtype=wide)
    dx = x.new_empty(x.shape) if plan.wants_dx else None
    dweight: Tensor | None = None
    chunk = plan.chunk if plan.quantization is None else -(-plan.chunk // TILE) * TILE
    several = chunk < x.shape[0]
    for first in range(0, x.shape[0], chunk):
        part = slice(first, first + chunk)
        logits = products.logits(x[part])
        losses[part] = _losses(logits, targets[part], plan)
        if not (plan.wants_dx or plan.wants_dweight):
            del logits
        else:
            products.take(logits[:, : weight.shape[0]])
            del logits  # quantized products have bytes of their own
            if dx is not None:
                dx[part] = products.dx()
            if dweight is not None:
                products.add_dweight_(dweight)
            elif plan.wants_dweight:
                dweight = products.dweight(torch.promote_types(plan.dtype, wide) if several else plan.dtype)
            products.release()
    if plan.wants_dweight and dweight is None:  # no tokens
        dweight = torch.zeros_like(weight, dtype=plan.dtype)
    return losses, dx, dweight


def _losses(logits: Tensor, targets: Tensor, plan: _Plan) -> Tensor:
    """losses [t] of logits [t, V/tp], whose place their gradient takes where one is wanted."""
    terms, writes = plan.terms, plan.wants_dx or plan.wants_dweight
    if size_of(plan.group) == 1 and writes:
        return ops.loss_fused_(logits, targets, *terms)
    statistics = all_gather(ops.loss_statistics(logits, targets, *terms)[None], plan.group)
    if writes:
        ops.loss_gradient_(logits, logits, statistics, targets, None, *terms)
    return ops.loss_values(statistics, targets, *terms)
