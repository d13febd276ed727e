"""Every private torch API that Ottava uses, in one place.

`tests/test_torch_private.py` exercises each function here, so a torch release that changes one of them fails loudly there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def inside_backward() -> bool:
    """Whether this thread runs a backward pass now. A forward that runs inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1


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
