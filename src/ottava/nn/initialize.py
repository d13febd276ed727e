"""First values of weights, by parameter name and global index: a model starts the same on 1 rank and on 1,024.

A matrix is drawn in slabs of 64 rows of the FULL matrix, each slab from a generator keyed by (parameter name, slab, seed). Whoever
asks for a part (rows, columns, both) draws the slabs that the part touches and keeps its share: the bits do not depend on which
part is asked for, by whom, or in which order, and torch's own random streams neither matter nor move.

    >>> whole = draw("head.weight", (1000, 64), Normal(std=0.02))
    >>> part = draw("head.weight", (1000, 64), Normal(std=0.02), rows=slice(250, 500))
    >>> torch.equal(part, whole[250:500])
    True

Numbers are drawn on the CPU in float32 and rounded to the dtype asked for, also for a GPU: bf16 weights are the float32 ones,
rounded. Bits are equal between machines whose CPUs run the same torch kernels (all AVX2 or better, say); an x86 and an Arm
machine may differ in the last bit of a normal number.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ottava import torch_private
from ottava.nn.strategy import REPLICATED, Layout
from ottava.quant.delayed import DelayedState

SLAB_ROWS = 64
DEFAULT_STD = 0.023  # TransformerEngine's default
WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""What wrappers put into a parameter's name. The start must not depend on them."""

InitMethod = Callable[[Tensor], Any]

# ----------------------------------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Normal:
    """Normal numbers.

    >>> draw("w", (4, 8), Normal(std=0.02)).shape
    torch.Size([4, 8])
    """

    mean: float = 0.0
    std: float = DEFAULT_STD

    def fill_(self, slab: Tensor, generator: torch.Generator) -> None:
        """Draws one slab."""
        slab.normal_(self.mean, self.std, generator=generator)


@dataclass(frozen=True)
class Uniform:
    """Uniform numbers in [low, high).

    >>> draw("w", (4, 8), Uniform(-1, 1)).shape
    torch.Size([4, 8])
    """

    low: float = 0.0
    high: float = 1.0

    def fill_(self, slab: Tensor, generator: torch.Generator) -> None:
        """Draws one slab."""
        slab.uniform_(self.low, self.high, generator=generator)


@dataclass(frozen=True)
class Constant:
    """One value everywhere.

    >>> draw("gain", (4,), Constant(1.0))
    tensor([1., 1., 1., 1.])
    """

    value: float = 0.0

    def fill_(self, slab: Tensor, generator: torch.Generator) -> None:
        """Fills one slab."""
        slab.fill_(self.value)


@dataclass(frozen=True)
class Elementwise:
    """A user's `init_method` that treats all elements alike, so that it may be given 64 rows at a time.

    >>> draw("w", (4, 4), Elementwise(lambda w: w.normal_().mul_(0.02))).shape
    torch.Size([4, 4])
    """

    function: InitMethod

    def fill_(self, slab: Tensor, generator: torch.Generator) -> None:
        """Runs the function on one slab; it draws from torch's default stream, which is `generator`'s meanwhile."""
        with _default_stream(generator.get_state()):
            self.function(slab)


@dataclass(frozen=True)
class Whole:
    """A user's `init_method` that looks at the whole matrix (`orthogonal_`, or anything that asks for the shape).

    The full matrix is drawn in float32 on the CPU, cut, and thrown away: one weight at a time is held whole.

    >>> draw("w", (8, 4), Whole(torch.nn.init.orthogonal_), rows=slice(0, 2)).shape
    torch.Size([2, 4])
    """

    function: InitMethod


@dataclass(frozen=True)
class ZeroRows:
    """`method`, but rows `start` to `stop` are 0: padding of a vocabulary, or a padding token.

    >>> draw("embedding.weight", (8, 4), ZeroRows(Normal(), start=6))[6:].any()
    tensor(False)
    """

    method: Any
    start: int
    stop: int | None = None


@dataclass(frozen=True)
class Part:
    """A parameter that is a part of a larger matrix and is not a DTensor that would say so: a shard over a tensor-parallel group.

    shape: of the full matrix; start: where the parameter's first element lies in it.

    >>> Part(Normal(std=0.02), shape=(1024, 64), start=(512, 0))  # the second of two ranks
    Part(method=Normal(mean=0.0, std=0.02), shape=(1024, 64), start=(512, 0))
    """

    method: Any
    shape: tuple[int, ...]
    start: tuple[int, ...]
    layout: Layout = REPLICATED
    """How `ranks` tensor-parallel ranks split the matrix, where that is not row after row: see `Layout.pieces`."""
    ranks: int = 1


@dataclass(frozen=True)
class _Given:
    """Values that are there already, of the full shape."""

    tensor: Tensor


_METHODS = (Normal, Uniform, Constant, Elementwise, Whole, ZeroRows, Part, _Given)
_ELEMENTWISE = "ottava_elementwise"
_TORCH_ELEMENTWISE = tuple(
    getattr(nn.init, name) for name in ("normal_", "uniform_", "trunc_normal_", "constant_", "zeros_", "ones_")
)


