"""What `torch.export` keeps of a module: its forward.

A traced graph has the ops of forward, which have no derivatives of their own, and not the backward that the module has. Gradients would
end there, with a warning of torch that names an op, and whatever else is in the graph would go on training. So each output of a traced
module is marked: to go back through it is an error. The mark changes no number; it is gone after `run_decompositions`, and `torch.compile`
of what was exported does not see it: there torch's warning is all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.kernels.registry import define


def forward_only(outputs: Any, inputs: Sequence[Tensor | None]) -> Any:
    """outputs: a tensor or a tuple of them, made of `inputs` while `torch.export` traces."""
    given = [t for t in inputs if t is not None]
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        torch.ops.ottava.mark_forward_only_(y, given)
    return outputs


def _watch(y: Tensor, inputs: Sequence[Tensor]) -> None:
    """What the mark does where autograd records."""
    if torch_private.dispatch_modes():  # traced again, perhaps for somebody who will not go back
        return
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        if not y.requires_grad:  # with strict=True, the graph that was traced makes it under no_grad
            y.mul_(y.new_ones((), requires_grad=True))
        y.register_hook(_refuse)


def _mark(y: Tensor, inputs: Sequence[Tensor]) -> None:
    pass


def _refuse(grad: Tensor) -> None:
    raise RuntimeError(
        "torch.export keeps the forward of Ottava's modules, not their backward: what it traced cannot be trained. Train the module "
        "itself; stages of a pipeline are made of modules, torch.distributed.pipelining.PipelineStage(module, ...), not by tracing a model."
    )


define("mark_forward_only_", _mark, _mark, mutates=("y",), autograd=_watch)
