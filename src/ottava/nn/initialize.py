"""First values of a whole model: `materialize_` fills what was made on the meta device, the same on every mesh (`draw.py`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.nn.draw import (
    Constant,
    Elementwise,
    Given,
    InitSlice,
    Normal,
    Uniform,
    Whole,
    ZeroRows,
    as_method,
    default_stream,
    draw,
    draw_,
    elementwise,
    is_dtensor,
)
from ottava.nn.strategy import like_dtensor
from ottava.quant.delayed import DelayedState
from ottava.quant.weight import Weight

__all__ = [
    "Constant", "Elementwise", "Normal", "InitSlice", "Uniform", "Whole", "ZeroRows",
    "as_method", "swap_parameter_", "draw", "draw_", "elementwise", "leave_meta_", "materialize_",
]  # fmt: skip

WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""What wrappers put into a parameter's name. The start must not depend on them."""


def materialize_(
    module: nn.Module,
    seed: int = 0,
    device: torch.device | str | None = None,
    prefix: str = "",
    redraw: bool = False,
) -> nn.Module:
    """Gives every meta parameter and buffer of `module` memory on `device` and its first value, in place. Returns `module`.

    A sharded weight (a DTensor: FSDP2, tensor parallelism, both) is never held whole: a rank draws the slabs that its part touches.
    Parameters stay the same Python objects, so tied weights stay tied and an optimizer may hold them already.

    device: by default that of the mesh for a DTensor, else the GPU if there is one. prefix: what the names of this module's
    parameters begin with in the model, for FSDP1's `param_init_fn`. redraw: also parameters that hold values already.

    Where values come from, for each module with parameters of its own:
    1. `module.initial_values()`, if it has that method: {parameter name: method}, methods as for `draw`, or an `InitSlice`;
    2. Ottava's modules (`init_method`, gains 1, biases 0), and torch's Linear, Embedding, LayerNorm and RMSNorm, as they do it;
    3. `module.reset_parameters()`, run on a full-size copy of the module's own parameters, which is then cut.
    Buffers: `module.reset_buffers()` if there is one, else what `reset_parameters` left in them; delayed scaling starts fresh.

        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(64, 256), ottava.Linear(256, 64, device="meta"))
        >>> materialize_(model, seed=1234, device="cpu")[1].weight.std() < 0.03
        tensor(True)
    """
    done: set[int] = set()
    for path, child in module.named_modules():
        _materialize_one(child, _clean(f"{prefix}.{path}".strip(".")), seed, device, redraw, done)
    return module


def swap_parameter_(tensor: Tensor, value: Tensor) -> None:
    """Makes the parameter `tensor` hold `value` (another device, shape or subclass) and stay the same Python object.

    >>> weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    >>> swap_parameter_(weight, torch.zeros(4, 4)); weight.device.type
    'cpu'
    """
    new = nn.Parameter(value, requires_grad=tensor.requires_grad)
    for key, attribute in vars(tensor).items():  # what users hang on parameters, such as `main_grad`
        if key not in vars(new):
            setattr(new, key, attribute)
    torch.utils.swap_tensors(tensor, new)


def leave_meta_(parameter: Any, device: torch.device | str | None = None) -> None:
    """Gives a parameter on the meta device memory for what this rank holds of it, without values. device: as for `materialize_`."""
    swap_parameter_(parameter, _empty_like(parameter, _device_of(parameter, device)))