def elementwise(function: InitMethod) -> InitMethod:
    """Marks an `init_method` whose elements are drawn alike and independently, so that a rank need not draw the whole matrix.

    >>> @elementwise
    ... def small(weight):
    ...     torch.nn.init.normal_(weight, std=0.01)
    >>> layer = ottava.Linear(64, 64, init_method=small, device="meta")
    """
    setattr(function, _ELEMENTWISE, True)
    return function


def as_method(init_method: Any) -> Any:
    """What a module's `init_method` argument means: None is the default, a marked function or one of torch's elementwise ones
    (also in a `functools.partial`) is `Elementwise`, any other function is `Whole`.

    >>> as_method(functools.partial(torch.nn.init.normal_, std=0.02)).__class__.__name__
    'Elementwise'
    """
    if init_method is None:
        return Normal()
    if isinstance(init_method, _METHODS):
        return init_method
    if not callable(init_method):
        raise ValueError(
            f"An init method must be a function of a tensor, or Normal, Uniform, Constant, ...; got {init_method!r}."
        )
    inner = init_method
    while isinstance(inner, functools.partial):
        if getattr(inner, _ELEMENTWISE, False):
            return Elementwise(init_method)
        inner = inner.func
    if getattr(inner, _ELEMENTWISE, False) or inner in _TORCH_ELEMENTWISE:
        return Elementwise(init_method)
    return Whole(init_method)


# ----------------------------------------------------------------------------------------------------------------- drawing


