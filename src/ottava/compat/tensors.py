"""TransformerEngine's tensor classes, for `isinstance`: Ottava has one class, and the scheme says which of them it would be."""

from __future__ import annotations

from typing import Any

from ottava.quant.tensor import QuantizedTensor

__all__ = ["Float8BlockwiseQTensor", "Float8Tensor", "MXFP8Tensor", "NVFP4Tensor", "QuantizedTensor"]


class _OfKind(type):
    """Makes `isinstance(x, Class)` ask for a `QuantizedTensor` whose scheme has the name of the class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, QuantizedTensor) and instance.scheme.tensor_class == cls.__name__

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
