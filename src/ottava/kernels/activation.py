"""Activations, gated or not, forward and backward, alone or fused with quantization.

A gated activation splits its input [M, 2F] in halves and returns act(first) * second. Everything is computed in float32 from
IEEE basic operations (see `elementary.py`), so all devices agree to the bit.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ottava.kernels import tally
from ottava.kernels.cast import BufferTensors, each_direction, fake_buffers, reference_buffers
from ottava.kernels.elementary import sigmoid, tanh
from ottava.kernels.fixed_order import sum_rows
from ottava.kernels.registry import define, without_gradients
from ottava.quant.scaling import amax_of
from ottava.quant.scheme import Scheme

GELU_A, GELU_B = 0.79788456, 0.03567741  # sqrt(2/pi), and that times 0.044715
GELU_C = 0.1070322243  # three times GELU_B
QGELU_A = 1.702


def _gelu(x: Tensor) -> Tensor:
    return x * (0.5 + 0.5 * tanh(x * (GELU_A + GELU_B * (x * x))))


def _dgelu(x: Tensor) -> Tensor:
    t = tanh(x * (GELU_A + GELU_B * (x * x)))
    return (0.5 * x) * ((1.0 - t * t) * (GELU_A + GELU_C * (x * x))) + 0.5 * (1.0 + t)


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def _dsigmoid(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return s * (1.0 - s)


def _dsilu(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return (x * (s * (1.0 - s))) + s


def _qgelu(x: Tensor) -> Tensor:
    return x * sigmoid(QGELU_A * x)


def _dqgelu(x: Tensor) -> Tensor:
    s = sigmoid(QGELU_A * x)
    return ((QGELU_A * x) * (s * (1.0 - s))) + s


def _relu(x: Tensor) -> Tensor:
    return torch.where(x <= 0, torch.zeros_like(x), x)  # not clamp: NaN must stay NaN


def _drelu(x: Tensor) -> Tensor:
    return (x > 0).float()


def _srelu(x: Tensor) -> Tensor:
    r = _relu(x)
    return r * r


def _dsrelu(x: Tensor) -> Tensor:
    return 2.0 * _relu(x)


@dataclass(frozen=True)
class Activation:
    """One activation by its name."""

    base: str
    gated: bool
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


_BASES = {
    "gelu": (_gelu, _dgelu),
    "qgelu": (_qgelu, _dqgelu),
    "relu": (_relu, _drelu),
    "silu": (_silu, _dsilu),
    "srelu": (_srelu, _dsrelu),
}
_GATES = _BASES | {"sigmoid": (sigmoid, _dsigmoid)}
_GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "swiglu": "silu", "sreglu": "srelu", "glu": "sigmoid"}

ACTIVATIONS = {name: Activation(name, False, *functions) for name, functions in _BASES.items()}
ACTIVATIONS |= {name: Activation(base, True, *_GATES[base]) for name, base in _GATED.items()}


def get(name: str) -> Activation:
    """The activation called `name`; a ValueError that names the nearest one if there is none."""
    if name not in ACTIVATIONS:
        near = difflib.get_close_matches(str(name), ACTIVATIONS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown activation {name!r}.{hint} Known: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def output_width(width: int, activation: Activation) -> int:
    """Columns of the activation's output for `width` columns of input."""
    return width // 2 if activation.gated else width


def _values(h: Tensor, activation: Activation) -> Tensor:
    """float32 [M, F]."""
    if not activation.gated:
        return activation.function(h.float())
    gate, up = h.float().chunk(2, dim=-1)
    return activation.function(gate) * up


def _gradient_values(dy: Tensor, h: Tensor, activation: Activation) -> Tensor:
    """float32 gradient of h: [M, F], or [M, 2F] if gated."""
    dy32 = dy.float()
    if not activation.gated:
        return dy32 * activation.derivative(h.float())
    gate, up = h.float().chunk(2, dim=-1)
    return torch.cat([(dy32 * up) * activation.derivative(gate), dy32 * activation.function(gate)], dim=-1)


# --------------------------------------------------------------------------------------------------------------- forward


def _forward(h: Tensor, name: str) -> Tensor:
    return _values(h, get(name)).to(h.dtype)


