"""What tensor parallelism asks of a module: groups and meshes in, strategies and local parameters out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.nn.options import OverlapOptions, ParallelOptions
from ottava.nn.strategy import ALONE, REPLICATED, Layout, Strategy, backend, local
from ottava.quant.delayed import Groups


class ParallelModule(nn.Module):
    """Base of the modules whose GEMMs may be spread over tensor-parallel ranks (`strategy.py`)."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layouts: dict[str, Layout] = {}
        """How tensor parallelism splits each parameter."""
        self.weight_mesh: Any = None
        """The ranks that one weight lies on and that share its scale (see `set_device_mesh`)."""
        self._strategies: tuple[Strategy, ...] = (ALONE,) * stages

    def describe(self, name: str) -> str:
        """How error messages call a parameter of this module."""
        return f"{type(self).__name__}.{name}"

    parallel: ParallelOptions
    overlap: OverlapOptions

    @property
    def modes(self) -> tuple[str | None, ...]:
        """ "column", "row" or None (replicated) for each stage."""
        return (self.parallel.mode,) * len(self._strategies)

    @property
    def overlap_names(self) -> tuple[str, ...]:
        """What TransformerEngine calls each stage where it configures overlap: "qkv", "proj", "fc1", "fc2"."""
        return (self.overlap.name or type(self).__name__,) * len(self._strategies)

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks that the parameters are cut for."""
        return self.parallel.size

    @property
    def tp_group(self) -> Any:
        """Their process group; None for one rank."""
        return self.parallel.group

    @property
    def tp_rank(self) -> int:
        """This process's place among them."""
        return 0 if self.parallel.group is None else self.parallel.group.rank()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Runs the collectives over `tp_group`. The module must have been constructed with tp_size=tp_group.size()."""
        size = 1 if tp_group is None else tp_group.size()
        if size != self.parallel.size and any(self.modes):
            raise ValueError(
                f"{type(self).__name__} was constructed with tp_size={self.parallel.size}, but the group has {size} ranks: construct it "
                f"with tp_size={size}, or give set_device_mesh a mesh, which cuts whole parameters."
            )
        self.parallel.group = tp_group
        if size > 1:
            self.join_ranks()
        spread = self.parallel.sequence_parallel
        self._strategies = tuple(
            ALONE if mode is None else backend().strategy(mode, tp_group, spread, self.overlap, name)
            for mode, name in zip(self.modes, self.overlap_names, strict=True)
        )
        self._share_statistics(None)

    def _share_statistics(self, tp_mesh: Any) -> None:
        """Delayed scaling learns which ranks run this module: those of the mesh that `tp_mesh` or `weight_mesh` is a dimension of, or, of
        a tensor-parallel group alone, at least its."""
        delayed, mesh = getattr(self, "delayed", None), tp_mesh if tp_mesh is not None else self.weight_mesh
        if delayed is None:
            return
        if mesh is not None:
            delayed.own_groups = Groups(torch_private.root_mesh(mesh).get_all_groups())
        elif self.parallel.group is not None:
            delayed.own_groups = Groups((self.parallel.group,))
            delayed.own_groups.partial = True

    def set_device_mesh(self, tp_mesh: Any = None, weight_mesh: Any = None) -> None:
        """Spreads the parameters over meshes, before `fully_shard` or a checkpoint looks at them.

        tp_mesh: the tensor-parallel dimension of a device mesh. Parameters become DTensors on it: cut as `parallel_mode` says, or
        whole on every rank. weight_mesh: the ranks that hold parts of one weight and share its scale, dp_shard x tp; only needed
        where FP8 copies of sharded weights are made outside of a forward pass.

            >>> layer = ottava.Linear(1024, 4096, parallel_mode="column")
            >>> layer.set_device_mesh(meshes.tp, meshes.weight)
        """
        self.weight_mesh = weight_mesh if weight_mesh is not None else self.weight_mesh
        if tp_mesh is None:
            self._share_statistics(None)
            return
        group, size = backend().group_of(tp_mesh), tp_mesh.size()
        if self.parallel.sequence_parallel and size > 1 and not any(self.modes):
            raise ValueError(
                f"{type(self).__name__} has sequence_parallel=True but is not split over ranks, so it would mix up their tokens: "
                "construct it with parallel_mode (or set_parallel_mode=True), or with sequence_parallel=False."
            )
        already_cut = self.parallel.size == size
        self.parallel.group = group
        if not already_cut and self.parallel.size != 1:
            raise ValueError(
                f"{type(self).__name__} was constructed with tp_size={self.parallel.size}, but the mesh has {size} ranks: "
                f"use tp_size={size}."
            )
        for name, parameter in list(self.named_parameters(recurse=False)):
            if not already_cut:
                self.layouts[name].check(self.describe(name), tuple(parameter.shape), size)
            backend().distribute(self, name, self.layouts[name], tp_mesh, already_cut)
        if not already_cut:
            self.parallel.size = size
            self.divide_features(size)
        self.set_tensor_parallel_group(group)
        self._share_statistics(tp_mesh)

    def join_ranks(self) -> None:
        """Weights that ranks have made for themselves become parts of one."""

    def divide_features(self, size: int) -> None:
        """Adapts the sizes that the module checks its input against, after its parameters have been cut for `size` ranks."""

    def strategy(self, index: int = 0) -> Strategy:
        """The strategy of stage `index`."""
        strategy = self._strategies[index]
        if strategy.size < self.parallel.size and self.modes[index] is not None and self.parallel.group is None:
            raise ValueError(
                f"{type(self).__name__} was constructed with tp_size={self.parallel.size} but has no group to communicate over: call "
                "set_tensor_parallel_group(group) or set_device_mesh(tp_mesh) first."
            )
        return strategy

    def parameter(self, name: str) -> Tensor | None:
        """What this rank multiplies with, or adds; None if there is no such parameter."""
        value = self._parameters.get(name)  # past `__getattr__`, which is Python
        if type(value) is nn.Parameter:
            return value
        value = getattr(self, name)
        return None if value is None else local(value)

    def input_parameter(self, name: str, index: int = 0) -> Tensor | None:
        """`parameter` that acts on the input of stage `index`, as a norm's does."""
        plain = self._parameters.get(name)
        if type(plain) is nn.Parameter and self._strategies[index] is ALONE:
            return plain
        value = self.parameter(name)
        return None if value is None else self.strategy(index).input_parameter(value)

    def output_parameter(self, name: str, index: int = 0) -> Tensor | None:
        """`parameter` that acts on the output of stage `index`, as a bias does."""
        plain = self._parameters.get(name)
        if type(plain) is nn.Parameter and self._strategies[index] is ALONE:
            return plain
        value = self.parameter(name)
        return None if value is None else self.strategy(index).output_parameter(value)

    def output_shape(self, shape: torch.Size, features: int, index: int = 0) -> tuple[int, ...]:
        """Shape of the output for an input of `shape`: sequence parallelism gathers or scatters the first dimension."""
        if len(shape) == 1 or self._strategies[index] is ALONE:
            return (*shape[:-1], features)
        return (self.strategy(index).output_tokens(shape[0]), *shape[1:-1], features)


def linear_layouts(mode: str | None) -> tuple[Layout, Layout]:
    """Layouts of a weight [out, in] and of its bias [out]."""
    if mode == "column":
        return Layout(0), Layout(0)
    return (Layout(1) if mode == "row" else REPLICATED), REPLICATED


def join_meshes(module: Any, tp_group: Any, tp_mesh: Any, weight_mesh: Any) -> None:
    """What constructors do with the groups and meshes they are given."""
    if tp_group is not None:
        module.set_tensor_parallel_group(tp_group)
    if tp_mesh is not None or weight_mesh is not None:
        module.set_device_mesh(tp_mesh, weight_mesh)
