"""Embedding, LM head and cross-entropy over a vocabulary that is split over tensor-parallel ranks.

Rank r of tp holds rows [r V/tp, (r+1) V/tp) of the embedding and of the head's weight, and so the columns of the logits:

    x[s, b, h]            = all_reduce(rows of the tokens that are mine, else 0)
    logits[s, b, V/tp]    = x[s, b, h] @ w[V/tp, h].T
    loss[s, b]            = log(sum exp logits) - logits[target]         two all-reduces of a few numbers a token, never the logits

`group` is a process group or one dimension of a DeviceMesh (the weight is then a DTensor, as FSDP2 wants it); None is one rank.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ottava.nn.base import InitMethod, default_device
from ottava.nn.initialize import Part, ZeroRows, as_method, draw_
from ottava.quant.quantizer import check_float

ops = torch.ops.ottava

# Elements of logits that are worked on in float32 at a time: 4 MiB stay in a CPU's cache, 128 MiB keep a GPU busy.
CHUNK = {"cpu": 2**20, "cuda": 2**25}
REDUCTIONS = ("mean", "sum", "none")

# torch 2.13 has new names for the collectives on one tensor and warns about the old ones, which are all that 2.11 has.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ------------------------------------------------------------------------------------------------------------- collectives


def _process_group(group: Any) -> Any:
    """The process group of a mesh dimension; a process group and None stay."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f'group must be one dimension of the mesh, such as mesh["tp"]; got a mesh of {group.mesh_dim_names or group.ndim}.'
        )
    return group.get_group()


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _rank(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


def _reduce_(x: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """all-reduce in place."""
    if _size(group) > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


def _gather(x: Tensor, dim: int, group: Any) -> Tensor:
    """x[s/tp] -> [s] along `dim`."""
    if _size(group) == 1:
        return x
    part = x.movedim(dim, 0).contiguous()
    whole = part.new_empty((part.shape[0] * _size(group), *part.shape[1:]))
    _ALL_GATHER(whole, part, group=group)
    return whole.movedim(0, dim)


def _scatter_sum(x: Tensor, dim: int, group: Any) -> Tensor:
    """reduce-scatter: x[s] -> sum over ranks of my [s/tp] along `dim`."""
    tp = _size(group)
    if tp == 1:
        return x
    if x.shape[dim] % tp:
        raise ValueError(
            f"sequence_parallel splits dimension {dim} of {tuple(x.shape)} over {tp} ranks, which do not divide {x.shape[dim]}: "
            f"pad the sequence to {-(-x.shape[dim] // tp) * tp}."
        )
    whole = x.movedim(dim, 0).contiguous()
    part = whole.new_empty((whole.shape[0] // tp, *whole.shape[1:]))
    _REDUCE_SCATTER(part, whole, group=group)
    return part.movedim(0, dim)


def _readable(x: Tensor) -> bool:
    """Whether looking at values is possible and costs no wait for a GPU."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


# ---------------------------------------------------------------------------------------------------------- split weights


class _VocabularySplit(nn.Module):
    """A weight [V, h] whose rows are split over ranks: what the embedding and the head share."""

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        hidden_size: int,
        group: Any,
        weight: nn.Parameter | None,
        pad_to_multiple: int,
        sequence_parallel: bool,
        sequence_dim: int,
        params_dtype: torch.dtype | None,
        device: torch.device | str | None,
        init_method: InitMethod | None,
        name: str | None,
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
            rows = self._rows_of(_process_group(group))  # only this rank's rows are ever allocated
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
        tp = _size(group)
        if self.padded_embeddings % tp:
            raise ValueError(
                f"{type(self).__name__}: a vocabulary of {self.padded_embeddings} cannot be split over {tp} tensor-parallel ranks. "
                f"Pass pad_to_multiple={tp}, or a multiple of it such as {128 * tp}: the same for every mesh that will load the model."
            )
        return self.padded_embeddings // tp

    @property
    def rows(self) -> int:
        """Rows of the weight that this rank multiplies."""
        return self._rows_of(self.group)

    @property
    def first_row(self) -> int:
        """Vocabulary index of this rank's first row."""
        return _rank(self.group) * self.rows

    @property
    def real_rows(self) -> int:
        """How many of this rank's rows are vocabulary, not padding."""
        return min(max(self.num_embeddings - self.first_row, 0), self.rows)

    def _attach(self, group: Any) -> None:
        """Takes this rank's rows of a weight that is whole until now; a weight that is split already stays.

        The whole parameter remembers what it was split into, so that a module that is tied to it finds the same parameter.
        """
        self.group = _process_group(group)
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

    def initial_values(self) -> dict[str, Part]:
        """What `ottava.nn.initialize.materialize_` draws: rows of padding are 0."""
        method = ZeroRows(as_method(self.init_method), self.num_embeddings)
        whole = self.weight.shape[0] == self.padded_embeddings  # a DTensor says itself which rows it holds
        shape = (self.padded_embeddings, self.hidden_size)
        return {"weight": Part(method, shape, (0 if whole else self.first_row, 0))}

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
        parts += [f"rows={self.first_row}:{self.first_row + self.rows}"] if _size(self.group) > 1 else []
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
    ) -> None:
        super().__init__(
            num_embeddings, hidden_size, group, None, pad_to_multiple, sequence_parallel, sequence_dim,
            params_dtype, device, init_method, name,
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] integers in [0, num_embeddings) -> [..., h]. On a GPU a token outside gives NaN instead of an error."""
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"VocabParallelEmbedding takes integer tokens, got {tokens.dtype}.")
        wrong = (tokens < 0) | (tokens >= self.num_embeddings)
        if _readable(tokens) and bool(wrong.any()):
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
        return _reduce_(out, group) if scatter is None else _scatter_sum(out, scatter, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        index, outside = ctx.saved_tensors
        if ctx.scatter is not None:
            grad = _gather(grad, ctx.scatter, ctx.group)
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

    def __init__(
        self,
        num_embeddings: int,
        hidden_size: int,
        group: Any = None,
        weight: nn.Parameter | None = None,
        pad_to_multiple: int = 1,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, hidden_size, group, weight, pad_to_multiple, sequence_parallel, sequence_dim,
            params_dtype, device, init_method, name,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """x [..., h] -> [..., V/tp] in the dtype of x."""
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"VocabParallelHead expects a last dimension of {self.hidden_size}, got an input of shape {tuple(x.shape)}."
            )
        check_float(x, "The input of VocabParallelHead")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        gather = self.sequence_dim if self.sequence_parallel else None
        return _Head.apply(x, self.local_weight(), self.real_rows, self.group, gather)


class _Head(torch.autograd.Function):
    """gather: the dimension along which x is split over ranks, or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, real: int, group: Any, gather: int | None) -> Tensor:
        ctx.save_for_backward(x, weight)  # of a split x only this rank's part is kept
        ctx.real, ctx.group, ctx.gather = real, group, gather
        whole = x if gather is None else _gather(x, gather, group)
        logits = ops.mm(whole.reshape(-1, whole.shape[-1]), weight.to(x.dtype), None, x.dtype)
        logits[:, real:] = float("-inf")
        return logits.reshape(*whole.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])[:, : ctx.real].to(x.dtype)  # padding has no gradient
        dx = dweight = work = None
        if ctx.needs_input_grad[0]:
            dx = ops.mm(rows, weight[: ctx.real].to(x.dtype).t(), None, x.dtype).reshape(*grad.shape[:-1], -1)
            if ctx.gather is not None:
                dx = _scatter_sum(dx, ctx.gather, ctx.group)
            elif _size(ctx.group) > 1:
                work = dist.all_reduce(dx, group=ctx.group, async_op=True)  # travels under the product below
        if ctx.needs_input_grad[1]:
            whole = x if ctx.gather is None else _gather(x, ctx.gather, ctx.group)
            dweight = weight.new_zeros(weight.shape)
            dweight[: ctx.real] = ops.mm(rows.t(), whole.reshape(-1, x.shape[-1]).t(), None, weight.dtype)
        if work is not None:
            work.wait()
        return dx, dweight, None, None, None


# ------------------------------------------------------------------------------------------------------------------- loss


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    vocabulary_size: int | None = None,
) -> Tensor:
    """Cross-entropy of logits [..., V/tp], split over `group` along the last dimension, and targets [...], equal on all its ranks.

    Arithmetic is float32 (float64 for float64 logits), in chunks: no second tensor of the logits' size exists in forward.
    label_smoothing as in `torch.nn.functional.cross_entropy`; z_loss adds z_loss * log(sum exp)^2 for each token, which keeps logits
    from drifting. vocabulary_size: logits from here on are padding and count as -inf; by default there is none.
    reduction: "mean" over the tokens that are not ignored (0 if all are), "sum", or "none" (float32 [...], 0 where ignored). The mean
    is over this call's tokens: where data-parallel ranks ignore different numbers of tokens, take the sum and divide by the total.
    A target outside the vocabulary is an error on a CPU, and gives NaN on a GPU.

        >>> logits = torch.zeros(2, 8, requires_grad=True)  # on rank r of tp: columns r V/tp to (r+1) V/tp, and group=mesh["tp"]
        >>> vocab_parallel_cross_entropy(logits, torch.tensor([3, -100]))
        tensor(2.0794, grad_fn=<DivBackward0>)
    """
    if isinstance(logits, DTensor):
        logits, group = _local_logits(logits, group)
    group = _process_group(group)
    total = logits.shape[-1] * _size(group)
    vocabulary = total if vocabulary_size is None else vocabulary_size
    _check_loss(logits, targets, reduction, label_smoothing, vocabulary, total)
    rows = logits.reshape(-1, logits.shape[-1])
    flat = targets.reshape(-1).to(torch.int64)
    ignored = flat == ignore_index
    wrong = ~ignored & ((flat < 0) | (flat >= vocabulary))
    if _readable(flat) and bool(wrong.any()):
        raise ValueError(
            f"Target {int(flat[wrong][0])} is outside the vocabulary [0, {vocabulary}) and is not ignore_index={ignore_index}."
        )
    first = _rank(group) * logits.shape[-1]
    losses = _CrossEntropy.apply(rows, flat, ignored, wrong, group, first, vocabulary, label_smoothing, z_loss)
    if reduction == "none":
        return losses.reshape(targets.shape)
    total_loss = _fixed_sum(losses)
    return total_loss if reduction == "sum" else total_loss / (~ignored).sum().clamp(min=1)