def _forward_fake(h: Tensor, name: str) -> Tensor:
    return h.new_empty(h.shape[0], output_width(h.shape[1], get(name)))


def _forward_cuda(h: Tensor, name: str) -> Tensor:
    import ottava.kernels.tile as tile

    return tile.store(tile.Activation(h, get(name)), h.dtype)


forward = define("activation", _forward, _forward_fake, _forward_cuda, cuda_launches=True)


def _amax(h: Tensor, name: str) -> Tensor:
    """float32 [1]: of the unrounded output, which is what current scaling takes its scale from."""
    return amax_of(_values(h, get(name)))


def _amax_cuda(h: Tensor, name: str) -> Tensor:
    import ottava.kernels.tile as tile

    return tile.amax(tile.Activation(h, get(name)))


amax = define(
    "activation_amax", _amax, lambda h, name: h.new_empty(1, dtype=torch.float32), _amax_cuda, cuda_launches=True
)


def _quantize(
    h: Tensor, name: str, scheme: str, scale: Tensor | None, amax: Tensor | None, rowwise: bool, columnwise: bool
) -> BufferTensors:
    """The activation's output, quantized. Current scaling takes its scale from the float32 amax, then quantizes rounded values."""
    parsed = Scheme.parse(scheme)
    if parsed.columns is not None:
        again = torch.ops.ottava.activation_quantize
        return each_direction(h, parsed, rowwise, columnwise, lambda s, r, c: again(h, name, str(s), scale, amax, r, c))
    values = _values(h, get(name))
    if parsed.per_tensor and scale is None and amax is None:
        amax = amax_of(values)
    values = values if parsed.from_float32 else values.to(h.dtype)
    return reference_buffers(values, parsed, scale, amax, rowwise, columnwise, h.dtype)


def _quantize_fake(
    h: Tensor, name: str, scheme: str, scale: Tensor | None, amax: Tensor | None, rowwise: bool, columnwise: bool
) -> BufferTensors:
    return fake_buffers(h, h.shape[0], output_width(h.shape[1], get(name)), Scheme.parse(scheme), rowwise, columnwise)


def _quantize_cuda(
    h: Tensor, name: str, scheme: str, scale: Tensor | None, amax: Tensor | None, rowwise: bool, columnwise: bool
) -> BufferTensors:
    import ottava.kernels.tile as tile

    made = tile.quantize(tile.Activation(h, get(name)), scheme, scale, amax, rowwise, columnwise)
    return _QUANTIZE(h, name, scheme, scale, amax, rowwise, columnwise) if made is None else made


_QUANTIZE = without_gradients(_quantize)
quantize = define("activation_quantize", _quantize, _quantize_fake, _quantize_cuda, cuda_launches=True)


# -------------------------------------------------------------------------------------------------------------- backward


def _backward(dy: Tensor, h: Tensor, name: str) -> Tensor:
    return _gradient_values(dy, h, get(name)).to(h.dtype)


def _backward_cuda(dy: Tensor, h: Tensor, name: str) -> Tensor:
    import ottava.kernels.tile as tile

    return tile.store(tile.ActivationBackward(dy, h, get(name)), h.dtype)


backward = define(
    "activation_backward", _backward, lambda dy, h, name: torch.empty_like(h), _backward_cuda, cuda_launches=True
)


# `Buffers` and the column sum, as an op's schema can say it.
BuffersAndSum = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _backward_quantize(
    dy: Tensor,
    h: Tensor,
    name: str,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    column_sum: bool,
) -> BuffersAndSum:
    """The gradient of h, quantized; and, if asked, its sum over rows in h's dtype (the bias gradient of the GEMM that made h)."""
    parsed = Scheme.parse(scheme)
    values = _gradient_values(dy, h, get(name))
    values = values if parsed.from_float32 else values.to(h.dtype)
    buffers = reference_buffers(values, parsed, scale, amax, rowwise, columnwise, h.dtype)
    return *buffers, sum_rows(values.float()).to(h.dtype) if column_sum else h.new_empty(0)


