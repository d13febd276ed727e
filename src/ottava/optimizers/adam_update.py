"""The arithmetic of one Adam step over many tensors of one device in torch ops: everything in float32, then back into what is stored.

On a CPU this is the step. On a GPU `fused_step` does the same in one kernel, except for moments with one scale a tensor and for
parameters that are not contiguous: then it is torch's fused Adam, and one multi-tensor copy for each kind of conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ottava import torch_private
from ottava.kernels.random_bits import random_bits, round_to_bfloat16, step_key
from ottava.optimizers.masters import WHOLE, Place, has_bytes_only, join_remainder, split_remainder_
from ottava.optimizers.moments import MomentFormat
from ottava.quant.weight import Weight

# float32 copies that live at the same time hold at most this many elements (256 MiB), or one parameter's.
TEMPORARY_ELEMENTS = 2**26


@dataclass(frozen=True)
class Settings:
    """What holds for the whole optimizer's arithmetic."""

    adam_w_mode: bool
    rounds: bool
    """Round stochastically to bf16 parameters without a master, to bf16 moments and to moments in blocks."""
    seed: int
    """Of the random bits."""


@dataclass
class Update:
    """One parameter's step. All tensors are local and on one device. The same object serves step after step, with another `grad`."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    formats: tuple[MomentFormat, MomentFormat]
    """Of exp_avg and exp_avg_sq."""
    number: int = 0
    """Of the parameter, counted over all groups."""
    place: Place = WHOLE
    """Where the local elements lie in the whole parameter; for stochastic rounding."""
    row: list[int] = field(default_factory=list)
    """Of the kernel's table, once made; the gradient's address is always new."""
    kinds: dict[tuple[torch.dtype, bool], Any] = field(default_factory=dict)
    """By dtype and alignment of the gradient, once asked for."""

    @property
    def working(self) -> Tensor:
        """The memory of the parameter: of a weight with an FP8 copy its master."""
        return _memory_of(self.param)

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

    def addresses(self, local: Tensor) -> tuple[int, ...]:
        """Of `local`, the parameter, and of the state. Where they are others than they were, this object is of no use any more."""
        held = () if has_bytes_only(local) else (_memory_of(local),)
        return tuple(t.data_ptr() for t in (*held, *self.state.values()))

    def random(self, settings: Settings, stream: int) -> Tensor | None:
        """Bits for each element; None: round to the nearest. Only after the step was counted."""
        if not settings.rounds:
            return None
        key = step_key(settings.seed, self.number, self.state["step"])
        return random_bits(self.place.index(self.param.shape, self.param.device), key, stream)


def _memory_of(param: Tensor) -> Tensor:
    master = param.master if isinstance(param, Weight) else None
    return param if master is None else master


def apply_updates(
    updates: list[Update], group: dict[str, Any], settings: Settings, grad_scale: Tensor | None = None
) -> None:
    """Steps the parameters of one device by the options of `group`. grad_scale: one number, times which gradients are taken."""
    if grad_scale is not None and bool(grad_scale.isnan()):
        return
    for batch in _batches(updates):
        work = _working_values(batch)
        grads = _as_float32([u.grad for u in batch])
        if grad_scale is not None:
            grads = [grad * grad_scale for grad in grads]
        exp_avgs, exp_avg_sqs = _decoded(batch, 0), _decoded(batch, 1)
        _adam(work, grads, exp_avgs, exp_avg_sqs, [u.state["step"] for u in batch], group, settings.adam_w_mode)
        _store_moments(batch, 0, exp_avgs, settings)
        _store_moments(batch, 1, exp_avg_sqs, settings)
        _store_parameters(batch, work, settings)


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
    values = [
        u.formats[which].decode(u.state[name], u.state[f"{name}_scale_inv"])
        if u.formats[which].scaled
        else u.state[name]
        for u in batch
    ]
    return _as_float32(values)


def _store_moments(batch: list[Update], which: int, values: list[Tensor], settings: Settings) -> None:
    name = ("exp_avg", "exp_avg_sq")[which]
    plain: tuple[list[Tensor], list[Tensor]] = ([], [])
    for u, value in zip(batch, values, strict=True):
        form = u.formats[which]
        rounds = settings.rounds and (form.blocks or form.name == "bfloat16")
        if form.scaled or rounds:
            random = u.random(settings, 1 + which) if rounds else None
            form.encode_(value, u.state[name], u.state.get(f"{name}_scale_inv"), which == 1, random)
        else:
            plain[0].append(u.state[name])
            plain[1].append(value)
    _copy_all(*plain)


def _store_parameters(batch: list[Update], work: list[Tensor], settings: Settings) -> None:
    plain: tuple[list[Tensor], list[Tensor]] = ([], [])
    for u, value in zip(batch, work, strict=True):
        if has_bytes_only(u.param):
            continue  # `requantize` writes all of them at once
        if u.remainder:
            split_remainder_(value, u.param, u.state["master_param"])
            continue
        random = u.random(settings, 0) if u.param.dtype == torch.bfloat16 and "master_param" not in u.state else None
        plain[0].append(u.param)
        plain[1].append(value if random is None else round_to_bfloat16(value, random))
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