def _clean(path: str) -> str:
    """The name without what wrappers put into it."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def _materialize_one(
    module: nn.Module, path: str, seed: int, device: torch.device | str | None, redraw: bool, done: set[int]
) -> None:
    """The parameters and buffers that `module` itself holds."""
    parameters = {
        n: p for n, p in module.named_parameters(recurse=False) if (redraw or p.is_meta) and id(p) not in done
    }
    buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
    if not parameters and not buffers and not (redraw and isinstance(module, DelayedState)):
        return
    done.update(id(p) for p in parameters.values())
    values, reset_buffers = _values_of(module, path, seed, parameters, buffers)
    stored: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        full_name = f"{path}.{_drawn_as(module, name)}".strip(".")
        if name not in values:
            raise ValueError(
                f"{_who(module, path)}.initial_values() says nothing about {name!r}; it names {sorted(values)}."
            )
        if parameter.is_meta:
            leave_meta_(parameter, device)
        method = _placed(module, name, parameter, values[name])
        if _is_stored(parameter):
            stored[name] = _drawn(parameter, full_name, method, seed)
        else:
            draw_(parameter, full_name, method, seed)
    if stored:
        module.store_values(stored)  # type: ignore[operator]
    for name, buffer in buffers.items():
        module._buffers[name] = torch.empty_like(buffer, device=_device_of(buffer, device))
    with torch.no_grad():
        reset_buffers()


def _is_stored(parameter: Any) -> bool:
    """Whether the parameter is FP8 bytes alone."""
    local = torch_private.local_tensor(parameter) if is_dtensor(parameter) else parameter
    return isinstance(local, Weight) and local.stored_quantized


def _drawn(parameter: Any, name: str, method: Any, seed: int) -> Tensor:
    """First values of what this rank holds of a stored weight, in the type it stands for."""
    if is_dtensor(parameter):
        local = torch_private.local_tensor(parameter)
        values = torch.empty(local.shape, dtype=parameter.dtype, device=local.device)
        twin: Any = like_dtensor(parameter, values)
    else:
        twin = values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    draw_(twin, name, method, seed)
    return values


def _placed(module: Any, name: str, parameter: Tensor, method: Any) -> Any:
    """`method`, with what the module knows about where the parameter lies: in a rank's part, in a matrix of several parameters."""
    if isinstance(method, InitSlice):
        return method
    layout, size = getattr(module, "layouts", {}).get(name), getattr(module, "tp_size", 1)
    shape, start = list(parameter.shape), [0] * parameter.dim()
    if layout is not None and layout.dim is not None and size > 1 and not is_dtensor(parameter):
        start[layout.dim] = module.tp_rank * shape[layout.dim]  # a DTensor says itself where it lies
        shape[layout.dim] *= size
    rows = next((rows for rows in getattr(module, "fused", {}).values() if name in rows), None)
    if rows is not None:
        start[0] += sum(list(rows.values())[: list(rows).index(name)])
        shape[0] = sum(rows.values())
    return method if shape == list(parameter.shape) else InitSlice(method, tuple(shape), tuple(start))


def _drawn_as(module: Any, name: str) -> str:
    """The name that values are drawn by: that of the whole matrix, so that it starts the same however many parameters it is."""
    return next((whole for whole, rows in getattr(module, "fused", {}).items() if name in rows), name)


@torch.no_grad()
def _empty_like(parameter: Any, device: torch.device) -> Tensor:
    """Memory for what this rank holds of `parameter`."""
    if not is_dtensor(parameter):
        return torch.empty_like(parameter.detach(), device=device)
    return like_dtensor(parameter, torch.empty_like(torch_private.local_tensor(parameter), device=device))