def _backward_quantize_fake(
    dy: Tensor,
    h: Tensor,
    name: str,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    column_sum: bool,
) -> BuffersAndSum:
    buffers = fake_buffers(h, h.shape[0], h.shape[1], Scheme.parse(scheme), rowwise, columnwise)
    return *buffers, h.new_empty(h.shape[1] if column_sum else 0)


def _backward_quantize_cuda(
    dy: Tensor,
    h: Tensor,
    name: str,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    column_sum: bool,
) -> BuffersAndSum:
    import ottava.kernels.tile as tile

    sums = h.new_empty(h.shape[1], dtype=torch.float32) if column_sum else None
    made = tile.quantize(tile.ActivationBackward(dy, h, get(name)), scheme, scale, amax, rowwise, columnwise, sums)
    if made is None:
        return _BACKWARD_QUANTIZE(dy, h, name, scheme, scale, amax, rowwise, columnwise, column_sum)
    return *made, h.new_empty(0) if sums is None else sums.to(h.dtype)


_BACKWARD_QUANTIZE = without_gradients(_backward_quantize)
backward_quantize = define(
    "activation_backward_quantize",
    _backward_quantize,
    _backward_quantize_fake,
    _backward_quantize_cuda,
    cuda_launches=True,
)


# `BuffersAndSum`, and (data, scale_inv, amax) of a columnwise copy.
BuffersSumAndOutput = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _backward_with_output(
    dy: Tensor,
    h: Tensor,
    name: str,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    column_sum: bool,
    output_scheme: str,
    output_scale: Tensor | None,
    output_amax: Tensor | None,
) -> BuffersSumAndOutput:
    """`activation_backward_quantize`; and the columnwise copy of the activation's output, as forward made or would have made it."""
    gradients = _backward_quantize(dy, h, name, scheme, scale, amax, rowwise, columnwise, column_sum)
    with tally.again():
        output = _quantize(h, name, output_scheme, output_scale, output_amax, False, True)
    return *gradients, output[2], output[3], output[5]


def _backward_with_output_fake(
    dy: Tensor,
    h: Tensor,
    name: str,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    column_sum: bool,
    output_scheme: str,
    output_scale: Tensor | None,
    output_amax: Tensor | None,
) -> BuffersSumAndOutput:
    gradients = _backward_quantize_fake(dy, h, name, scheme, scale, amax, rowwise, columnwise, column_sum)
    output = _quantize_fake(h, name, output_scheme, output_scale, output_amax, False, True)
    return *gradients, output[2], output[3], output[5]


def _backward_with_output_cuda(
    dy: Tensor,
    h: Tensor,
    name: str,
    scheme: str,
    scale: Tensor | None,
    amax: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    column_sum: bool,
    output_scheme: str,
    output_scale: Tensor | None,
    output_amax: Tensor | None,
) -> BuffersSumAndOutput:
    import ottava.kernels.tile as tile

    parsed, activation = Scheme.parse(scheme), get(name)
    output = Scheme.parse(output_scheme)
    known = output_scale is not None or output_amax is not None or not output.per_tensor
    if known and tile.ActivationBackwardWithOutput.fits(h, parsed, output):
        if parsed.per_tensor and scale is None and amax is None:
            amax = tile.amax(tile.ActivationBackward(dy, h, activation))
        sums = h.new_empty(h.shape[1], dtype=torch.float32) if column_sum else None
        producer = tile.ActivationBackwardWithOutput(dy, h, activation, output_scheme, output_scale, output_amax)
        made = tile.quantize(producer, scheme, scale, amax, rowwise, columnwise, sums)
        if made is not None:
            return *made, h.new_empty(0) if sums is None else sums.to(h.dtype), *producer.made()
    gradients = _backward_quantize_cuda(dy, h, name, scheme, scale, amax, rowwise, columnwise, column_sum)
    with tally.again():
        again = _quantize_cuda(h, name, output_scheme, output_scale, output_amax, False, True)
    return *gradients, again[2], again[3], again[5]


backward_with_output = define(
    "activation_backward_with_output",
    _backward_with_output,
    _backward_with_output_fake,
    _backward_with_output_cuda,
    cuda_launches=True,
)
