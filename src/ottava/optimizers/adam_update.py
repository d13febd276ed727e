"""The arithmetic of one Adam step over many tensors of one device: everything in float32, then back into what is stored.

On a GPU a step is a few kernels whatever the number of parameters: torch's fused Adam, and one multi-tensor copy for each kind
of conversion. FP8 storage and scaled moments cost one quantization a tensor on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ottava import torch_private
from ottava.optimizers.masters import has_bytes_only, join_remainder, split_remainder_
from ottava.optimizers.moments import MomentFormat
from ottava.quant.weight import Weight

# float32 copies that live at the same time hold at most this many elements (256 MiB), or one parameter's.
TEMPORARY_ELEMENTS = 2**26


@dataclass
class Update:
    """One parameter's step. All tensors are local and on one device."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    formats: tuple[MomentFormat, MomentFormat]
    """Of exp_avg and exp_avg_sq."""

    @property
    def in_place(self) -> bool:
        """The parameter itself is updated: float32, laid out as its moments are."""
        plain = self.param.dtype == torch.float32 and not has_bytes_only(self.param)
        return plain and self.param.is_contiguous()

    @property
    def remainder(self) -> bool:
        """The master is the parameter and 16 bits more."""
        return "master_param" in self.state and self.state["master_param"].dtype == torch.int16

    @property
    def temporary_elements(self) -> int:
        """Elements of float32 copies that the update needs."""
        kept_master = "master_param" in self.state and not self.remainder
        copies = [not self.in_place and not kept_master, self.grad.dtype != torch.float32]
        copies += [f.name != "float32" for f in self.formats]
        return sum(copies) * self.param.numel()


def apply_updates(updates: list[Update], group: dict[str, Any], adam_w_mode: bool) -> None:
    """Steps the parameters of one device by the options of `group`."""
    for batch in _batches(updates):
        work = _working_values(batch)
        grads = _as_float32([u.grad for u in batch])
        exp_avgs, exp_avg_sqs = _decoded(batch, 0), _decoded(batch, 1)
        _adam(work, grads, exp_avgs, exp_avg_sqs, [u.state["step"] for u in batch], group, adam_w_mode)
        _store_moments(batch, 0, exp_avgs)
        _store_moments(batch, 1, exp_avg_sqs)
        _store_parameters(batch, work)


def _batches(updates: list[Update]) -> Iterator[list[Update]]:
    batch: list[Update] = []
    elements = 0
    for update in updates:
        if batch and elements + update.temporary_elements > TEMPORARY_ELEMENTS:
            yield batch
            batch, elements = [], 0
        batch.append(update)
        elements += update.temporary_elements
    if batch:
        yield batch


def _adam(
    work: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
    adam_w_mode: bool,
) -> None:
    """torch's own Adam on float32 tensors. On a CPU one tensor after the other, so equal to torch.optim bit for bit."""
    on_gpu = work[0].device.type == "cuda"
    counted = steps
    if not group["bias_correction"]:
        # After infinitely many steps both corrections are exactly 1.
        torch_private.add_to_all(steps, 1)
        counted = [torch.full((), float("inf"), dtype=torch.float32, device=work[0].device)] * len(work)
    adam(
        work,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        counted,
        foreach=False,
        fused=on_gpu,
        decoupled_weight_decay=adam_w_mode,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


# ------------------------------------------------------------------------------------------------- stored <-> float32 values


def _working_values(batch: list[Update]) -> list[Tensor]:
    """float32 tensors to update: the master, the parameter itself, or a copy of it."""
    work: list[Tensor] = []
    for u in batch:
        if u.remainder:
            work.append(join_remainder(u.param, u.state["master_param"]))
        elif "master_param" in u.state:
            work.append(u.state["master_param"])
        else:
            work.append(u.param)
    return _as_float32(work)


def _as_float32(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor, or a contiguous float32 copy where it is neither; the copies are made together."""
    result, targets, sources = list(tensors), [], []
    for i, tensor in enumerate(tensors):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            result[i] = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
            targets.append(result[i])
            sources.append(tensor)
    if targets:
        torch_private.copy_all(targets, sources)
    return result


def _decoded(batch: list[Update], which: int) -> list[Tensor]:
    name = ("exp_avg", "exp_avg_sq")[which]
    if not batch[0].formats[which].scaled:  # one group, one format
        return _as_float32([u.state[name] for u in batch])
    return [u.formats[which].decode(u.state[name], u.state[f"{name}_scale_inv"]) for u in batch]


def _store_moments(batch: list[Update], which: int, values: list[Tensor]) -> None:
    name = ("exp_avg", "exp_avg_sq")[which]
    if batch[0].formats[which].scaled:
        for u, value in zip(batch, values, strict=True):
            u.formats[which].encode_(value, u.state[name], u.state[f"{name}_scale_inv"], positive=which == 1)
        return
    _copy_all([u.state[name] for u in batch], values)


def _store_parameters(batch: list[Update], work: list[Tensor]) -> None:
    plain: tuple[list[Tensor], list[Tensor]] = ([], [])
    for u, value in zip(batch, work, strict=True):
        if has_bytes_only(u.param):
            continue  # `requantize` writes all of them at once
        if u.remainder:
            split_remainder_(value, u.param, u.state["master_param"])
        else:
            plain[0].append(u.param)
            plain[1].append(value)
    _copy_all(*plain)


def requantize(updates: list[Update]) -> None:
    """Writes the masters of parameters that are stored in FP8, with fresh scales.

    Together, after all batches: shards of weights reduce their amax over ranks, once for all, and batches differ between ranks.
    """
    chosen = [u for u in updates if has_bytes_only(u.param)]
    weights = [u for u in chosen if isinstance(u.param, Weight)]
    Weight.requantize_together_([u.param for u in weights], [u.state["master_param"] for u in weights])
    for u in chosen:
        if not isinstance(u.param, Weight):  # somebody's own QuantizedTensor
            u.param.requantize_(u.state["master_param"])  # type: ignore[attr-defined]


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copies the pairs that are not one and the same tensor, together."""
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t is not s]
    if pairs:
        torch_private.copy_all([t for t, _ in pairs], [s for _, s in pairs])
