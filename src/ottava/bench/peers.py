"""What benchmarks of layers and of steps do to the plain model to make a peer of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

FORWARD_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Of attention, fastest on an H200 first: peers get the best of torch's."""


class Unavailable(RuntimeError):
    """A contender that cannot run here, with the reason."""


def best_attention(device: torch.device) -> AbstractContextManager[Any]:
    """In it torch's attention takes the fastest kernel that fits."""
    return sdpa_kernel(FORWARD_KERNELS, set_priority=True) if device.type == "cuda" else nullcontext()


def compile_blocks(blocks: nn.ModuleList) -> None:
    """Each block in its place by a compiled one. FSDP's hooks then stand around it, not inside it."""
    for i in range(len(blocks)):
        compiled: Any = torch.compile(blocks[i])
        blocks[i] = compiled


def convert_to_float8(model: nn.Module, device: torch.device, gather: bool = False) -> Callable[[], Any]:
    """torchao's tensorwise dynamic float8 in the layers, not in the head. Returns what has to run after the optimizer.

    gather: FSDP gathers weights in float8.
    """
    if importlib.util.find_spec("torchao") is None:
        raise Unavailable("torchao cannot be imported: pip install torchao")
    if device.type != "cuda":
        raise Unavailable("torchao's float8 products need a GPU")
    float8: Any = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gather)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: "lm_head" not in path)
    return (lambda: float8.precompute_float8_dynamic_scale_for_fsdp(model)) if gather else (lambda: None)