def _local_logits(logits: DTensor, group: Any) -> tuple[Tensor, Any]:
    """What torch's ColwiseParallel leaves behind, if its output layout is Shard(-1)."""
    mesh, placements = logits.device_mesh, logits.placements
    if mesh.ndim != 1 or not placements[0].is_shard(logits.dim() - 1) or logits.shape[-1] % mesh.size():
        raise ValueError(
            "Logits that are a DTensor must be split evenly along the last dimension over a mesh of one dimension; got "
            f"placements {placements} of shape {tuple(logits.shape)} on a mesh of shape {tuple(mesh.shape)}."
        )
    return logits.to_local(), mesh if group is None else group


def _check_loss(logits: Tensor, targets: Tensor, reduction: str, smoothing: float, vocabulary: int, total: int) -> None:
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"Logits of shape {tuple(logits.shape)} need targets of shape {tuple(logits.shape[:-1])}, got {tuple(targets.shape)}."
        )
    if targets.is_floating_point() or not logits.is_floating_point():
        raise ValueError(f"Targets must be integers and logits floats, got {targets.dtype} and {logits.dtype}.")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {smoothing}.")
    if not 0 < vocabulary <= total:
        raise ValueError(f"vocabulary_size must be between 1 and the {total} logits of all ranks, got {vocabulary}.")


