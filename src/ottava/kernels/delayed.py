"""The ops that write delayed-scaling state: `ottava::record_amax_`, `ottava::delayed_update_`, and `ottava::delayed_updates_` for many."""

from __future__ import annotations

import torch
from torch import Tensor

from ottava.kernels.registry import define
from ottava.quant.delayed import schedule_backward_update
from ottava.quant.scaling import delayed_update


def _record(history: Tensor, amax: Tensor, column: int, owner: int) -> None:
    """history[0, column] = max(itself, amax [1]). owner: id of the state to update when the running backward ends; 0 for none."""
    cell = history[0, column : column + 1]
    torch.maximum(cell, amax, out=cell)
    if owner:
        schedule_backward_update(owner)


def _record_cuda(history: Tensor, amax: Tensor, column: int, owner: int) -> None:
    import ottava.kernels.delayed_triton as delayed_triton

    if not (history.dtype is amax.dtype is torch.float32 and history.stride(1) == 1 and amax.numel() == 1):
        raise ValueError(
            f"record_amax_ takes a float32 history with contiguous rows and one float32 amax, got {history.dtype} with strides "
            f"{history.stride()} and {amax.dtype} of shape {tuple(amax.shape)}."
        )
    launch = delayed_triton.RECORDS.get(column)
    if launch is None:
        launch = delayed_triton.prepare_record(column)
    launch(history, amax)
    if owner:
        schedule_backward_update(owner)


record_amax = define(
    "record_amax_",
    _record,
    lambda history, amax, column, owner: None,
    _record_cuda,
    mutates=("history",),
    cuda_launches=True,
)


def _update(
    history: Tensor, scale: Tensor, previous: Tensor | None, window: int, fp8_max: float, margin: int, most_recent: bool
) -> None:
    """One step of delayed scaling, in place. history [L, n], scale [n]; previous [n] receives the scale of before."""
    if previous is not None:
        previous.copy_(scale)
    new_history, new_scale = delayed_update(history, scale, window, fp8_max, margin, most_recent)
    history.copy_(new_history)
    scale.copy_(new_scale)


def _update_cuda(
    history: Tensor, scale: Tensor, previous: Tensor | None, window: int, fp8_max: float, margin: int, most_recent: bool
) -> None:
    kept = [] if previous is None else [previous]
    _update_many_cuda([history], [scale], kept, window, fp8_max, margin, most_recent)


update = define(
    "delayed_update_",
    _update,
    lambda history, scale, previous, window, fp8_max, margin, most_recent: None,
    _update_cuda,
    mutates=("history", "scale", "previous"),
)


def _update_many(
    histories: list[Tensor],
    scales: list[Tensor],
    previous: list[Tensor],
    window: int,
    fp8_max: float,
    margin: int,
    most_recent: bool,
) -> None:
    """`_update` of each; previous: of all of them, or empty."""
    for number, (history, scale) in enumerate(zip(histories, scales, strict=True)):
        kept = previous[number] if previous else None
        _update(history, scale, kept, window, fp8_max, margin, most_recent)


def _update_many_cuda(
    histories: list[Tensor],
    scales: list[Tensor],
    previous: list[Tensor],
    window: int,
    fp8_max: float,
    margin: int,
    most_recent: bool,
) -> None:
    import ottava.kernels.delayed_triton as delayed_triton

    delayed_triton.update(histories, scales, previous, window, fp8_max / 2**margin, most_recent)


update_many = define(
    "delayed_updates_",
    _update_many,
    lambda histories, scales, previous, window, fp8_max, margin, most_recent: None,
    _update_many_cuda,
    mutates=("histories", "scales", "previous"),
    cuda_launches=True,
)
