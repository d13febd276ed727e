"""The columnwise copy of a weight, which the input's gradient is multiplied by: made in backward, not kept from forward on.

A copy that autograd keeps in between, of every layer, would hold a byte for each element of the model beside the parameters that the
copies are made from. (With FSDP2 it would be the bytes of the whole model on every rank: FSDP2 frees a gathered weight after its layer's
forward and gathers it again for backward.) So backward quantizes the parameter once more, with the scale or amax of forward, into the same
bytes: it reads 2 or 4 bytes of an element where it transposed one, 0.05 ms for the weights of a Llama-3-8B layer in bf16 on an H200.

Not where copies stay from microbatch to microbatch, nor for weights that are stored in FP8: those are there anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.kernels import tally
from ottava.kernels.cast import Buffers
from ottava.kernels.zeros import scratch_like

WeightSource = tuple[Tensor, tuple[Any, ...], tuple[int, ...]]
"""(weight [N, K] without autograd, the parameters whose memory it is, their versions in forward: who writes into a tensor raises its own).
A plain tuple: one is made in every forward, and the constructor of a class would be a Python call more."""

_VERSION = attrgetter("_version")


def source_of_weight(weight: Tensor, detached: Tensor, owners: Sequence[Any]) -> WeightSource | None:
    """Where backward finds the weight again: in the memory of parameters. None where it is a tensor of its own.

    detached: weight.detach(). owners: the parameters whose rows it is.
    """
    if weight.is_inference():
        return None  # it has no version
    for owner in owners:
        if not isinstance(owner, nn.Parameter) or (weight is not owners[0] and type(owner) is not nn.Parameter):
            return None
    if weight is not owners[0]:
        if weight.untyped_storage().data_ptr() != owners[0].untyped_storage().data_ptr():
            return None  # a concatenation
    elif type(weight) is not nn.Parameter and not torch_private.is_fake(weight):
        return None
    return detached, tuple(owners), tuple(map(_VERSION, owners))


def quantize_again(
    source: WeightSource, ops: Any, scheme: str, scale: Tensor | None, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(data, scale_inv, amax) of the columnwise copy. scale, amax: what forward has quantized with, as far as it was given or found.

    ops: what has the ops as attributes.
    """
    weight, owners, versions = source
    if tuple(map(_VERSION, owners)) != versions:
        raise ValueError(
            f"A weight of shape {tuple(weight.shape)} was written to between forward and backward, which makes its FP8 copy from it: write "
            "to it after backward, or pass is_first_microbatch=True to the forward, which keeps the copy."
        )
    if scale is not None and ops is not torch.ops.ottava:
        amax = scratch_like(weight)  # the kernel finds it once more
    with tally.again():
        q = Buffers(*ops.quantize(weight, scheme, scale, amax, False, True))
    return q.columnwise_data, q.columnwise_scale_inv, q.columnwise_amax