def _fixed_sum(x: Tensor) -> Tensor:
    """Sum of a vector. torch cuts a sum with ONE result by the number of threads, so two results are taken and added."""
    halves = nn.functional.pad(x, (0, x.numel() % 2)).view(2, -1).sum(dim=1)
    return halves[0] + halves[1]


def _row_sums(x: Tensor) -> Tensor:
    """[r, c] -> [r], the same bits for any number of threads."""
    return _fixed_sum(x[0])[None] if x.shape[0] == 1 else x.sum(dim=1)


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(CHUNK.get(logits.device.type, CHUNK["cpu"]) // max(logits.shape[1], 1), 1)
    return [slice(i, min(i + rows, logits.shape[0])) for i in range(0, logits.shape[0], rows)]


class _CrossEntropy(torch.autograd.Function):
    """logits [T, C] of columns first to first + C -> losses [T].

    With m the row's maximum and s = sum exp(x - m) over all ranks, loss = log s - (x_target - m). All terms are kept relative to m,
    so that logits of 1e4 lose no digits. Backward needs m and s and takes exp(x - m) again: two numbers a token are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignored: Tensor,
        wrong: Tensor,
        group: Any,
        first: int,
        vocabulary: int,
        smoothing: float,
        z_loss: float,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        real = min(max(vocabulary - first, 0), logits.shape[1])  # columns that are not padding
        index = targets - first
        mine = (index >= 0) & (index < real)
        index = index.masked_fill(~mine, 0)
        if real:
            maximum = logits[:, :real].amax(dim=1).to(wide)
        else:
            maximum = torch.full(logits.shape[:1], float("-inf"), dtype=wide, device=logits.device)
        _reduce_(maximum, group, dist.ReduceOp.MAX)
        # Sum of exponents, shifted target logit, and with smoothing the sum of shifted logits: one collective for all.
        parts = maximum.new_zeros(3 if smoothing else 2, maximum.numel())
        for rows in _chunks(logits[:, :real]):
            shifted = logits[rows, :real].to(wide, copy=True).sub_(maximum[rows, None])
            if real:
                target = shifted.gather(1, index[rows, None])[:, 0]
                parts[1, rows] = target.masked_fill(~mine[rows], 0.0)
            if smoothing:
                parts[2, rows] = _row_sums(shifted)
            parts[0, rows] = _row_sums(shifted.exp_())
        _reduce_(parts, group)
        log_sum = parts[0].log()
        loss = log_sum - parts[1]
        if smoothing:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - parts[2] / vocabulary)
        if z_loss:
            loss = loss + z_loss * (maximum + log_sum).square()
        ctx.save_for_backward(logits, index, mine, ignored, maximum, parts[0].clone())
        ctx.real, ctx.vocabulary, ctx.smoothing, ctx.z_loss = real, vocabulary, smoothing, z_loss
        return loss.masked_fill(wrong, float("nan")).masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """d loss / d x = softmax (1 + 2 z log-sum-exp) - (1 - smoothing) [x is the target] - smoothing / V."""
        logits, index, mine, ignored, maximum, total = ctx.saved_tensors
        real = ctx.real
        out = torch.zeros_like(logits) if real < logits.shape[1] else torch.empty_like(logits)
        factor = grad / total
        if ctx.z_loss:
            factor = factor * (1.0 + 2.0 * ctx.z_loss * (maximum + total.log()))
        at_target = (grad * (1.0 - ctx.smoothing)).masked_fill(~mine, 0.0)
        for rows in _chunks(logits[:, :real]):
            p = logits[rows, :real].to(maximum.dtype, copy=True).sub_(maximum[rows, None]).exp_()
            p.mul_(factor[rows, None])
            if ctx.smoothing:
                p.sub_((grad[rows] * (ctx.smoothing / ctx.vocabulary))[:, None])
            if real:
                where = index[rows, None]
                p.scatter_(1, where, p.gather(1, where) - at_target[rows, None])
            out[rows, :real] = p
        # Written, not multiplied by 0: a row that is ignored may hold NaN, as attention gives for a padding token.
        out.masked_fill_(ignored[:, None], 0.0)
        return out, None, None, None, None, None, None, None, None