def draw(
    name: str,
    shape: tuple[int, ...],
    method: Any = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Tensor:
    """Rows `rows` and columns `columns` of the matrix of `shape` that (name, seed) stands for: the same bits whatever is asked for.

    method: `Normal`, `Uniform`, `Constant`, `Elementwise`, `Whole`, `ZeroRows`, or a function as for `as_method`.

        >>> draw("layers.0.fc1.weight", (256, 64), Normal(std=0.02), torch.bfloat16, rows=slice(64, 128)).shape
        torch.Size([64, 64])
    """
    box = []
    for size, asked in zip(shape, (rows, columns)):
        start, stop, step = asked.indices(size)
        if step != 1:
            raise ValueError(f"draw({name!r}) gives contiguous parts, got {asked}: index the result instead.")
        box.append((start, max(stop - start, 0)))
    if len(shape) < 2 and columns != slice(None):
        raise ValueError(f"{name!r} of shape {tuple(shape)} has no columns, got columns={columns}.")
    box += [(0, size) for size in shape[2:]]
    out = torch.empty([count for _, count in box], dtype=dtype, device=device)
    _draw_into(out, name, tuple(shape), as_method(method), seed, [start for start, _ in box])
    return out


@torch.no_grad()
def _draw_into(out: Tensor, name: str, shape: tuple[int, ...], method: Any, seed: int, start: list[int]) -> None:
    """Fills `out` with the box of its size that starts at `start` in the full matrix."""
    if out.numel() == 0:
        return
    if isinstance(method, ZeroRows):
        _draw_into(out, name, shape, as_method(method.method), seed, start)
        stop = shape[0] if method.stop is None else method.stop
        first, last = max(method.start - start[0], 0), min(stop - start[0], out.shape[0])
        if first < last:
            out[first:last] = 0
        return
    if isinstance(method, Constant):
        out.fill_(method.value)
        return
    if not shape:  # a single number
        out.copy_(_whole(name, (1,), method, seed)[0])
        return
    tail = tuple(slice(s, s + n) for s, n in zip(start[1:], out.shape[1:]))
    top, bottom = start[0], start[0] + out.shape[0]
    if isinstance(method, Whole):
        out.copy_(_whole(name, shape, method, seed)[(slice(top, bottom), *tail)])
        return
    for slab in range(top // SLAB_ROWS, -(-bottom // SLAB_ROWS)):
        first = slab * SLAB_ROWS
        values = torch.empty((min(SLAB_ROWS, shape[0] - first), *shape[1:]), dtype=torch.float32, device="cpu")
        method.fill_(values, _generator(name, slab, seed))
        a, z = max(top, first), min(bottom, first + SLAB_ROWS)
        out[a - top : z - top].copy_(values[(slice(a - first, z - first), *tail)])


def _whole(name: str, shape: tuple[int, ...], method: Any, seed: int) -> Tensor:
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    generator = _generator(name, "whole", seed)
    (Elementwise(method.function) if isinstance(method, Whole) else method).fill_(values, generator)
    return values


def _generator(name: str, slab: int | str, seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch_private.generator_state(f"{seed}\0{slab}\0{name}".encode()))
    return generator


@contextmanager
def _default_stream(state: Tensor) -> Iterator[None]:
    """torch's default CPU stream is at `state` inside, and where it was outside."""
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


# ------------------------------------------------------------------------------------------------------- a tree of modules


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
    1. `module.initial_values()`, if it has that method: {parameter name: method}, methods as for `draw`, or a `Part`;
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


def become_(tensor: Tensor, value: Tensor) -> None:
    """Makes the parameter `tensor` hold `value` (another device, shape or subclass) and stay the same Python object.

    >>> weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"))
    >>> become_(weight, torch.zeros(4, 4)); weight.device.type
    'cpu'
    """
    new = nn.Parameter(value, requires_grad=tensor.requires_grad)
    for key, attribute in vars(tensor).items():  # what users hang on parameters, such as `main_grad`
        if key not in vars(new):
            setattr(new, key, attribute)
    torch.utils.swap_tensors(tensor, new)


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
    for name, parameter in parameters.items():
        full_name = f"{path}.{name}".strip(".")
        if name not in values:
            raise ValueError(
                f"{_who(module, path)}.initial_values() says nothing about {name!r}; it names {sorted(values)}."
            )
        if parameter.is_meta:
            become_(parameter, _empty_like(parameter, _device_of(parameter, device)))
        draw_(parameter, full_name, _placed(module, name, parameter, values[name]), seed)
    for name, buffer in buffers.items():
        module._buffers[name] = torch.empty_like(buffer, device=_device_of(buffer, device))
    with torch.no_grad():
        reset_buffers()


def _placed(module: Any, name: str, parameter: Tensor, method: Any) -> Any:
    """`method`, with what the module knows about how tensor parallelism has split the parameter."""
    layout = getattr(module, "layouts", {}).get(name)
    size = getattr(module, "tp_size", 1)
    if layout is None or layout.dim is None or size == 1 or isinstance(method, Part):
        return method
    shape, start = list(parameter.shape), [0] * parameter.dim()
    if not _is_dtensor(parameter):  # this rank's part; a DTensor says itself where it lies
        start[layout.dim] = module.tp_rank * shape[layout.dim]
        shape[layout.dim] *= size
    return Part(method, tuple(shape), tuple(start), layout, size)


def draw_(parameter: Tensor, name: str, method: Any = None, seed: int = 0) -> None:
    """Draws, in place, what this rank holds of `parameter`: of a DTensor its shard, else all, or the place that a `Part` names.

    >>> weight = torch.nn.Parameter(torch.empty(8, 4))
    >>> draw_(weight, "head.weight", Normal(std=0.02))
    """
    part = as_method(method)
    if not isinstance(part, Part):
        part = Part(part, tuple(parameter.shape), (0,) * parameter.dim())
    start, held, local = list(part.start), tuple(parameter.shape), parameter
    with torch.no_grad():
        if _is_dtensor(parameter):
            held, offset = torch_private.local_box(parameter)
            start = [a + b for a, b in zip(start, offset)]
            local = parameter.to_local()  # type: ignore[attr-defined]
        if len(part.shape) != parameter.dim() or any(s + n > full for s, n, full in zip(start, held, part.shape)):
            raise ValueError(
                f"{name} of shape {held} starting at {tuple(start)} does not lie inside its full shape {part.shape}."
            )
        plain = type(local) in (Tensor, nn.Parameter)
        # A subclass, such as a quantized tensor, takes its whole value at once.
        values = local.detach() if plain else torch.empty(held, dtype=torch.float32, device="cpu")
        for piece in part.layout.pieces(start, held, part.ranks):
            _fill_box(piece.of(values), name, part.shape, as_method(part.method), seed, list(piece.start))
        if not plain and local.numel():
            local.copy_(values.to(local.device))


def _fill_box(out: Tensor, name: str, shape: tuple[int, ...], method: Any, seed: int, start: list[int]) -> None:
    """The box of the full matrix that starts at `start`: drawn, or cut from values that are given."""
    if isinstance(method, _Given):
        out.copy_(method.tensor[tuple(slice(s, s + n) for s, n in zip(start, out.shape))])
    else:
        _draw_into(out, name, shape, method, seed, start)


@torch.no_grad()
def _empty_like(parameter: Any, device: torch.device) -> Tensor:
    """Memory for what this rank holds of `parameter`."""
    if not _is_dtensor(parameter):
        return torch.empty_like(parameter.detach(), device=device)
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(parameter.to_local(), device=device)
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _is_dtensor(tensor: Tensor) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _device_of(tensor: Any, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    kind = tensor.device_mesh.device_type if _is_dtensor(tensor) else "cuda" if torch.cuda.is_available() else "cpu"
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
    with _default_stream(torch_private.generator_state(f"{seed}\0module\0{path}".encode())):
        twin.reset_parameters()

    def copy_buffers() -> None:
        for name, value in twin._buffers.items():
            if value is not None:
                module._buffers[name].copy_(value)

    return {n: _Given(p.detach()) for n, p in twin._parameters.items() if p is not None}, copy_buffers


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
