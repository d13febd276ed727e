"""A spread parameter as one process would hold it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ottava.nn.initialize import WRAPPERS
from ottava.nn.strategy import REPLICATED, Layout
from ottava.overlap.collectives import all_gather
from ottava.quant.tensor import QuantizedTensor

__all__ = ["layout_of", "modules_of", "whole_state"]


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
            f"{path}.{name}".strip("."): _whole(module, name, parameter).detach().clone()
            for path, module in modules_of(model)
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


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of all modules, without what DDP, FSDP1, torch.compile and checkpoint wrappers put into names.

    >>> [name for name, _ in modules_of(DistributedDataParallel(torch.compile(nn.Sequential(nn.ReLU()))))]
    ['', '', '0']
    """
    found = list(model.named_modules())
    wrappers = {path for path, module in found if isinstance(module, DistributedDataParallel)}
    for path, module in found:
        if path not in wrappers:
            parts = path.split(".")
            of_ddp = {i for i, part in enumerate(parts) if part == "module" and ".".join(parts[:i]) in wrappers}
            yield ".".join(p for i, p in enumerate(parts) if p not in WRAPPERS and i not in of_ddp), module
