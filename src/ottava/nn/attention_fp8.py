"""`fp8_dpa` and `fp8_mha` of a recipe: whether attention runs in FP8 here, why not, and with which scales. Design note 10."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from ottava import torch_private
from ottava.kernels import attention_backend as backends
from ottava.kernels.attention_fp8 import CHANNELS, fp8_attention
from ottava.kernels.registry import has_triton
from ottava.nn.follows_autocast import FollowsAutocast
from ottava.nn.random_replay import perhaps_again
from ottava.notices import warn_once
from ottava.quant.quantization import AttentionScales, Quantization

_MHA = (
    "ottava: fp8_mha=True does what fp8_dpa=True does: queries, keys and values come from their projection, and the output goes to the "
    "next one, in the activation dtype, in which the rotary embedding and attention's backward want them."
)


class Asked(NamedTuple):
    """Attention in FP8, which a recipe asks for."""

    scales: AttentionScales
    obstacle: str | None = None
    """What the call asks for beside, and FP8 does not do."""


def asked_for(module: FollowsAutocast) -> Asked | None:
    """What the recipe in force for `module` says of attention in FP8, if it wants that."""
    recipe, calibrating, _ = module._context(torch.compiler.is_compiling())
    if recipe is None or calibrating:
        return None
    scales = Quantization.of(recipe).attention
    if scales is not None and recipe.fp8_mha:
        _say(_MHA)
    return None if scales is None else Asked(scales)


def runs(obstacle: str | None) -> bool:
    """Whether nothing is in the way. What is, is told once: FP8 was asked for, and does not run."""
    if obstacle is None:
        return True
    _say(f"ottava: fp8_dpa=True, but attention runs in the activation dtype: {obstacle}.")
    return False


def attend(
    scales: AttentionScales,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor] | None,
    options: dict[str, Any],
    recompute: bool,
) -> Tensor:
    """Attention in FP8, where `unfit` has found nothing. bounds: of each token's document. options: as `unfit` takes them."""

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fp8_attention(q, k, v, bounds=bounds, **options, **scales._asdict())

    if q.is_cuda and not torch.compiler.is_compiling():
        backends.say_once(
            f"ottava: attention with heads of {q.shape[-1]} channels runs in FP8, its backward in {q.dtype}."
        )
    return perhaps_again(core, recompute, q, k, v)


@torch_private.constant_when_traced
def _say(message: str) -> bool:
    """Also while torch.compile traces, which would leave a plain call out."""
    warn_once(message)
    return True


def unfit(
    q: Tensor, k: Tensor, v: Tensor, *, kind: str, queries: int, causal: bool, batch_first: bool, scale: float
) -> str | None:
    """What of the tensors, the device or the measurements speaks against FP8. kind: "dense" or "packed"; queries: of a row.

    On a CPU the reference takes whatever is only a question of speed.
    """
    if q.shape[-1] != v.shape[-1]:
        return f"keys have {q.shape[-1]} channels a head, values {v.shape[-1]}"
    if scale <= 0.0:
        return f"softmax_scale is {scale}, not positive"
    if q.numel() == 0 or k.numel() == 0:
        return "there are no tokens"
    if not q.is_cuda:
        return None if q.dtype is not torch.float64 else "float64 has nothing to gain from it"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"on a GPU it takes bfloat16 or float16, not {q.dtype}"
    if q.shape[-1] not in CHANNELS:
        return f"its kernel takes heads of {' or '.join(map(str, CHANNELS))} channels, not {q.shape[-1]}"
    if not _kernel_runs(q.device.index):
        return "its kernel is Triton's, for Hopper"
    if kind == "dense" and torch.is_grad_enabled() and not _cudnn_runs(q, k, v, causal, batch_first):
        return "torch does not let cuDNN's attention run, whose backward it needs"
    return backends.fp8_is_slower(kind, q.shape[-1], queries)


@torch_private.constant_when_traced
def _kernel_runs(device: int) -> bool:
    return has_triton() and backends.capability(device)[0] == 9


def _cudnn_runs(q: Tensor, k: Tensor, v: Tensor, causal: bool, batch_first: bool) -> bool:
    """Whether torch would take cuDNN: it may be switched off, or deterministic kernels be asked for."""
    if torch.compiler.is_compiling():  # the rest of the conditions is about shapes, and is not traced
        return not torch.are_deterministic_algorithms_enabled()
    by_head = [x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3) for x in (q, k, v)]
    shares = q.shape[2] != k.shape[2]
    return can_use_cudnn_attention(SDPAParams(by_head[0], by_head[1], by_head[2], None, 0.0, causal, shares))
