"""`QuantizedTensor`: a tensor that is stored as bytes and scales.

It is a dictionary of named plain tensors (its buffers) and a `Scheme` that says what they mean. Everything generic (moving,
detaching, cloning, flattening for torch.compile, slicing, printing) is written once over the buffers.

    >>> import torch, ottava
    >>> from ottava import recipe
    >>> q = ottava.quantize(torch.ones(2, 16), recipe.Float8CurrentScaling(), role="input")
    >>> q.rowwise_data.shape, q.rowwise_scale_inv
    (torch.Size([2, 16]), tensor([0.0022]))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ottava import torch_private
from ottava.quant.formats import NAN_BYTE
from ottava.quant.scheme import Scheme

BUFFER_NAMES = (
    "rowwise_data",
    "rowwise_scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "rowwise_amax",
    "columnwise_amax",
)
_ROWWISE = ("rowwise_data", "rowwise_scale_inv", "rowwise_amax")
_COLUMNWISE = ("columnwise_data", "columnwise_scale_inv", "columnwise_amax")

aten = torch.ops.aten


class QuantizedTensor(torch.Tensor):
    """Bytes, scales and a scheme that behave like the tensor of dtype `dtype` they stand for.

    Reading ops that have no quantized form see the dequantized values. Ops that would write raise: the value of a quantized
    tensor changes only through `copy_`, which quantizes again.
    """

    scheme: Scheme
    _parts: dict[str, Tensor]
    _is_slice: bool = False
    """It shares bytes or scales with a larger tensor."""
    _quantizer: Any = None
    """Whose `scales(x)` gives the scale or the amax that `copy_` quantizes x with; None: they follow from x (`compat.quantizers`)."""

    @staticmethod
    def __new__(
        cls,
        parts: dict[str, Tensor],
        scheme: Scheme,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        data = parts["rowwise_data"] if "rowwise_data" in parts else parts["columnwise_data"]
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=data.device, requires_grad=requires_grad
        )
        self._parts = dict(parts)
        self.scheme = scheme
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # ------------------------------------------------------------------------------------------------------------ buffers

    @classmethod
    def from_buffers(
        cls,
        buffers: tuple[Tensor, ...],
        scheme: Scheme,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> QuantizedTensor:
        """From the six tensors that a quantizing op returns, of which the copies asked for are kept."""
        wanted = (*_ROWWISE * rowwise, *_COLUMNWISE * columnwise)
        parts = {name: tensor for name, tensor in zip(BUFFER_NAMES, buffers, strict=True) if name in wanted}
        for name in ("rowwise_amax", "columnwise_amax"):
            if name in parts and not scheme.needs_tensor_amax:
                del parts[name]
        return cls(parts, scheme, shape, dtype)

    def _get(self, name: str) -> Tensor | None:
        return self._parts.get(name)

    @property
    def rowwise_data(self) -> Tensor | None:
        """uint8 [M, K] (E2M1: [M, K/2]); None if dropped."""
        return self._get("rowwise_data")

    @property
    def rowwise_scale_inv(self) -> Tensor | None:
        """Multiply the rowwise values by these to get the original back."""
        return self._get("rowwise_scale_inv")

    @property
    def columnwise_data(self) -> Tensor | None:
        """uint8 [K, M] (E2M1: [K, M/2]); None if dropped."""
        return self._get("columnwise_data")

    @property
    def columnwise_scale_inv(self) -> Tensor | None:
        """As rowwise_scale_inv, of the transpose."""
        return self._get("columnwise_scale_inv")

    @property
    def rowwise_amax(self) -> Tensor | None:
        """float32 [1]: largest magnitude of what was quantized; per-tensor schemes and NVFP4 only."""
        return self._get("rowwise_amax")

    @property
    def has_columnwise(self) -> bool:
        """Whether there is a columnwise copy."""
        return "columnwise_data" in self._parts

    @property
    def stored_quantized(self) -> bool:
        """Whether bytes are all there is, without a master in high precision."""
        return True

    def operand(self, direction: str) -> tuple[Tensor, Tensor, Tensor]:
        """(data, scale_inv, amax) of one direction, "rowwise" or "columnwise": what a GEMM takes."""
        data, scale_inv = self._get(f"{direction}_data"), self._get(f"{direction}_scale_inv")
        if data is None or scale_inv is None:
            raise ValueError(
                f"The {direction} copy of this QuantizedTensor was dropped or never made; it has: {', '.join(self._parts)}."
            )
        amax = self._get(f"{direction}_amax")
        return data, scale_inv, data.new_empty(0, dtype=torch.float32) if amax is None else amax

    def drop_rowwise(self) -> QuantizedTensor:
        """Frees the rowwise copy, in place."""
        return self._drop(_ROWWISE[:2], "columnwise_data")

    def drop_columnwise(self) -> QuantizedTensor:
        """Frees the columnwise copy, in place."""
        return self._drop(_COLUMNWISE, "rowwise_data")

    def _drop(self, names: tuple[str, ...], needed: str) -> QuantizedTensor:
        if needed not in self._parts:
            raise ValueError(f"Cannot drop {names[0]}: it is the only copy left.")
        for name in names:
            self._parts.pop(name, None)
        return self

    # ------------------------------------------------------------------------------------------------------------- values

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of `dtype` (default: the dtype this tensor stands for)."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, dtype)
        return self._values(dtype)

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        """`dequantize` below autograd."""
        dtype = dtype or self.dtype
        direction = "rowwise" if "rowwise_data" in self._parts else "columnwise"
        values = torch.ops.ottava.dequantize(*self.operand(direction), str(self.scheme.along(direction)), dtype)
        return (values if direction == "rowwise" else values.t().contiguous()).reshape(self.shape)

    def requantize_(self, source: Tensor) -> QuantizedTensor:
        """Quantizes `source` (same shape, high precision) into this tensor's buffers, in place, with the scales that its quantizer gives,
        if it has one, or fresh ones."""
        fresh = self._quantized(source.detach().reshape(self.shape))
        for name, tensor in zip(BUFFER_NAMES, fresh, strict=True):
            if name in self._parts:
                self._parts[name].copy_(tensor)
        return self

    def _quantized(self, source: Tensor) -> tuple[Tensor, ...]:
        """The buffers of `source`, quantized as this tensor is, in the directions that it has."""
        flat = source.reshape(_flat_rows(source.shape), source.shape[-1])
        scales = (None, None) if self._quantizer is None else self._quantizer.scales(flat)
        copies = ("rowwise_data" in self._parts, "columnwise_data" in self._parts)
        return torch.ops.ottava.quantize(flat, str(self.scheme), *scales, *copies)

    @property
    def data(self) -> Any:
        """The tensor without its history, as torch has it."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch would exchange a memory that this tensor does not have, and leave bytes and scales as they are.
        if type(value) is not QuantizedTensor:
            plain = value._values() if isinstance(value, QuantizedTensor) else value.detach()
            copies = ("rowwise_data" in self._parts, "columnwise_data" in self._parts)
            value = QuantizedTensor.from_buffers(self._quantized(plain), self.scheme, plain.shape, plain.dtype, *copies)
            value._quantizer = self._quantizer
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._parts, self.scheme = dict(value._parts), value.scheme
        self._is_slice, self._quantizer = value._is_slice, value._quantizer

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ValueError(
            "A part of a QuantizedTensor cannot be assigned: change a high-precision copy and copy_() it in whole."
        )

    def tolist(self) -> Any:
        """The values. (torch has none of a subclass.)"""
        return self.dequantize().tolist()

    def nan_count(self) -> int:
        """How many elements are NaN (8-bit formats; E2M1 has no NaN and counts block scales instead)."""
        direction = "rowwise" if "rowwise_data" in self._parts else "columnwise"
        data, scale, _ = self.operand(direction)
        element = self.scheme.along(direction).element
        if element.dtype is None:
            return int((scale == NAN_BYTE["e4m3"]).sum())
        return int(data.view(element.dtype).float().isnan().sum())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        copies = " + ".join(n.removesuffix("_data") for n in self._parts if n.endswith("_data"))
        scheme = self.scheme.rounded  # how values came here is not what is stored
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"QuantizedTensor({tuple(self.shape)}, {scheme}, {copies}, dtype={self.dtype}, device={self.device}{grad})"
        )

    # --------------------------------------------------------------------------------------- torch.compile, saving, dispatch

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        return [f"_part_{n}" for n in self._parts], (str(self.scheme), self.dtype, self.requires_grad)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_part_"):
            return self._parts[name.removeprefix("_part_")]
        raise AttributeError(f"QuantizedTensor has no attribute {name!r}.")

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: tuple, outer_size: torch.Size, outer_stride: tuple
    ) -> QuantizedTensor:
        scheme, dtype, requires_grad = meta
        parts = {name.removeprefix("_part_"): tensor for name, tensor in inner.items()}
        return QuantizedTensor(parts, Scheme.parse(scheme), outer_size, dtype, requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as plain tensors, a string, a shape and a dtype: `torch.load(weights_only=True)` rebuilds it."""
        return _rebuild, (self._parts, str(self.scheme), tuple(self.shape), self.dtype, self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        return QuantizedTensor.dispatch(func, args, kwargs or {})

    @staticmethod
    def dispatch(func: Any, args: tuple, kwargs: dict) -> Any:
        """The op on bytes and scales where that can be; else on dequantized values, unless it would write into a quantized tensor."""
        handler = QUANTIZED_HANDLERS.get(func)
        if handler is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        refuse_writes(func, written_arguments(func, args, kwargs))
        args, kwargs = torch_private.map_instances(QuantizedTensor, lambda q: q._values(), (args, kwargs))
        return func(*args, **kwargs)

    def _map(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> QuantizedTensor:
        parts = {name: function(tensor) for name, tensor in self._parts.items()}
        other = QuantizedTensor(parts, self.scheme, self.shape, dtype or self.dtype)
        other._quantizer = self._quantizer
        return other


def refuse_writes(func: Any, written: Sequence[Any]) -> None:
    """Raises ValueError if `func` would write into a tensor that is nothing but bytes and scales."""
    if any(isinstance(t, QuantizedTensor) for t in written):
        raise ValueError(
            f"{func} would write into a QuantizedTensor, whose value changes only through copy_(): "
            "update a high-precision master and copy it in (ottava.optimizers.FusedAdam does), or dequantize() first."
        )


def written_arguments(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """What an op writes into, of its arguments and of the lists among them."""
    found: list[Any] = []
    if not (func._schema.is_mutable or func.namespace == "c10d"):
        return found
    for i, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written or _receives(func, argument.name):
            found += torch_private.tree_flatten(args[i] if i < len(args) else kwargs.get(argument.name))[0]
    return found


def _receives(func: Any, argument: str) -> bool:
    """Collectives write without saying so in their schema."""
    tensors = argument == "tensors" and func is not torch.ops.c10d.send.default
    return func.namespace == "c10d" and (tensors or argument.startswith("output"))


@functools.cache
def makes_views(func: Any) -> bool:
    """Whether what an op returns is memory of what it is given."""
    returned = [r.alias_info for r in func._schema.returns]
    return any(info is not None and not info.is_write for info in returned)


class _Dequantize(torch.autograd.Function):
    """Rounding has no derivative; the gradient passes as if there had been none."""

    @staticmethod
    def forward(ctx: Any, q: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype = q.dtype
        return q._values(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


def _rebuild(
    parts: dict[str, Tensor], scheme: str, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> QuantizedTensor:
    return QuantizedTensor(parts, Scheme.parse(scheme), shape, dtype, requires_grad)


torch.serialization.add_safe_globals([_rebuild, QuantizedTensor])


def _flat_rows(shape: torch.Size | tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


# ------------------------------------------------------------------------------------------------------------- op handlers


def values_for(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The values on their way into a tensor of `dtype`: rounded to it once, not to the dtype that `q` stands for before."""
    return q._values(dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32)


def _to_copy(func: Any, q: QuantizedTensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype is not None and dtype != q.dtype:
        return func(values_for(q, dtype), dtype=dtype, **kwargs)
    kwargs.pop("memory_format", None)
    return q._map(lambda t: func(t, **kwargs))


def _copy(func: Any, target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(target, QuantizedTensor):
        return func(target, values_for(source, target.dtype), *args, **kwargs)  # type: ignore[arg-type]
    if target._is_slice:
        raise ValueError(
            "copy_ into a slice of a QuantizedTensor would change scales that the whole shares: copy_() into the whole, or clone() "
            "the slice first."
        )
    if target.shape != source.shape:
        raise ValueError(f"copy_ needs equal shapes: target {tuple(target.shape)}, source {tuple(source.shape)}.")
    if (
        isinstance(source, QuantizedTensor)
        and source.scheme == target.scheme
        and source._parts.keys() >= target._parts.keys()
    ):
        for name, tensor in target._parts.items():
            tensor.copy_(source._parts[name])
        return target
    source = source._values() if isinstance(source, QuantizedTensor) else source
    return target.requantize_(source.to(target.device))


def _slice(
    func: Any, q: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Slices along the first dimension of a matrix stay quantized when they fall on block boundaries."""
    if dim != 0 or q.dim() != 2 or step != 1:
        return NotImplemented
    rows = q.shape[0]
    first, last, _ = slice(start, end).indices(rows)
    last = max(first, last)
    columns = q.scheme.along("columnwise")
    block_rows = q.scheme.row_multiple
    packed = columns.elements_per_byte
    along = columns.block[1] if columns.block else 1
    needed = along if "columnwise_data" in q._parts else block_rows
    if first % needed or (last % needed and last != rows):
        return NotImplemented
    parts = {}
    for name, tensor in q._parts.items():
        if tensor.dim() != 2:  # per-tensor scale or amax
            parts[name] = tensor
        elif name == "rowwise_data":
            parts[name] = tensor[first:last]
        elif name == "columnwise_data":
            parts[name] = tensor[:, first // packed : -(-last // packed)].contiguous()
        elif name == "rowwise_scale_inv":
            parts[name] = tensor[first // block_rows : -(-last // block_rows)]
        else:
            parts[name] = tensor[:, first // along : -(-last // along)].contiguous()
    part = QuantizedTensor(parts, q.scheme, (last - first, q.shape[1]), q.dtype)
    part._is_slice = True
    return part


def _alias(q: QuantizedTensor) -> QuantizedTensor:
    same = q._map(lambda t: t)
    same._is_slice = q._is_slice
    return same


def _view(func: Any, q: QuantizedTensor, shape: Any) -> Any:
    """Only views that keep the last dimension, since blocks lie along it."""
    size = torch.Size(shape)
    missing = [i for i, n in enumerate(size) if n == -1]
    if missing:
        known = 1
        for n in size:
            known *= n if n != -1 else 1
        size = torch.Size([q.numel() // max(known, 1) if n == -1 else n for n in size])
    if not size or size[-1] != q.shape[-1]:
        return NotImplemented  # a reader gets the dequantized values
    if size.numel() != q.numel():
        raise ValueError(
            f"A QuantizedTensor of shape {tuple(q.shape)} cannot be viewed as {tuple(size)}: another size."
        )
    return QuantizedTensor(q._parts, q.scheme, size, q.dtype)


QUANTIZED_HANDLERS: dict[Any, Callable] = {
    aten.detach.default: lambda func, q: _alias(q),
    aten.alias.default: lambda func, q: _alias(q),
    aten.clone.default: lambda func, q, memory_format=None: q._map(torch.clone),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.empty_like.default: lambda func, q, **kwargs: (
        q._map(torch.empty_like)
        if kwargs.get("dtype") in (None, q.dtype) and kwargs.get("device") in (None, q.device)
        else NotImplemented
    ),
}
