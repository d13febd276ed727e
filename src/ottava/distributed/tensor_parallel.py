"""Tensor and sequence parallelism: the strategies that modules hold (`ottava.nn.strategy` says what they mean).

layer = ottava.LayerNormLinear(1024, 4096, parallel_mode="column", sequence_parallel=True)
layer.set_device_mesh(meshes.tp, meshes.weight)      # parameters become DTensors; collectives run over the mesh
layer.set_tensor_parallel_group(group)               # or plain tensors and a process group (construct with tp_size)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ottava.distributed import collectives
from ottava.nn import strategy as nn_strategy
from ottava.nn.strategy import Layout

__all__ = ["Column", "Row"]


class _TensorParallel:
    """What column and row have in common: a group, and whether tokens are spread over it."""

    mode: str

    def __init__(self, group: Any, sequence_parallel: bool = False) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.size, self.rank = collectives.size_of(group), collectives.rank_of(group)

    def share_amax(self, amax: Tensor) -> Tensor:
        """MAX over the ranks, of each element."""
        return collectives.all_reduce_max(amax, self.group)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The ranks' tensors behind one another along `dim`."""
        return collectives.all_gather(x, self.group, dim)

    def reduce(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """Sum over ranks, plus bias: all tokens, or this rank's with sequence parallelism."""
        if self.sequence_parallel:
            return collectives.reduce_scatter(y, self.group, bias)
        return collectives.all_reduce(y, self.group, bias)

    def replicated(self, parameter: Tensor) -> Tensor:
        """`parameter`, whose gradient is summed over the ranks."""
        return _SummedGradient.apply(parameter, self.group)

    def __deepcopy__(self, memo: Any) -> _TensorParallel:
        return self  # groups are handles of this process

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, sequence_parallel={self.sequence_parallel})"


class Column(_TensorParallel):
    """y[M, N/tp] = x[M, K] @ w[N/tp, K].T: each rank computes some of the outputs."""

    mode = "column"


class Row(_TensorParallel):
    """y[M, N] = sum over ranks of x[M, K/tp] @ w[N, K/tp].T: each rank has some of the inputs."""

    mode = "row"


class _SummedGradient(torch.autograd.Function):
    """The identity; gradients are summed over the group."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collectives.all_reduce(grad.reshape(1, -1), ctx.group).view_as(grad), None


class _Backend:
    """See `ottava.nn.strategy.Backend`."""

    def strategy(self, mode: str, group: Any, sequence_parallel: bool) -> _TensorParallel | None:
        if collectives.size_of(group) == 1:
            return None
        return {"column": Column, "row": Row}[mode](group, sequence_parallel)

    def group_of(self, mesh: Any) -> Any:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise ValueError(
                f'set_device_mesh takes one dimension of a mesh, such as mesh["tp"], got {mesh!r}: '
                "ParallelPlan(tp=2).meshes().tp is one."
            )
        return mesh.get_group()

    def distribute(self, module: nn.Module, name: str, layout: Layout, mesh: DeviceMesh, already_cut: bool) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        parameter = getattr(module, name)
        if isinstance(parameter, DTensor):
            if parameter.device_mesh == mesh:
                return
            raise ValueError(
                f"{type(module).__name__}.{name} is sharded already, on {parameter.device_mesh}: call set_device_mesh before fully_shard."
            )
        size, rank = mesh.size(), mesh.get_local_rank()
        shape = list(parameter.shape)
        if already_cut and layout.dim is not None:
            shape[layout.dim] *= size
        whole = parameter.detach()
        own = whole if already_cut else layout.cut(whole, rank, size).contiguous()
        placement = Replicate() if layout.dim is None else Shard(layout.dim)
        strides = torch.empty(shape, device="meta").stride()
        spread = DTensor.from_local(own, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=strides)
        replacement = nn.Parameter(spread, requires_grad=parameter.requires_grad)
        for key, value in vars(parameter).items():  # what users hang on parameters
            setattr(replacement, key, value)
        setattr(module, name, replacement)


nn_strategy.install(_Backend())
