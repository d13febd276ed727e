"""TransformerEngine's tensor classes, for `isinstance`: Ottava has one class, and the scheme says which of them it would be."""

from __future__ import annotations

from typing import Any

from ottava.quant.scheme import Scheme
from ottava.quant.tensor import QuantizedTensor

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
]

HYBRID_SCHEMES: set[Scheme] = set()
"""Schemes of weights that a `CustomRecipe` of this program has asked for by a `HybridQuantizer`."""


class _OfKind(type):
    """Makes `isinstance(x, Class)` ask for a `QuantizedTensor` whose scheme has the name of the class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        stored = isinstance(instance, QuantizedTensor) and instance.stored_quantized
        return stored and instance.scheme.tensor_class == cls.__name__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{cls.__name__} cannot be constructed here: use ottava.quantize(x, recipe, role=...).")


class Float8Tensor(metaclass=_OfKind):
    """One scale a tensor: `DelayedScaling`, `Float8CurrentScaling`."""


class Float8BlockwiseQTensor(metaclass=_OfKind):
    """Blocks of 128: `Float8BlockScaling`."""


class MXFP8Tensor(metaclass=_OfKind):
    """Blocks of 32: `MXFP8BlockScaling`."""


class NVFP4Tensor(metaclass=_OfKind):
    """Blocks of 16: `NVFP4BlockScaling`."""


class _OfHybridScheme(_OfKind):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, QuantizedTensor) and instance.stored_quantized and instance.scheme in HYBRID_SCHEMES


class HybridQuantizedTensor(metaclass=_OfHybridScheme):
    """A weight that was asked for by a `HybridQuantizer`. (All weights of Ottava have both directions.)"""


# There the bytes without a tensor around them. Ottava has no such thing: what has the bytes is the tensor.
QuantizedTensorStorage = QuantizedTensor
Float8TensorStorage = Float8Tensor
Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor
MXFP8TensorStorage = MXFP8Tensor
NVFP4TensorStorage = NVFP4Tensor
HybridQuantizedTensorStorage = HybridQuantizedTensor


# ------------------------------------------------------------------------------- what programs read of TransformerEngine's tensors

# Names of attributes there -> how Ottava's tensor answers.
_ATTRIBUTES: dict[str, Any] = {
    "_data": property(lambda q: q.rowwise_data),
    "_scale_inv": property(lambda q: q.rowwise_scale_inv),
    "_rowwise_data": property(lambda q: q.rowwise_data),
    "_rowwise_scale_inv": property(lambda q: q.rowwise_scale_inv),
    "_columnwise_data": property(lambda q: q.columnwise_data),
    "_columnwise_scale_inv": property(lambda q: q.columnwise_scale_inv),
    "_rowwise_storage": property(lambda q: q),
    "_columnwise_storage": property(lambda q: q),
    "quantize_": lambda q, tensor: q.requantize_(tensor),
}


def lend_attributes() -> None:
    """`QuantizedTensor` answers to TransformerEngine's names of its bytes and scales."""
    for name, attribute in _ATTRIBUTES.items():
        setattr(QuantizedTensor, name, attribute)


def take_attributes_back() -> None:
    """Undoes `lend_attributes`."""
    for name in _ATTRIBUTES:
        delattr(QuantizedTensor, name)
