"""Where the memory of a parameter lies in the parameter that one process would hold.

FSDP2, HSDP, x TP     a DTensor says it, in the order of the ranks; `Layout` knows the order of one process
DDP, x TP             a plain tensor: the whole, or the part that the module's `layouts` and `tp_rank` say
FSDP1, x TP           a stretch of the flattened tensor: up to three boxes of a matrix
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ottava import torch_private
from ottava.checkpoint.boxes import Box, Index, Part
from ottava.checkpoint.stored_weight import stored_entry
from ottava.distributed.sharded_weight import ShardedWeight
from ottava.distributed.vocabulary import VocabParallelEmbedding, VocabParallelHead
from ottava.distributed.whole import layout_of
from ottava.nn.initialize import WRAPPERS
from ottava.nn.strategy import Layout
from ottava.quant.tensor import QuantizedTensor


@dataclass(frozen=True)
class Placed:
    """A parameter, and where this rank's memory of it lies."""

    name: str
    """As in one process."""
    parameter: nn.Parameter
    local: Tensor
    """What this rank holds: a plain tensor, or a QuantizedTensor. Of FSDP1 a flat one."""
    shape: Index
    """Of the whole parameter."""
    boxes: tuple[Box, ...]
    """Of `local`, in the order in which ranks hold the parameter: several if it is flat."""
    layout: Layout
    size: int
    """Tensor-parallel ranks."""
    tp_rank: int

    def part(self, tensor: Tensor) -> Part:
        """`tensor` has the place of the parameter."""
        views, at = [], 0
        flat = len(self.boxes) != 1 or tuple(tensor.shape) != self.boxes[0][1]
        for offset, shape in self.boxes:
            count = math.prod(shape)
            box = tensor[at : at + count].view(shape) if flat else tensor
            views += [(p.start, p.of(box)) for p in self.layout.pieces(offset, shape, self.size)]
            at += count
        return Part(self.shape, tensor.dtype, tuple(views))

    def entry(self) -> Any:
        """For the state's "model"."""
        if isinstance(self.local, QuantizedTensor):
            return stored_entry(self.name, self.local, self.shape, self.layout, self.size, self.tp_rank)
        return self.part(self.local)

    def state_entry(self, key: str, value: Any) -> Any:
        """For a value of the optimizer's state of this parameter."""
        if not isinstance(value, Tensor):
            return value
        local = torch_private.local_tensor(value) if isinstance(value, DTensor) else value
        if local.shape == self.local.shape:
            return self.part(local)
        if local.numel() != 1 or (key != "step" and self.local.numel() != math.prod(self.shape)):
            raise ValueError(
                f"The optimizer's {key!r} of {self.name} has shape {tuple(local.shape)} where the parameter has "
                f"{tuple(self.local.shape)} of {self.shape}: no other mesh could load it. Use an optimizer whose state is shaped like "
                "its parameters (FusedAdam with float32 or bfloat16 moments)."
            )
        # FSDP1 makes no steps with a parameter of which a rank holds nothing, so such a rank's count is not to be believed.
        counts = self.local.numel() > 0 or math.prod(self.shape) == 0
        return Part(tuple(local.shape), local.dtype, (((0,) * local.dim(), local),), writes=counts)


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of all modules, without what wrappers put into names."""
    root = model.module if isinstance(model, DistributedDataParallel) else model
    for path, module in root.named_modules():
        yield ".".join(part for part in path.split(".") if part not in WRAPPERS), module


def _fsdp1_units(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, FullyShardedDataParallel))


def placed_parameters(model: nn.Module) -> Iterator[Placed]:
    """Every parameter once, under the first of its names."""
    flat = {key: found for unit in _fsdp1_units(model) for key, found in _stretches(unit)}
    seen: set[int] = set()
    for path, module in modules_of(model):
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}".strip(".")
            if isinstance(parameter, FlatParameter):
                raise ValueError(
                    f"{path or type(module).__name__} was wrapped by FullyShardedDataParallel(use_orig_params=False), which hides the "
                    "names of parameters: use use_orig_params=True (shard_model_fsdp1 does)."
                )
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield _placed(name, module, attribute, parameter, flat.get((id(module), attribute)))


def _stretches(unit: nn.Module) -> Iterator[tuple[tuple[int, str], tuple[Tensor, Index, int]]]:
    """((module's id, parameter's name), (this rank's stretch of it, its shape, where the stretch begins)) of an FSDP1 unit."""
    for module, attribute, shape, local, start in torch_private.fsdp1_stretches(unit):
        yield (id(module), attribute), (local, shape, start)


def _placed(
    name: str,
    module: nn.Module,
    attribute: str,
    parameter: nn.Parameter,
    stretch: tuple[Tensor, Index, int] | None,
) -> Placed:
    layout, size = layout_of(module, attribute)
    tp_rank = getattr(module, "tp_rank", 0) if size > 1 else 0
    if isinstance(parameter, DTensor):
        local = torch_private.local_tensor(parameter)
        shape, offset = torch_private.local_box(parameter)
        whole: Index = tuple(parameter.shape)
        boxes: tuple[Box, ...] = ((offset, shape),)
    else:
        local, held, first = stretch or (parameter.detach(), tuple(parameter.shape), 0)
        whole, start = _tensor_parallel_place(module, layout, size, tp_rank, held)
        stop = first + local.numel()
        cut = flat_boxes(held, first, stop) if stretch else [((0,) * len(held), held)]
        boxes = tuple((tuple(a + b for a, b in zip(start, offset)), extent) for offset, extent in cut)
    if isinstance(local, ShardedWeight):
        local = local.master
    return Placed(name, parameter, local, whole, boxes, layout, size, tp_rank)


def _tensor_parallel_place(
    module: nn.Module, layout: Layout, size: int, tp_rank: int, held: Index
) -> tuple[Index, Index]:
    """(shape of the whole, where a plain tensor-parallel part of shape `held` begins)."""
    whole, start = list(held), [0] * len(held)
    if isinstance(module, VocabParallelEmbedding | VocabParallelHead):
        if held[0] != module.padded_embeddings:
            whole[0], start[0] = module.padded_embeddings, module.first_row
    elif layout.dim is not None and size > 1:
        start[layout.dim] = tp_rank * held[layout.dim]
        whole[layout.dim] *= size
    return tuple(whole), tuple(start)


def flat_boxes(shape: Index, start: int, stop: int) -> list[Box]:
    """Elements start to stop of the flattened tensor, as boxes of the tensor, in order.

    >>> flat_boxes((4, 3), 2, 10)
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if len(shape) < 2:
        return [((start,) * len(shape), (stop - start,) * len(shape))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all in one row
        return [((last, *o), (1, *s)) for o, s in flat_boxes(shape[1:], start - last * row, stop - last * row)]
    head = [((first - 1, *o), (1, *s)) for o, s in flat_boxes(shape[1:], start - (first - 1) * row, row)]
    tail = [((last, *o), (1, *s)) for o, s in flat_boxes(shape[1:], 0, stop - last * row)]
    middle = [((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))] if first < last else []
    return (head if start % row else []) + middle + tail
