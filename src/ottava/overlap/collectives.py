"""The collectives of tensor parallelism, on plain tensors. Every sum is taken in float32 and in a fixed order of ranks.

On CPUs, that is. With NCCL the sums are NCCL's own, in its order and in the type of what is summed: there speed counts.

So the result does not depend on the backend's algorithm, is the same on every rank, and equals bit for bit what an overlapped
schedule computes; and, for float32 on the CPU, what one process computes (`kernels/fixed_order.py`, [Note: sums by halves]). The
bytes on the wire are those of the ordinary collectives: a reduce-scatter is an exchange of parts, which are then summed here; an
all-reduce is that and an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ottava import torch_private
from ottava.overlap import meter
from ottava.overlap.sums import sum_by_halves
from ottava.overlap.waits import SHARDS, TENSOR, waiting

# torch 2.13 has new names for the collectives on one tensor and warns about the old ones, which are all that 2.11 has.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def size_of(group: Any) -> int:
    """Ranks in the group; None is one rank."""
    return 1 if group is None else dist.get_world_size(group)


def rank_of(group: Any) -> int:
    """This process's place in the group."""
    return 0 if group is None else dist.get_rank(group)


def process_group(group: Any) -> Any:
    """The process group of a mesh dimension; a process group and None stay."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(
            f'group must be one dimension of the mesh, such as mesh["tp"]; got a mesh of {group.mesh_dim_names or group.ndim}.'
        )
    return group.get_group()


def readable(x: Tensor) -> bool:
    """Whether looking at values is possible and costs no wait for a GPU."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not torch_private.is_fake(x)


def all_gather(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    """The ranks' x [..., n, ...] concatenated along `dim`: [..., n * size, ...]. Any dtype."""
    return x if size_of(group) == 1 else begin_all_gather(x, group, dim)()


def begin_all_gather(x: Tensor, group: Any, dim: int = 0) -> Callable[[], Tensor]:
    """`all_gather` that travels until the function returned is called."""
    part, size = x.contiguous(), size_of(group)
    whole = part.new_empty((size, *part.shape))
    meter.collective("all_gather", part.nbytes * (size - 1))
    # Bytes: gloo does not know every dtype.
    work = _ALL_GATHER(_bytes(whole), _bytes(part), group=group, async_op=True)

    def finish() -> Tensor:
        with waiting():
            work.wait()
        return whole.flatten(0, 1) if dim == 0 else whole.movedim(0, dim).flatten(dim, dim + 1)

    return finish


def all_reduce_max(x: Tensor, group: Any) -> Tensor:
    """MAX over ranks, element by element; a new tensor."""
    if size_of(group) == 1:
        return x
    x = x.clone()
    with waiting():
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x


def reduce_scatter(y: Tensor, group: Any, bias: Tensor | None = None, kind: str = TENSOR) -> Tensor:
    """This rank's rows [M/size, N] of the sum over ranks of y [M, N], plus bias [N]; rounded once to y's dtype.

    kind: who waits for it (`overlap/waits.py`).
    """
    return begin_reduce_scatter(y, group, bias, kind)()


def begin_reduce_scatter(y: Tensor, group: Any, bias: Tensor | None = None, kind: str = TENSOR) -> Callable[[], Tensor]:
    """`reduce_scatter` that travels until the function returned is called."""
    size = size_of(group)
    if y.shape[0] % size:
        raise ValueError(
            f"Sequence parallelism splits {y.shape[0]} tokens over {size} ranks, which do not divide them: "
            f"pad the sequence to {-(-y.shape[0] // size) * size} tokens."
        )
    y = y.contiguous()
    if kind == TENSOR:
        meter.collective("reduce_scatter", y.nbytes * (size - 1) / size)
    native = native_sums(y, group)
    received = y.new_empty(y.shape[0] // size if native else y.shape[0], *y.shape[1:])
    if native:
        work = _REDUCE_SCATTER(received, y, group=group, async_op=True)
    else:
        work = dist.all_to_all_single(_bytes(received), _bytes(y), group=group, async_op=True)

    def finish() -> Tensor:
        with waiting(kind):
            work.wait()
        return _plus(received, bias) if native else sum_by_halves(received.unflatten(0, (size, -1)), bias)

    return finish


def all_reduce(y: Tensor, group: Any, bias: Tensor | None = None) -> Tensor:
    """The sum over ranks of y [M, N], plus bias [N]; rounded once to y's dtype and equal on all ranks."""
    size = size_of(group)
    if size == 1:
        return _plus(y, bias)
    if native_sums(y, group):
        total = y.clone(memory_format=torch.contiguous_format)
        meter.collective("all_reduce", 2 * y.nbytes * (size - 1) / size)
        with waiting():
            dist.all_reduce(total, group=group)
        return _plus(total, bias)
    if y.shape[0] % size == 0:
        return all_gather(reduce_scatter(y, group, bias), group)
    return sum_by_halves(all_gather(y.unsqueeze(0), group), bias)  # few or odd rows: everyone sums everything


def native_sums(y: Tensor, group: Any) -> bool:
    """Whether the backend's own sums are taken: NCCL's."""
    return y.is_cuda and "nccl" in dist.get_backend(group)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else (y.float() + bias.float()).to(y.dtype)


class FixedOrderReduceScatter:
    """FSDP2's reduce-scatter of gradients (`FSDPModule.set_custom_reduce_scatter`), as a sum by halves of the ranks.

    What `shard_model` uses on CPUs, where being comparable to one process is worth more than gloo's own order; NCCL keeps its own.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """output [n] = sum or mean over ranks of this rank's part of their inputs [n * size]."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"Gradients are summed or averaged, got {op}.")
        total = reduce_scatter(input_tensor.view(-1, 1), group, kind=SHARDS).view_as(output_tensor)
        output_tensor.copy_(total / size_of(group) if op == dist.ReduceOp.AVG else total)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
