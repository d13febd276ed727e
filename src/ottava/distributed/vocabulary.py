"""Embedding and LM head over a vocabulary that is split over tensor-parallel ranks; `cross_entropy.py` has the loss.

Rank r of tp holds rows [r V/tp, (r+1) V/tp) of the embedding and of the head's weight, and so the columns of the logits:

    x[s, b, h]            = all_reduce(rows of the tokens that are mine, else 0)
    logits[s, b, V/tp]    = x[s, b, h] @ w[V/tp, h].T

`group` is a process group or one dimension of a DeviceMesh (the weight is then a DTensor, as FSDP2 wants it); None is one rank.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ottava.distributed.cross_entropy import vocab_parallel_cross_entropy
from ottava.nn.base import default_device
from ottava.nn.draw import InitMethod
from ottava.nn.initialize import InitSlice, ZeroRows, as_method, draw_
from ottava.nn.strategy import Layout
from ottava.overlap.collectives import (
    all_gather,
    all_reduce,
    process_group,
    rank_of,
    readable,
    reduce_scatter,
    size_of,
)
from ottava.quant.quantizer import check_float

ops = torch.ops.ottava

__all__ = ["VocabParallelEmbedding", "VocabParallelHead", "vocab_parallel_cross_entropy"]


# ---------------------------------------------------------------------------------------------------------- split weights


class _VocabularySplit(nn.Module):
    """A weight [V, h] whose rows are split over ranks: what the embedding and the head share."""

    weight: nn.Parameter
    layouts = {"weight": Layout(0)}

    def __init__(
        self,
        num_embeddings: int,
        hidden_size: int,
        group: Any = None,
        pad_to_multiple: int = 1,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        name: str | None = None,
        *,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        if num_embeddings < 1 or pad_to_multiple < 1:
            raise ValueError(
                f"num_embeddings and pad_to_multiple must be at least 1, got {num_embeddings} and {pad_to_multiple}."
            )
        self.num_embeddings, self.hidden_size = num_embeddings, hidden_size
        self.padded_embeddings = -(-num_embeddings // pad_to_multiple) * pad_to_multiple
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.init_method, self.name = init_method, name
        self.group: Any = None
        if weight is None:
            dtype = params_dtype or torch.get_default_dtype()
            rows = self._rows_of(process_group(group))  # only this rank's rows are ever allocated
            weight = nn.Parameter(torch.empty(rows, hidden_size, dtype=dtype, device=default_device(device)))
            self.weight = weight
            self._attach(group)
            self.reset_parameters()
        else:
            self.weight = weight
            self._attach(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.group)] = self.group  # a handle of this process: a copy talks to the same ranks
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    # ---------------------------------------------------------------------------------------------------------- geometry

    def _rows_of(self, group: Any) -> int:
        tp = size_of(group)
        if self.padded_embeddings % tp:
            raise ValueError(
                f"{type(self).__name__}: a vocabulary of {self.padded_embeddings} cannot be split over {tp} tensor-parallel ranks. "
                f"Pass pad_to_multiple={tp}, or a multiple of it such as {128 * tp}: the same for every mesh that will load the model. (Of "
                "GPT and Llama that is pad_vocab_to in their configuration, and max_length for the positions of a GPT.)"
            )
        return self.padded_embeddings // tp

    @property
    def tp_size(self) -> int:
        """Ranks that the rows are split over."""
        return size_of(self.group)

    @property
    def tp_group(self) -> Any:
        """Their process group; None for one rank."""
        return self.group

    @property
    def rows(self) -> int:
        """Rows of the weight that this rank multiplies."""
        return self._rows_of(self.group)

    @property
    def first_row(self) -> int:
        """Vocabulary index of this rank's first row."""
        return rank_of(self.group) * self.rows

    @property
    def real_rows(self) -> int:
        """How many of this rank's rows are vocabulary, not padding."""
        return min(max(self.num_embeddings - self.first_row, 0), self.rows)

    def _attach(self, group: Any) -> None:
        """Takes this rank's rows of a weight that is whole until now; a weight that is split already stays.

        The whole parameter remembers what it was split into, so that a module that is tied to it finds the same parameter.
        """
        self.group = process_group(group)
        self.weight = getattr(self.weight, "split_into", self.weight)
        rows, held = self.rows, self.weight.shape[0]
        if self.weight.shape[-1] != self.hidden_size or held not in (rows, self.padded_embeddings):
            raise ValueError(
                f"{type(self).__name__} needs a weight of shape ({self.padded_embeddings}, {self.hidden_size}), or this rank's {rows} "
                f"rows of it, got {tuple(self.weight.shape)}."
            )
        whole: Any = self.weight
        mesh = group if isinstance(group, DeviceMesh) else None
        if isinstance(whole, DTensor) or (held == rows and mesh is None):
            return
        local = whole.detach()
        if held != rows:
            local = local[self.first_row : self.first_row + rows].clone()
        if mesh is not None:
            local = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        self.weight = nn.Parameter(local, requires_grad=whole.requires_grad)
        whole.split_into = self.weight

    def set_device_mesh(self, tp_mesh: DeviceMesh | None = None, weight_mesh: DeviceMesh | None = None) -> None:
        """Splits the weight over `tp_mesh` and makes it a DTensor. weight_mesh: nothing is quantized here, so it is not needed.

        >>> embedding.set_device_mesh(mesh["tp"])
        """
        if tp_mesh is not None:
            self._attach(tp_mesh)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Splits the weight over a process group.

        >>> embedding.set_tensor_parallel_group(tp_group)
        """
        self._attach(tp_group)

    def local_weight(self) -> Tensor:
        """This rank's rows, [V/tp, h], connected to the parameter's gradient."""
        return self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight

    # ------------------------------------------------------------------------------------------------------ first values

    def initial_values(self) -> dict[str, InitSlice]:
        """What `ottava.nn.initialize.materialize_` draws: rows of padding are 0."""
        method = ZeroRows(as_method(self.init_method), self.num_embeddings)
        whole = self.weight.shape[0] == self.padded_embeddings  # a DTensor says itself which rows it holds
        shape = (self.padded_embeddings, self.hidden_size)
        return {"weight": InitSlice(method, shape, (0 if whole else self.first_row, 0))}

    def reset_parameters(self) -> None:
        """Draws this rank's rows by (`name`, torch's seed): equal to those of the whole matrix, whatever the group."""
        if self.weight.is_meta:
            return
        name = self.name or f"{type(self).__name__}.weight"
        draw_(self.weight, name, self.initial_values()["weight"], torch.initial_seed())

    def extra_repr(self) -> str:
        """Shown when a model is printed."""
        padding = self.padded_embeddings - self.num_embeddings
        parts = [f"num_embeddings={self.num_embeddings}", f"hidden_size={self.hidden_size}"]
        parts += [f"padding={padding}"] if padding else []
        parts += [f"rows={self.first_row}:{self.first_row + self.rows}"] if size_of(self.group) > 1 else []
        parts += ["sequence_parallel=True"] if self.sequence_parallel else []
        return ", ".join(parts)


class VocabParallelEmbedding(_VocabularySplit):
    """Rows of a table by token, the table split over the ranks of `group`.

    Each rank looks up the tokens that are its own and gives 0 for the others; the sum over ranks is the output, bit for bit that
    of one rank. sequence_parallel: the output is split over the ranks along `sequence_dim` (reduce-scatter). pad_to_multiple: rows
    of zeros are added so that V is a multiple of it; choose one number for all meshes that a checkpoint may be loaded on.
    `init_method` as elsewhere; numbers are drawn by `name` and row, so all meshes start the same.

        >>> embedding = VocabParallelEmbedding(50257, 256, pad_to_multiple=128, device="cpu")  # group=mesh["tp"] on many ranks
        >>> embedding(torch.tensor([[15496, 995]])).shape
        torch.Size([1, 2, 256])
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] integers in [0, num_embeddings) -> [..., h]. On a GPU a token outside gives NaN instead of an error."""
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"VocabParallelEmbedding takes integer tokens, got {tokens.dtype}.")
        tokens = tokens.contiguous()  # the output is laid out as they are, and every layer adds to it
        wrong = (tokens < 0) | (tokens >= self.num_embeddings)
        if readable(tokens) and bool(wrong.any()):
            worst = int(tokens[wrong].flatten()[0])
            raise ValueError(f"Token {worst} is outside the vocabulary [0, {self.num_embeddings}).")
        scatter = self.sequence_dim if self.sequence_parallel else None
        return _Embed.apply(tokens, wrong, self.local_weight(), self.first_row, self.group, scatter)


class _Embed(torch.autograd.Function):
    """scatter: the dimension along which the output is split over ranks, or None."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, wrong: Tensor, weight: Tensor, first: int, group: Any, scatter: int | None
    ) -> Tensor:
        index = tokens - first
        outside = (index < 0) | (index >= weight.shape[0])
        index = index.masked_fill(outside, 0)
        fill = wrong.to(weight.dtype).masked_fill(wrong, float("nan"))  # 0, or NaN for a token that no rank has
        out = torch.where((outside | wrong)[..., None], fill[..., None], nn.functional.embedding(index, weight))
        ctx.save_for_backward(index, outside)
        ctx.group, ctx.scatter, ctx.rows, ctx.dtype = group, scatter, weight.shape[0], weight.dtype
        return sum_over_ranks(out, group, scatter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        index, outside = ctx.saved_tensors
        if ctx.scatter is not None:
            grad = all_gather(grad, ctx.group, ctx.scatter)
        # A frequent token adds up thousands of gradients. CUDA's kernel does so in float32 by itself, the CPU's in the given dtype.
        wide = grad if grad.is_cuda else grad.to(torch.promote_types(grad.dtype, torch.float32))
        wide = wide.masked_fill(outside[..., None], 0).contiguous()
        out = torch.ops.aten.embedding_dense_backward(wide, index, ctx.rows, -1, False)
        return None, None, out.to(ctx.dtype), None, None, None


class VocabParallelHead(_VocabularySplit):
    """logits = x @ weight.T for the rows of the vocabulary that this rank holds; the input's gradient is summed over ranks.

    weight: the embedding's, to tie the two. sequence_parallel: x is split over the ranks along `sequence_dim` and gathered here.
    Logits of padding are -inf, so no softmax or argmax ever chooses them. Feed the result to `vocab_parallel_cross_entropy`.

        >>> head = VocabParallelHead(1000, 64, pad_to_multiple=128, device="cpu")  # group=mesh["tp"] on many ranks
        >>> head(torch.randn(2, 8, 64)).shape  # [2, 8, V/tp]
        torch.Size([2, 8, 1024])
    """

    quantized = False
    """Whether the products of a model's loss are quantized, by the recipe of `ottava.autocast`. Logits that are asked for are not."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., V/tp] in the dtype of x."""
        x, gather = self.checked(x), self.sequence_dim if self.sequence_parallel else None
        return _Head.apply(x, self.local_weight(), self.real_rows, self.group, gather)

    def checked(self, x: Tensor) -> Tensor:
        """The input in the dtype that it is multiplied in."""
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"VocabParallelHead expects a last dimension of {self.hidden_size}, got an input of shape {tuple(x.shape)}."
            )
        check_float(x, "The input of VocabParallelHead")
        autocasts = torch.is_autocast_enabled(x.device.type)
        return x.to(torch.get_autocast_dtype(x.device.type)) if autocasts else x


