"""A spread parameter as one process would hold it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ottava.nn.initialize import WRAPPERS
from ottava.nn.strategy import REPLICATED, Layout
from ottava.overlap.collectives import all_gather
from ottava.quant.tensor import QuantizedTensor

__all__ = ["clean_name", "layout_of", "whole_state"]


def layout_of(module: nn.Module, name: str) -> tuple[Layout, int]:
    """(how tensor parallelism splits the module's parameter, over how many ranks).

    >>> layout_of(model.layers[0].layernorm_mlp, "fc2_weight")
    (Layout(dim=1), 2)
    """
    layout: Layout = getattr(module, "layouts", {}).get(name, REPLICATED)
    return layout, getattr(module, "tp_size", 1)


@torch.no_grad()
def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, by the name it has in one process. Every rank has to call it, and gets all.

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
        return parameter.full_tensor()
    if isinstance(parameter, QuantizedTensor):
        parameter = parameter.dequantize()
    if layout.dim is None or size == 1:
        return parameter
    return all_gather(parameter, module.tp_group, layout.dim)


def clean_name(name: str) -> str:
    """A parameter's name without what DDP, FSDP1 and torch.compile put into it."""
    parts = [part for part in name.split(".") if part and part not in WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)
