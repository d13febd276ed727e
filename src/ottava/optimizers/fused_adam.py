"""`FusedAdam`: Adam and AdamW with float32 masters, also for weights that are stored in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ottava.optimizers.adam_state import (
    MOMENTS,
    ensure_state,
    has_master,
    moment_format,
    restore,
    set_unscaled,
    unscaled,
)
from ottava.optimizers.adam_update import Settings, Update, apply_updates, requantize
from ottava.optimizers.fused_step import FusedStep, runs_fused
from ottava.optimizers.gradients import gradient_of, zero_decoupled
from ottava.optimizers.masters import WHOLE, Place, local_of
from ottava.optimizers.moments import MomentFormat
from ottava.optimizers.options import Options, check_numbers
from ottava.quant.quantizer import FLOAT_DTYPES

NO_GRADIENT = torch.empty(0, dtype=torch.float32)


@dataclass(frozen=True)
class Prepared:
    """An update, and what it was made from."""

    update: Update
    local: Tensor
    values: tuple[Tensor, ...]
    addresses: tuple[int, ...]

    def valid(self, local: Tensor, values: dict[str, Tensor], number: int) -> bool:
        """Whether parameter and state are the same objects at the same places."""
        same = local is self.local and number == self.update.number and len(values) == len(self.values)
        same = same and all(a is b for a, b in zip(values.values(), self.values, strict=True))
        return same and self.update.addresses(local) == self.addresses


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW (`adam_w_mode=True`, the default). Arguments and their order are TransformerEngine's.

    Arguments:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW takes them; lr may be a tensor.
        bias_correction: divide the moments by `1 - beta**step`.
        capturable: step counts and lr stay on the device, so that `step()` can be recorded in a CUDA graph.
        master_weights: keep float32 masters of bf16 and fp16 parameters. Parameters stored in FP8 always have one.
        exp_avg_dtype, exp_avg_sq_dtype: torch.float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 (uint8: E4M3); float16
            and FP8 moments have one scale a tensor. "float8_block128": FP8 with a scale for every 128 elements of a row, which sharded
            parameters can have too; vectors then keep float32 moments.
        use_decoupled_grad: read `param.decoupled_grad`; a parameter without that attribute, `param.main_grad`; without either, `grad`.
            (Of a parameter that FSDP2 has sharded, the `grad` that FSDP2 has reduced, if `main_grad` was made before.)
        store_param_remainders: keep 16 bits beside a bf16 parameter instead of a 32-bit master; the two together are the master.
        stochastic_rounding: round bf16 parameters without a master, bf16 moments and moments in blocks up or down at random, right on
            average, instead of to the nearest. The bits follow from (seed, number of the parameter, step, element of the whole
            parameter), so a run repeats itself, and on other meshes too.
        seed: of stochastic rounding.
        amsgrad, a master_weight_dtype other than float32: refused.

    Per parameter, `state` holds plain tensors: "step", "exp_avg", "exp_avg_sq", "master_param", and "exp_avg_scale_inv",
    "exp_avg_sq_scale_inv" where a moment is scaled.

        >>> with ottava.quantized_model_init(recipe=recipe.Float8BlockScaling()):
        ...     layer = ottava.Linear(256, 256)  # FP8 bytes only
        >>> optimizer = ottava.optimizers.FusedAdam(layer.parameters(), lr=1e-3)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        exp_avg_sq_dtype: torch.dtype | str = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedAdam has no AMSGrad variant: use amsgrad=False, or torch.optim.AdamW(amsgrad=True).")
        if master_weight_dtype != torch.float32:
            raise ValueError(f"FusedAdam: masters are float32, got master_weight_dtype={master_weight_dtype}.")
        if store_param_remainders and not master_weights:
            raise ValueError(
                "FusedAdam: store_param_remainders=True is a way to keep masters; it needs master_weights=True."
            )
        check_numbers(lr, betas, eps, weight_decay)
        self.options = Options(
            adam_w_mode,
            capturable,
            master_weights,
            use_decoupled_grad,
            store_param_remainders,
            stochastic_rounding,
            seed,
        )
        self.set_grad_none = set_grad_none
        self._forget_prepared()
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            # Words, so that a state dict says how its bytes are to be read.
            "exp_avg_dtype": MomentFormat.of(exp_avg_dtype, "exp_avg_dtype").name,
            "exp_avg_sq_dtype": MomentFormat.of(exp_avg_sq_dtype, "exp_avg_sq_dtype").name,
        }
        super().__init__(params, defaults)

    def _forget_prepared(self) -> None:
        """What steps keep for the next one; it is made again when needed."""
        self._fused: dict[torch.device, FusedStep] = {}
        self._prepared: dict[Tensor, Prepared] = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"options": self.options, "set_grad_none": self.set_grad_none}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_prepared()
        # torch gives every optimizer that loads a state an option of its own, with which checkpoints of other runs would differ.
        for options in (self.defaults, *self.param_groups):
            options.pop("differentiable", None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, for example `{"params": [...], "lr": 1e-4}`; what is not given is as in the constructor."""
        for name in MOMENTS:
            given = param_group.get(f"{name}_dtype")
            if given is not None:
                param_group[f"{name}_dtype"] = MomentFormat.of(given, f"{name}_dtype").name
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_numbers(group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for index, param in enumerate(group["params"]):
                self._check_param(param, f"parameter {index} of group {len(self.param_groups) - 1}", group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._lr_to_device(group)

    def _check_param(self, param: Tensor, who: str, group: dict[str, Any]) -> None:
        if param.dtype not in FLOAT_DTYPES:
            raise ValueError(f"FusedAdam: {who} must be float32, bfloat16, float16 or FP8 storage, got {param.dtype}.")
        formats = [moment_format(param, group, name) for name in MOMENTS]
        if hasattr(param, "to_local") and any(f.of_whole_tensor for f in formats):
            raise ValueError(
                f"FusedAdam: {who} is sharded (a DTensor), and {formats[0].name}, {formats[1].name} moments have a scale of the whole "
                'tensor: use float32 or bfloat16 moments, or "float8_block128".'
            )
        if (
            self.options.stochastic_rounding
            and param.dtype == torch.float16
            and not has_master(local_of(param), self.options)
        ):
            raise ValueError(
                f"FusedAdam: {who} is float16, to which stochastic_rounding does not round: use bfloat16, or master_weights=True."
            )

    def _lr_to_device(self, group: dict[str, Any]) -> None:
        """A recorded CUDA graph reads lr when it is replayed, so lr is a tensor of this group's own."""
        if self.options.capturable and group["params"]:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device, copy=True)

    # --------------------------------------------------------------------------------------------------------- gradients

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets the gradients (set_to_none=True, the default) or zeroes them. `main_grad` buffers are always zeroed."""
        if self.set_grad_none is not None and set_to_none is not None and set_to_none != self.set_grad_none:
            raise ValueError(
                f"zero_grad(set_to_none={set_to_none}), but FusedAdam was made with set_grad_none={self.set_grad_none}."
            )
        set_to_none = self.set_grad_none if set_to_none is None else set_to_none
        set_to_none = True if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=set_to_none)
        if self.options.use_decoupled_grad:
            zero_decoupled(chain.from_iterable(group["params"] for group in self.param_groups), set_to_none)

    # -------------------------------------------------------------------------------------------------------------- step

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None, grad_scale: Tensor | None = None
    ) -> Any:
        """One step of every parameter that has a gradient; returns the loss of `closure`, which computes the gradients anew.

        grad_scale: a tensor of one number, times which gradients are taken; they stay as they are. With the factor of
        `ottava.distributed.grad_norm_and_scale` gradients are clipped without a pass over them. NaN: nothing is changed, not even the
        counts. A GPU decides that itself, and the host need not wait to know whether gradients are finite.
        """
        if grad_scaler is not None:
            raise ValueError(
                "FusedAdam.step takes no grad_scaler: call grad_scaler.step(optimizer), which unscales first."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if grad_scale is not None and grad_scale.numel() != 1:
            raise ValueError(f"FusedAdam: grad_scale must be one number, got shape {tuple(grad_scale.shape)}.")
        done = self._apply(self._updates(), grad_scale)
        requantize(done)
        for update in done:
            update.grad = NO_GRADIENT  # updates are kept, gradients are not
        return loss

    def _updates(self) -> list[tuple[dict[str, Any], dict[torch.device, list[Update]]]]:
        """(group, by device what is to be done) of every group."""
        found, number = [], 0
        for group in self.param_groups:
            updates: dict[torch.device, list[Update]] = {}
            for number, param in enumerate(group["params"], number):  # noqa: B020
                grad = gradient_of(param, self.options.use_decoupled_grad)
                if grad is None:
                    continue
                update = self._update(param, group, number)
                update.grad = local_of(grad)
                updates.setdefault(update.param.device, []).append(update)
            number += 1
            found.append((group, updates))
        return found

    def _apply(
        self, work: list[tuple[dict[str, Any], dict[torch.device, list[Update]]]], grad_scale: Tensor | None
    ) -> list[Update]:
        settings = Settings(self.options.adam_w_mode, self.options.stochastic_rounding, self.options.seed)
        fused: dict[torch.device, list[tuple[dict[str, Any], list[Update]]]] = {}
        done: list[Update] = []
        for group, by_device in work:
            for device, updates in by_device.items():
                together = [u for u in updates if runs_fused(u)]
                if together:
                    fused.setdefault(device, []).append((group, together))
                rest = [] if len(together) == len(updates) else [u for u in updates if not runs_fused(u)]
                if rest:
                    apply_updates(rest, group, settings, _scale_on(device, grad_scale))
                done += updates
        for device, groups in fused.items():
            launch = self._fused.setdefault(device, FusedStep())
            launch(groups, settings, _scale_on(device, grad_scale))
        return done

    def _update(self, param: Tensor, group: dict[str, Any], number: int) -> Update:
        """What is to be done with `param`, without its gradient: that of the step before, if all memory is where it was."""
        local, kept = local_of(param), self._prepared.get(param)
        values = self.state[param]
        if kept is not None and kept.valid(local, values, number):
            return kept.update
        self._ensure_state(param, group)
        state = {name: local_of(tensor) for name, tensor in values.items()}
        first, second = (moment_format(param, group, name) for name in MOMENTS)
        place = Place.of(param) if self.options.stochastic_rounding else WHOLE
        update = Update(local.detach(), NO_GRADIENT, state, (first, second), number, place)
        self._prepared[param] = Prepared(update, local, tuple(values.values()), update.addresses(local))
        return update

    # ------------------------------------------------------------------------------------------------------------- state

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                return group
        raise ValueError(f"FusedAdam: a tensor of shape {tuple(param.shape)} is not one of its parameters.")

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Makes the state of `param` now instead of at its first step, and leaves a preserved initial value for the caller to free.

        store_param_remainders: TransformerEngine's argument; it can only repeat what the optimizer was made with.
        """
        if store_param_remainders not in (None, False, self.options.store_param_remainders):
            raise ValueError("FusedAdam: store_param_remainders is chosen when the optimizer is made.")
        with torch.no_grad():
            self._ensure_state(param, self._group_of(param), free=False)

    def _ensure_state(self, param: Tensor, group: dict[str, Any], free: bool = True) -> dict[str, Tensor]:
        """The state of `param`, with what is missing added."""
        state = self.state[param]
        ensure_state(state, param, group, self.options, free)
        return state

    @torch.no_grad()
    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """The state `state_name` ("exp_avg", "exp_avg_sq" or "master_param") of `param`: float32 values of this rank's part."""
        state = self.state[param]
        if state_name not in state:
            raise ValueError(
                f"FusedAdam: this parameter has no state {state_name!r}; it has: {', '.join(state) or 'none yet'}."
            )
        group = self._group_of(param) if state_name in MOMENTS else {}
        return unscaled(state, param, group, state_name)

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Replaces a state by float32 values; the parameter itself changes at the next step (with remainders: now)."""
        if state_name not in (*MOMENTS, "master_param"):
            raise ValueError(f"FusedAdam: state_name must be exp_avg, exp_avg_sq or master_param, got {state_name!r}.")
        group = self._group_of(param)
        set_unscaled(self._ensure_state(param, group), param, group, self.options, state_name, unscaled_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores bit for bit what `state_dict()` returned. torch.optim.Adam's and AdamW's state loads too.

        Moments that were saved in another dtype are converted to the one of this optimizer.
        """
        captured: dict[str, Any] = {}

        # The base class would cast every state to the parameter's dtype: it loads the groups, this class the state.
        # The pre-hook runs after the user's, the post-hook before them.
        def without_state(optimizer: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            captured.update(loaded)
            return loaded | {"state": {}}

        own = [{name: group[f"{name}_dtype"] for name in MOMENTS} for group in self.param_groups]
        pre = self.register_load_state_dict_pre_hook(without_state)
        post = self.register_load_state_dict_post_hook(lambda _: self._restore(captured, own), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            pre.remove()
            post.remove()

    @torch.no_grad()
    def _restore(self, loaded: dict[str, Any], own: list[dict[str, str]]) -> None:
        for group, saved_group, formats in zip(self.param_groups, loaded["param_groups"], own, strict=True):
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            group.update({f"{name}_dtype": word for name, word in formats.items()})
            count = group.pop("step", None)  # where TransformerEngine counts
            self._lr_to_device(group)
            for param, key in zip(group["params"], saved_group["params"], strict=True):
                saved = loaded["state"].get(key)
                if saved:
                    saved = saved if "step" in saved or count is None else {**saved, "step": count}
                    restore(self.state[param], param, group, self.options, saved, saved_group)


def _scale_on(device: torch.device, scale: Tensor | None) -> Tensor | None:
    """grad_scale where the parameters are, float32."""
    return None if scale is None else local_of(scale).detach().reshape(()).to(device, torch.float32, non_blocking=True)
