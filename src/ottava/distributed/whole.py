"""A spread parameter as one process would hold it.

[Note: order of rows] A gated MLP holds gate and up in one weight, [gate; up], and a tensor-parallel rank the parts [gate_t; up_t]. A
DTensor knows one order only, rank after rank: [gate_0; up_0; gate_1; up_1; ...]. So does a fused [q | k | v]. Training does not
mind; whoever wants the whole weight does. `show_whole` makes `full_tensor()` of such parameters give the order of one process, and
`whole_pieces` says where the rows of a shard lie in it, which is how weights are drawn and checkpoints written.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ottava import torch_private
from ottava.distributed.collectives import all_gather
from ottava.nn.initialize import WRAPPERS
from ottava.nn.strategy import REPLICATED, Layout, Piece

__all__ = ["clean_name", "layout_of", "show_whole", "whole_pieces", "whole_state"]


def layout_of(module: nn.Module, name: str) -> tuple[Layout, int]:
    """(how tensor parallelism splits the module's parameter, over how many ranks).

    >>> layout_of(model.layers[0].layernorm_mlp, "fc1_weight")
    (Layout(dim=0, parts=(256, 256)), 2)
    """
    layout: Layout = getattr(module, "layouts", {}).get(name, REPLICATED)
    return layout, getattr(module, "tp_size", 1)


def whole_pieces(parameter: DTensor, layout: Layout, size: int) -> list[Piece]:
    """The boxes of the whole parameter that this rank holds. One, unless rows are in another order ([Note: order of rows])."""
    shape, offset = torch_private.local_box(parameter)
    return layout.pieces(offset, shape, size)


@torch.no_grad()
def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole and in the order of one process, by the name it has there. Every rank has to call it, and gets all.

    Takes what `parallelize` returns, whatever the strategy.

        >>> torch.equal(whole_state(model)["head.weight"], single_process["head.weight"])
        True
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    gathered: Any = contextlib.nullcontext()
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        gathered = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    with gathered:
        return {
            clean_name(f"{path}.{name}"): _whole(module, name, parameter).detach().clone()
            for path, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        }


def _whole(module: nn.Module, name: str, parameter: Tensor) -> Tensor:
    layout, size = layout_of(module, name)
    if isinstance(parameter, DTensor):
        return layout.join(DTensor.full_tensor(parameter), size)
    if layout.dim is None or size == 1:
        return parameter
    return layout.join(all_gather(parameter, module.tp_group, layout.dim), size)


def clean_name(name: str) -> str:
    """A parameter's name without what DDP, FSDP1 and torch.compile put into it."""
    parts = [part for part in name.split(".") if part and part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def show_whole(model: nn.Module) -> None:
    """Makes `full_tensor()` of the model's parameters, and of its state dict's entries, give rows in the order of one process.

    Call it last: `fully_shard` makes new parameter objects. `parallelize` does.

        >>> show_whole(model)
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            layout, size = layout_of(module, name)
            if layout.parts and size > 1 and isinstance(parameter, DTensor):
                _reorder(parameter, layout, size)
                module.register_state_dict_post_hook(_reorder_state)


def _reorder_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in module._parameters:
        layout, size = layout_of(module, name)
        value = state.get(prefix + name)
        if layout.parts and size > 1 and isinstance(value, DTensor):
            _reorder(value, layout, size)


def _reorder(tensor: DTensor, layout: Layout, size: int) -> None:
    """Gives this one object a `full_tensor` of its own."""
    itself = weakref.ref(tensor)  # not the tensor: it would keep itself alive

    def full_tensor(*, grad_placements: Any = None) -> Tensor:
        held = itself()
        assert held is not None
        return layout.join(DTensor.full_tensor(held, grad_placements=grad_placements), size)

    tensor.full_tensor = full_tensor  # type: ignore[method-assign]
