"""`ParallelPlan`: how many ranks share the data, the weights and each layer, and the device mesh that follows from it.

    >>> from ottava.distributed import ParallelPlan
    >>> ParallelPlan(dp_replicate=2, tp=2).resolve(world_size=16)
    ParallelPlan(dp_replicate=2, dp_shard=4, tp=2, ...)

[Note: the three dimensions]
Rank r sits at (dp_replicate, dp_shard, tp) of a row-major grid, so tp ranks are neighbours and share the fastest links.
    dp_replicate   ranks that hold equal weights and see different data
    dp_shard       ranks that hold different rows of every weight and see different data
    tp             ranks that hold different parts of every layer and see the same data
One weight lies on dp_shard x tp ranks. That group, the weight group, shares the weight's scales; replicas compute the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ottava.notices import did_you_mean
from ottava.overlap.schedule import METHODS, TRANSPORTS, check_choice

MESH_DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
"""Names of the mesh dimensions, slowest first."""

STRATEGIES = ("fsdp2", "fsdp1", "ddp", "none")
RECOMPUTE = ("none", "selective", "full")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class UnknownPlanField(ValueError, TypeError):
    """A keyword that a plan does not have. Both a ValueError (ours) and a TypeError (what dataclasses raise).

    >>> ParallelPlan(dp_shrad=2)
    Traceback (most recent call last):
    ottava.distributed.plan.UnknownPlanField: ParallelPlan has no field 'dp_shrad'. Did you mean 'dp_shard'? ...
    """


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is spread over ranks. Plain data: it is checked when it is made and never changes.

    >>> plan = ParallelPlan(dp_shard=-1, tp=2)
    >>> plan.resolve(world_size=8).dp_shard
    4
    >>> meshes = plan.meshes()  # in every rank, after torch.distributed.init_process_group
    >>> meshes.tp.size()
    2
    """

    dp_replicate: int = 1
    """Copies of the (sharded) model. More than 1 with dp_shard more than 1 is HSDP."""

    dp_shard: int = -1
    """Ranks that one copy's weights are sharded over. -1: the ranks that are left (as replicas, under "ddp", which shards nothing)."""

    tp: int = 1
    """Ranks that split each layer (tensor parallelism)."""

    strategy: str = "fsdp2"
    """Who reduces gradients and shards weights: "fsdp2", "fsdp1", "ddp", or "none": the caller wraps the model."""

    recompute: str = "none"
    """Activations computed again in backward: "none", "selective" (all but the costly products), "full" (whole blocks)."""

    overlap: str = "none"
    """How tensor-parallel communication hides under products: "none", "bulk", "ring", "pipeline", or "auto": the estimate chooses.
    Needs sequence_parallel; values stay the same."""

    overlap_transport: str = "auto"
    """What carries it: "point_to_point" (the process group), "symmetric_memory" (CUDA), or "auto": the best there is."""

    overlap_minimum_tokens: int | None = None
    """Tokens of all tp ranks below which no product is cut into chunks. None: an estimate decides; 0: all are."""

    param_dtype: torch.dtype = torch.bfloat16
    """Type in which parameters that are not quantized are gathered and used."""

    reduce_dtype: torch.dtype = torch.float32
    """Type in which gradients are summed over data-parallel ranks."""

    reshard_after_forward: bool = True
    """Whether gathered weights are freed after forward and gathered again in backward: less memory, more communication."""

    prefetch: int = 1
    """Blocks whose weights are gathered ahead of the one that runs."""

    cpu_offload: bool = False
    """Whether the sharded parameters, their gradients and the optimizer's state lie in host memory between uses."""

    sequence_parallel: bool = False
    """Whether tp ranks also split the tokens between the layers: less memory for the same bytes on the wire. Needs tp > 1."""

    def __new__(cls, *args: Any, **kwargs: Any) -> ParallelPlan:
        """Refuses unknown keywords with the nearest name, which a dataclass by itself would not suggest."""
        names = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in names:
                raise UnknownPlanField(
                    f"ParallelPlan has no field {name!r}.{did_you_mean(name, names)} Its fields are: {', '.join(names)}."
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_sizes()
        check_choice("ParallelPlan", "strategy", self.strategy, STRATEGIES)
        check_choice("ParallelPlan", "recompute", self.recompute, RECOMPUTE)
        check_choice("ParallelPlan", "overlap", self.overlap, METHODS)
        check_choice("ParallelPlan", "overlap_transport", self.overlap_transport, TRANSPORTS)
        tokens = self.overlap_minimum_tokens
        if tokens is not None and (not _is_count(tokens) or tokens < 0):
            raise ValueError(
                f"ParallelPlan: overlap_minimum_tokens must be a number of tokens, 0 or more, or None, got {tokens!r}."
            )
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"ParallelPlan: {name} must be one of {', '.join(map(str, _DTYPES))}, got {getattr(self, name)!r}."
                )
        for name in ("reshard_after_forward", "cpu_offload", "sequence_parallel"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"ParallelPlan: {name} must be True or False, got {getattr(self, name)!r}.")
        if not _is_count(self.prefetch) or self.prefetch < 0:
            raise ValueError(
                f"ParallelPlan: prefetch must be a whole number of blocks, 0 or more, got {self.prefetch!r}."
            )

    def _check_sizes(self) -> None:
        for name in MESH_DIMENSIONS:
            size = getattr(self, name)
            if not _is_count(size) or (size < 1 and size != -1):
                raise ValueError(
                    f"ParallelPlan: {name} must be a number of ranks, 1 or more, or -1 for the ranks that are left, got {size!r}."
                )
        open_dimensions = [name for name in MESH_DIMENSIONS if getattr(self, name) == -1]
        if len(open_dimensions) > 1 and not (self.strategy == "ddp" and self.tp != -1):
            raise ValueError(
                f"ParallelPlan: only one dimension can take the ranks that are left (-1), got {' and '.join(open_dimensions)}: "
                "give a number for all but one of them."
            )
        if self.strategy == "ddp" and self.dp_shard not in (1, -1):
            raise ValueError(
                f'ParallelPlan: strategy "ddp" shards nothing, got dp_shard={self.dp_shard}: '
                f'write dp_replicate={self.dp_shard}, dp_shard=1, or take strategy="fsdp2".'
            )

    @property
    def is_resolved(self) -> bool:
        """Whether every dimension has a number.

        >>> ParallelPlan(dp_shard=4).is_resolved
        True
        """
        return -1 not in self.shape

    @property
    def shape(self) -> tuple[int, int, int]:
        """(dp_replicate, dp_shard, tp), the shape of the mesh.

        >>> ParallelPlan(2, 4, 1).shape
        (2, 4, 1)
        """
        return (self.dp_replicate, self.dp_shard, self.tp)

    def resolve(self, world_size: int) -> ParallelPlan:
        """This plan with a number in place of -1, for `world_size` ranks.

        >>> ParallelPlan(tp=2).resolve(6).shape
        (1, 3, 2)
        >>> ParallelPlan(tp=2, strategy="ddp").resolve(6).shape
        (3, 1, 2)
        """
        if not _is_count(world_size) or world_size < 1:
            raise ValueError(f"world_size must be a number of ranks, 1 or more, got {world_size!r}.")
        sizes = dict(zip(MESH_DIMENSIONS, self.shape))
        if self.strategy == "ddp" and self.dp_shard == -1:
            # Nothing is sharded, so the ranks that are left are replicas, unless the plan has said how many there are.
            sizes["dp_shard"] = 1
            sizes["dp_replicate"] = -1 if self.dp_replicate == 1 else self.dp_replicate
        given = {name: size for name, size in sizes.items() if size != -1}
        product = math.prod(given.values())
        left_open = [name for name in sizes if name not in given]
        if world_size % product or (not left_open and world_size != product):
            raise ValueError(_wrong_world_size(world_size, given, product, left_open))
        left = world_size // product
        replicate, shard, tp = (left if size == -1 else size for size in sizes.values())
        return replace(self, dp_replicate=replicate, dp_shard=shard, tp=tp)

    def mesh(self, device_type: str | None = None) -> DeviceMesh:
        """The device mesh (dp_replicate, dp_shard, tp) over all ranks. Every rank has to call it.

        device_type: "cuda" where there is a GPU and "cpu" elsewhere, if not given.
        Give `device_id` to `init_process_group` on a GPU: torch then splits one communicator, in place of making one a subgroup.

        >>> ParallelPlan(tp=2).mesh().mesh_dim_names
        ('dp_replicate', 'dp_shard', 'tp')
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "A mesh needs a process group, and there is none: call torch.distributed.init_process_group first "
                "(one process alone is a group of world_size=1)."
            )
        plan = self.resolve(dist.get_world_size())
        return init_device_mesh(device_type or _default_device_type(), plan.shape, mesh_dim_names=MESH_DIMENSIONS)

    def meshes(self, device_type: str | None = None) -> Meshes:
        """`Meshes` of this plan: the mesh and its named parts. Every rank has to call it.

        >>> ParallelPlan(dp_replicate=2, dp_shard=2, tp=2).meshes().weight.size()  # 8 ranks
        4
        """
        return Meshes(self.mesh(device_type))

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON and TOML. `from_dict` reads it back.

        >>> ParallelPlan().as_dict()["reduce_dtype"]
        'float32'
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ParallelPlan:
        """The plan that `as_dict` wrote; dtypes may be names.

        >>> ParallelPlan.from_dict({"tp": 2, "reduce_dtype": "bfloat16"}).reduce_dtype
        torch.bfloat16
        """
        names = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
        values = dict(values)
        for key in ("param_dtype", "reduce_dtype"):
            value = values.get(key)
            if isinstance(value, str):
                if value not in names:
                    raise ValueError(
                        f"ParallelPlan: {key} must be one of {', '.join(names)}, got {value!r}.{did_you_mean(value, names)}"
                    )
                values[key] = names[value]
        return cls(**values)


class Meshes:
    """A plan's mesh and the parts of it that the code asks for by name. Made once: every part has its process group.

    >>> meshes = ParallelPlan(dp_replicate=2, dp_shard=2, tp=2).meshes()
    >>> fully_shard(block, mesh=meshes.dp)
    >>> linear.set_device_mesh(meshes.tp, meshes.weight)
    """

    def __init__(self, root: DeviceMesh) -> None:
        if root.mesh_dim_names != MESH_DIMENSIONS:
            raise ValueError(
                f"Meshes needs a mesh with the dimensions {MESH_DIMENSIONS}, got {root.mesh_dim_names}: "
                "make it with ParallelPlan(...).mesh()."
            )
        self.root = root
        """The whole mesh: (dp_replicate, dp_shard, tp)."""
        self.replicate = root["dp_replicate"]
        """Ranks with equal weights: the group of DDP."""
        self.shard = root["dp_shard"]
        """Ranks with different rows of each weight."""
        self.tp = root["tp"]
        """Ranks with different parts of each layer."""
        # A 1-D mesh means "shard over it" to fully_shard, so replicas need the 2-D form even when dp_shard is 1.
        self.dp = root["dp_replicate", "dp_shard"] if self.replicate.size() > 1 else self.shard
        """What `fully_shard` takes: (dp_shard) alone, or (dp_replicate, dp_shard) where there are replicas."""
        self.weight = _weight_mesh(root, self.shard, self.tp)
        """The ranks that one weight lies on and that share its scales: dp_shard x tp in one dimension. Never dp_replicate."""

    @property
    def dp_size(self) -> int:
        """Ranks that see different data.

        >>> ParallelPlan(2, 2, 2).meshes().dp_size
        4
        """
        return self.replicate.size() * self.shard.size()

    @property
    def dp_rank(self) -> int:
        """Which of the `dp_size` parts of the data this rank sees; equal on all ranks of a tp group.

        >>> part = dataset[meshes.dp_rank :: meshes.dp_size]
        """
        return self.replicate.get_local_rank() * self.shard.size() + self.shard.get_local_rank()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in zip(MESH_DIMENSIONS, self.root.shape))
        return f"Meshes({sizes}, device_type={self.root.device_type!r})"


def _weight_mesh(root: DeviceMesh, shard: DeviceMesh, tp: DeviceMesh) -> DeviceMesh:
    """dp_shard x tp as one dimension. Ranks are row-major, so this is the same grid with its last two dimensions joined."""
    if tp.size() == 1:
        return shard
    if shard.size() == 1:
        return tp
    replicas, weight = root.shape[0], shard.size() * tp.size()
    if replicas == 1:  # the whole world: torch takes the group that exists
        return init_device_mesh(root.device_type, (weight,), mesh_dim_names=("weight",))
    joined = init_device_mesh(root.device_type, (replicas, weight), mesh_dim_names=("dp_replicate", "weight"))
    return joined["weight"]


def _default_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong_world_size(world_size: int, given: dict[str, int], product: int, left_open: list[str]) -> str:
    spelled = " x ".join(f"{name}={size}" for name, size in given.items())
    if left_open:
        return (
            f"ParallelPlan: {world_size} ranks cannot be divided by {spelled} = {product}, so no whole number is left for "
            f"{left_open[0]}: start a multiple of {product} ranks, or choose sizes that divide {world_size}."
        )
    return (
        f"ParallelPlan: {spelled} = {product} ranks, but there are {world_size}: start {product} ranks, "
        "or put -1 where the ranks that are left should go."
    )
