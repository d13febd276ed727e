"""Every private torch API that Ottava uses, in one place.

`tests/test_torch_private.py` exercises each function here, so a torch release that changes one of them fails loudly there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch


def inside_backward() -> bool:
    """Whether this thread runs a backward pass now. A forward that runs inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1


# The `__torch_function__` of a tensor subclass whose ops all go to `__torch_dispatch__`.
DISABLED_TORCH_FUNCTION = torch._C._disabled_torch_function_impl


def local_tensor(parameter: Any) -> torch.Tensor:
    """What this rank holds of a DTensor: the object itself, where `to_local()` would make a view of it."""
    return parameter._local_tensor


def in_reentrant_checkpoint() -> bool:
    """Whether torch's reentrant checkpoint runs its function again now; its first run was under `no_grad`."""
    return type(torch._C._current_autograd_node()).__name__ == "CheckpointFunctionBackward"


def backward_id() -> int:
    """Identity of the backward pass that this thread runs now; -1 outside of one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` once, when the backward pass that this thread runs now has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a shape but no data, as under FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """targets[i].copy_(sources[i]) for all i, in few kernels."""
    torch._foreach_copy_(targets, sources)


def add_to_all(tensors: list[torch.Tensor], number: float) -> None:
    """tensors[i] += number for all i, in few kernels."""
    torch._foreach_add_(tensors, number)


def map_instances(kind: type, function: Callable, tree: Any) -> Any:
    """`tree` (nested tuples, lists, dicts) with `function` applied to every leaf that is a `kind`."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(kind, function, tree)


def generator_state(key: bytes) -> torch.Tensor:
    """State of a CPU generator whose 624 words come from `key`.

    `manual_seed` looks at 32 bits of its seed only: among the million slabs of a 500B model about a hundred pairs would share a
    seed, and so be equal. The layout (seed, left, seeded, next, then the words as uint64) is that of every saved RNG state.
    """
    state = torch.Generator().manual_seed(0).get_state()  # just seeded: the words are used from the first on
    if state.numel() != 5056:
        raise RuntimeError(f"torch {torch.__version__} keeps {state.numel()} bytes of generator state; 5056 are known.")
    words = torch.frombuffer(bytearray(hashlib.shake_128(key).digest(4 * 624)), dtype=torch.int32)
    state[24 : 24 + 8 * 624].view(torch.int64).copy_(words.to(torch.int64) & 0xFFFFFFFF)
    return state


def local_box(parameter: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of what this rank holds of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in parameter.placements:
        factor = getattr(placement, "split_factor", 1)  # _StridedShard: FSDP over a dimension that tp has split before
        if factor > 1 and parameter.shape[placement.dim] % factor:
            raise ValueError(
                f"Dimension {placement.dim} of shape {tuple(parameter.shape)} is sharded by FSDP over {factor} tensor-parallel parts "
                f"that are not equal, where torch's offsets are wrong: make {parameter.shape[placement.dim]} a multiple of {factor}."
            )
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(shape), tuple(offset)


def is_exporting() -> bool:
    """Whether `torch.export` traces now. Reads the flag itself: dynamo of torch 2.11 takes `torch.compiler.is_exporting()` for True."""
    return torch.compiler._is_exporting_flag


def saved_tensor_hooks_active() -> bool:
    """Whether somebody decides now how tensors are saved for backward: a checkpoint, `save_on_cpu`, ..."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def fsdp1_replicas(unit: Any) -> Any:
    """The group of a hybrid-sharded FSDP1 unit whose ranks hold equal shards; None where nothing is replicated."""
    return getattr(unit, "_inter_node_pg", None)