class _Head(torch.autograd.Function):
    """gather: the dimension along which x is split over ranks, or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, real: int, group: Any, gather: int | None) -> Tensor:
        ctx.save_for_backward(x, weight)  # of a split x only this rank's part is kept
        ctx.real, ctx.group, ctx.gather = real, group, gather
        whole = x if gather is None else all_gather(x, group, gather)
        logits = ops.mm(whole.reshape(-1, whole.shape[-1]), weight.to(x.dtype), None, x.dtype)
        logits[:, real:] = float("-inf")
        return logits.reshape(*whole.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])[:, : ctx.real].to(x.dtype)  # padding has no gradient
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = ops.mm(rows, weight[: ctx.real].to(x.dtype).t(), None, x.dtype).reshape(*grad.shape[:-1], -1)
            dx = sum_over_ranks(dx, ctx.group, ctx.gather)
        if ctx.needs_input_grad[1]:
            whole = x if ctx.gather is None else all_gather(x, ctx.group, ctx.gather)
            dweight = weight.new_zeros(weight.shape)
            dweight[: ctx.real] = ops.mm(rows.t(), whole.reshape(-1, x.shape[-1]).t(), None, weight.dtype)
        return dx, dweight, None, None, None


def sum_over_ranks(x: Tensor, group: Any, scatter: int | None) -> Tensor:
    """Sum of x [..., h] over ranks: all of it, or this rank's part along the dimension `scatter`."""
    if size_of(group) == 1:
        return x
    if scatter is None:
        return all_reduce(x.reshape(-1, x.shape[-1]), group).view(x.shape)
    if x.shape[scatter] % size_of(group):
        raise ValueError(
            f"sequence_parallel splits dimension {scatter} of {tuple(x.shape)} over {size_of(group)} ranks, which do not divide "
            f"{x.shape[scatter]}: pad the sequence to {-(-x.shape[scatter] // size_of(group)) * size_of(group)}."
        )
    return reduce_scatter(x.movedim(scatter, 0), group).movedim(0, scatter)