def _device_of(tensor: Any, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    kind = tensor.device_mesh.device_type if is_dtensor(tensor) else "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _who(module: nn.Module, path: str) -> str:
    return f"{type(module).__name__} {path!r}" if path else type(module).__name__


# --------------------------------------------------------------------------------------------- what a module's values are


def _values_of(
    module: nn.Module, path: str, seed: int, parameters: dict[str, Any], buffers: dict[str, Tensor]
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """({parameter name: method}, what to call once the buffers have memory)."""
    reset_buffers = getattr(module, "reset_buffers", None) or _known_buffers(module)
    if callable(given := getattr(module, "initial_values", None)):
        known = given()
    else:
        known = _known_values(module) if parameters else {}
    if known is not None and (reset_buffers is not None or not buffers):
        return known, reset_buffers or (lambda: None)
    if not callable(getattr(module, "reset_parameters", None)):
        wanting = ", ".join([*(parameters if known is None else ()), *buffers])
        raise ValueError(
            f"{_who(module, path)} holds {wanting} on the meta device and does not say what they start with: give the class "
            "initial_values() -> {name: method} for parameters, reset_buffers() for buffers, or reset_parameters() for both."
        )
    return _reset_a_copy(module, path, seed)


def _reset_a_copy(module: Any, path: str, seed: int) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Runs `reset_parameters` on a copy whose own parameters and buffers are full-size CPU tensors."""
    twin = copy.copy(module)

    def full(tensor: Tensor) -> Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")

    own = {n: None if p is None else nn.Parameter(full(p)) for n, p in module._parameters.items()}
    twin.__dict__["_parameters"] = own
    twin.__dict__["_buffers"] = {n: None if b is None else full(b) for n, b in module._buffers.items()}
    with default_stream(torch_private.generator_state(f"{seed}\0module\0{path}".encode())):
        twin.reset_parameters()

    def copy_buffers() -> None:
        for name, value in twin._buffers.items():
            if value is not None:
                module._buffers[name].copy_(value)

    return {n: Given(p.detach()) for n, p in twin._parameters.items() if p is not None}, copy_buffers


def _known_values(module: Any) -> dict[str, Any] | None:
    """For modules whose `reset_parameters` is one that is known here; None for others."""
    if isinstance(module, DelayedState):
        return {}
    reset: Any = getattr(type(module), "reset_parameters", None)
    torch_values: dict[Any, Callable[[Any], dict[str, Any]]] = {
        nn.Linear.reset_parameters: _linear,
        nn.Embedding.reset_parameters: _embedding,
        nn.LayerNorm.reset_parameters: lambda m: {"weight": Constant(1.0), "bias": Constant(0.0)},
        nn.RMSNorm.reset_parameters: lambda m: {"weight": Constant(1.0)},
    }
    rule = torch_values.get(reset) or _ottava_rule(module, reset)
    return None if rule is None else rule(module)


def _linear(module: nn.Linear) -> dict[str, Any]:
    bound = module.in_features**-0.5 if module.in_features else 0.0  # what kaiming_uniform_(a=sqrt(5)) comes to
    return {"weight": Uniform(-bound, bound), "bias": Uniform(-bound, bound)}


def _embedding(module: nn.Embedding) -> dict[str, Any]:
    normal, pad = Normal(std=1.0), module.padding_idx
    return {"weight": normal if pad is None else ZeroRows(normal, pad, pad + 1)}


def _ottava_rule(module: Any, reset: Any) -> Callable[[Any], dict[str, Any]] | None:
    # Imported here: the modules may use this file.
    from ottava.nn import attention, base, grouped_linear, layernorm, layernorm_linear, layernorm_mlp, linear

    quantized = (
        linear.Linear,
        layernorm_linear.LayerNormLinear,
        layernorm_mlp.LayerNormMLP,
        grouped_linear.GroupedLinear,
    )
    if isinstance(module, base.QuantizedModule) and any(reset is kind.reset_parameters for kind in quantized):
        return _quantized
    if isinstance(module, layernorm._Norm) and reset is layernorm._Norm.reset_parameters:
        return lambda m: {"weight": Constant(0.0 if m.zero_centered_gamma else 1.0), "bias": Constant(0.0)}
    if isinstance(module, attention.DotProductAttention):
        return lambda m: {"softmax_offset": Constant(0.0)}
    return None


def _quantized(module: Any) -> dict[str, Any]:
    """Gains 1 (0 if zero-centered), biases 0, weights by `init_method`; the second weight of an MLP has a method of its own."""
    values: dict[str, Any] = {}
    for name, _ in module.named_parameters(recurse=False):
        if name == "layer_norm_weight":
            values[name] = Constant(0.0 if module.zero_centered_gamma else 1.0)
        elif "bias" in name:
            values[name] = Constant(0.0)
        else:
            method = module.output_layer_init_method if name == "fc2_weight" else module.init_method
            values[name] = as_method(method)
    return values


def _known_buffers(module: Any) -> Callable[[], Any] | None:
    from ottava.nn.attention import DotProductAttention
    from ottava.nn.rotary import RotaryPositionEmbedding

    if isinstance(module, DelayedState):
        return module.reset
    if isinstance(module, DotProductAttention):
        return lambda: None if module.softmax_offset is None else module.softmax_offset.zero_()
    if isinstance(module, RotaryPositionEmbedding):
        return lambda: module.inv_freq.copy_(_inverse_frequencies(module))
    return None


def _inverse_frequencies(module: Any) -> Tensor:
    dim, device = 2 * module.inv_freq.numel(), module.inv_freq.device
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / (module.rotary_base**exponent)
