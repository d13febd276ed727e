"""The state of one parameter under Adam: its step count, two moments and a master; made, read, written, and restored from a state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ottava.optimizers.masters import (
    has_bytes_only,
    initial_master,
    join_remainder,
    local_of,
    placed_like,
    placed_scales,
    split_remainder_,
)
from ottava.optimizers.moments import MomentFormat
from ottava.optimizers.options import Options

MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[str, Tensor]


def moment_format(param: Tensor, group: dict[str, Any], name: str) -> MomentFormat:
    """How the moment `name` of `param` is kept."""
    return MomentFormat(group[f"{name}_dtype"]).for_shape(param.dim())


def has_master(local: Tensor, options: Options) -> bool:
    """Whether a float32 master is kept beside this rank's part of a parameter."""
    return has_bytes_only(local) or (options.master_weights and local.dtype != torch.float32)


def keeps_remainder(local: Tensor, options: Options) -> bool:
    """Whether the master is the parameter with 16 bits more."""
    plain_bf16 = local.dtype == torch.bfloat16 and not has_bytes_only(local)
    return options.store_param_remainders and plain_bf16


def ensure_state(state: State, param: Tensor, group: dict[str, Any], options: Options, free: bool = True) -> None:
    """Adds what is missing: everything at the first step, a master after state without masters was loaded."""
    _ensure_moments(state, param, group)
    local = local_of(param)
    if "master_param" not in state and has_master(local, options):
        if keeps_remainder(local, options):
            master = torch.zeros(local.shape, dtype=torch.int16, device=local.device)
        else:
            master = initial_master(param, local, free).contiguous()
        state["master_param"] = placed_like(param, master)


def _ensure_moments(state: State, param: Tensor, group: dict[str, Any]) -> None:
    local = local_of(param)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
    for name in MOMENTS:
        if name not in state:
            form = moment_format(param, group, name)
            stored, scale_inv = form.zeros(local.shape, local.device)
            if scale_inv is not None:
                state[f"{name}_scale_inv"] = placed_scales(param, scale_inv) if form.blocks else scale_inv
            state[name] = placed_like(param, stored)


def unscaled(state: State, param: Tensor, group: dict[str, Any], name: str) -> Tensor:
    """See `FusedAdam.get_unscaled_state`, of a state that is there. group: where it is a moment's."""
    stored = local_of(state[name])
    if name in MOMENTS:
        form = moment_format(param, group, name)
        return form.decode(stored, _local_or_none(state.get(f"{name}_scale_inv")))
    if name == "master_param" and stored.dtype == torch.int16:
        return join_remainder(local_of(param), stored)
    return stored.float()


def set_unscaled(
    state: State, param: Tensor, group: dict[str, Any], options: Options, name: str, given: Tensor
) -> None:
    """See `FusedAdam.set_scaled_state`, of a parameter whose state is there."""
    local = local_of(param)
    value = local_of(given).to(local.device, torch.float32)
    if value.shape != local.shape:
        raise ValueError(f"FusedAdam: {name} of shape {tuple(value.shape)}, expected {tuple(local.shape)}.")
    if name in MOMENTS:
        target = moment_format(param, group, name)
        scale_inv, positive = _local_or_none(state.get(f"{name}_scale_inv")), name == "exp_avg_sq"
        target.encode_(value, local_of(state[name]), scale_inv, positive)
    elif "master_param" not in state:
        raise ValueError("FusedAdam: this parameter has no master; make the optimizer with master_weights=True.")
    elif keeps_remainder(local, options):
        split_remainder_(value, local, local_of(state["master_param"]))
    else:
        local_of(state["master_param"]).copy_(value)


def restore(
    state: State,
    param: Tensor,
    group: dict[str, Any],
    options: Options,
    saved: dict[str, Any],
    saved_group: dict[str, Any],
) -> None:
    """The state of one parameter from a state dict. saved_group: the group that it was saved in."""
    missing = [name for name in ("step", *MOMENTS) if name not in saved]
    if missing:
        raise ValueError(f"The state dict is not Adam's: a parameter's state has no {missing[0]!r}, but {list(saved)}.")
    # The master is a saved one, or is made by the next step from the loaded weight.
    _ensure_moments(state, param, group)
    local = local_of(param)
    state["step"].copy_(torch.as_tensor(saved["step"], dtype=torch.float32).reshape(()))
    for name in MOMENTS:
        stored, scale_inv = local_of(saved[name]), _local_or_none(saved.get(f"{name}_scale_inv"))
        if stored.shape != local.shape:
            raise ValueError(
                f"{name} in the state dict has shape {tuple(stored.shape)}, its parameter {tuple(local.shape)}."
            )
        word = saved_group.get(f"{name}_dtype")
        _restore_moment(state, name, moment_format(param, group, name), stored, scale_inv, word)
    master = saved.get("master_param")
    if master is not None and has_master(local, options):
        state["master_param"] = placed_like(param, _restored_master(local, local_of(master), options))


def _restore_moment(
    state: State, name: str, target: MomentFormat, stored: Tensor, scale_inv: Tensor | None, word: str | None
) -> None:
    """Bit for bit, or converted to the format of this optimizer. word: of the format that it was saved in."""
    own, own_scale = local_of(state[name]), _local_or_none(state.get(f"{name}_scale_inv"))
    source = _format_of(stored, word, scale_inv)
    if source == target:
        own.copy_(stored)
        if own_scale is not None and scale_inv is not None:
            own_scale.copy_(scale_inv)
        return
    values = source.decode(stored.to(own.device), None if scale_inv is None else scale_inv.to(own.device))
    target.encode_(values, own, own_scale, name == "exp_avg_sq")


def _restored_master(local: Tensor, saved: Tensor, options: Options) -> Tensor:
    """A saved master (float32, or int16 remainder) in the form that this optimizer keeps."""
    saved = saved.to(local.device, copy=True).contiguous()
    keeps = keeps_remainder(local, options)
    if (saved.dtype == torch.int16) == keeps:
        return saved if keeps else saved.float()
    if not keeps:
        return join_remainder(local, saved)
    remainder = torch.empty(local.shape, dtype=torch.int16, device=local.device)
    split_remainder_(saved.float(), local, remainder)
    return remainder


def _format_of(stored: Tensor, word: str | None, scale_inv: Tensor | None) -> MomentFormat:
    """How a saved moment is to be read: by its dtype, and by the word of its group where bytes could be either FP8."""
    if stored.dtype == torch.uint8:
        return MomentFormat(word or "float8_e4m3fn")
    if stored.dtype == torch.float16 and scale_inv is None:
        raise ValueError(
            "A float16 moment in the state dict has no scale: save it as float32 (FusedAdam.get_unscaled_state)."
        )
    return MomentFormat.of(stored.dtype, "the dtype of a saved moment")


def _local_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local_of(tensor)
