"""TransformerEngine's tensor classes, for `isinstance`: Ottava has one class, and the scheme says which of them it would be."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from ottava.compat.quantizers import HybridQuantizer
from ottava.compat.storages import DirectionStorage, IdentityTensorStorage
from ottava.quant.tensor import QuantizedTensor
from ottava.quant.weight import Weight
from ottava.quant.weight_memory import COLUMNWISE, ROWWISE
from ottava.recipe import Recipe

__all__ = [
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
]

HYBRID_RECIPES: WeakValueDictionary[int, Recipe] = WeakValueDictionary()
"""By id: recipes that a `CustomRecipe` of this program stands for and whose weights a `HybridQuantizer` makes. Objects, since others are
equal; not kept, since a program may make one in every step. (A stored weight keeps its own.)"""
IDENTITY_RECIPES: set[Recipe] = set()
"""Recipes of this program that leave everything in high precision: equal ones are one."""


class _OfKind(type):
    """Makes `isinstance(x, Class)` ask for a `QuantizedTensor` whose scheme has the name of the class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        stored = isinstance(instance, QuantizedTensor) and instance.stored_quantized
        bytes_there = stored or isinstance(instance, DirectionStorage)
        return bytes_there and instance.scheme.tensor_class == cls.__name__

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


def _is_hybrid_weight(tensor: Any) -> bool:
    stored = isinstance(tensor, Weight) and tensor.stored_quantized
    return stored and HYBRID_RECIPES.get(id(tensor.memory.recipe)) is tensor.memory.recipe is not None


class _OfHybridRecipe(_OfKind):
    def __instancecheck__(cls, instance: Any) -> bool:
        made = isinstance(instance, QuantizedTensor) and getattr(instance, "_quantizer", None)
        return isinstance(made, HybridQuantizer) or _is_hybrid_weight(instance)


class HybridQuantizedTensor(metaclass=_OfHybridRecipe):
    """A weight that was asked for by a `HybridQuantizer` (all weights of Ottava have both directions), or what one has quantized."""


class _OfHighPrecision(_OfKind):
    def __instancecheck__(cls, instance: Any) -> bool:
        matrix = isinstance(instance, Tensor) and instance.is_floating_point() and instance.dim() == 2
        return bool(IDENTITY_RECIPES) and matrix and not isinstance(instance, QuantizedTensor)


class IdentityTensor(metaclass=_OfHighPrecision):
    """A weight that an `IdentityQuantizer` leaves as it is. In Ottava that is a plain tensor: once the program has made a recipe that
    quantizes nothing, every plain matrix is taken for one."""


# There the bytes without a tensor around them: here the tensor, and its directions (`storages.py`).
QuantizedTensorStorage = QuantizedTensor
Float8TensorStorage = Float8Tensor
Float8BlockwiseQTensorStorage = Float8BlockwiseQTensor
MXFP8TensorStorage = MXFP8Tensor
NVFP4TensorStorage = NVFP4Tensor
HybridQuantizedTensorStorage = HybridQuantizedTensor


# ------------------------------------------------------------------------------- what programs read of TransformerEngine's tensors

# Names of attributes there -> how Ottava's tensor answers.
_ATTRIBUTES: dict[str, Any] = {
    "_data": property(lambda q: _shaped(q)),
    "_scale_inv": property(lambda q: q.rowwise_scale_inv),
    "_rowwise_data": property(lambda q: _shaped(q)),
    "_rowwise_scale_inv": property(lambda q: q.rowwise_scale_inv),
    "_columnwise_data": property(lambda q: q.columnwise_data),
    "_columnwise_scale_inv": property(lambda q: q.columnwise_scale_inv),
    "_rowwise_storage": property(lambda q: _rowwise_storage(q)),
    "_columnwise_storage": property(lambda q: _columnwise_storage(q)),
    "rowwise_sub_storage": property(lambda q: _rowwise_storage(q)),
    "columnwise_sub_storage": property(lambda q: _columnwise_storage(q)),
    "get_usages": lambda q: _usages(q),
    "update_usage": lambda q, rowwise_usage=None, columnwise_usage=None: _update_usage(
        q, rowwise_usage, columnwise_usage
    ),
    "quantize_": lambda q, tensor, *, noop_flag=None: _quantize_into(q, tensor, noop_flag),
}


def _shaped(q: QuantizedTensor) -> Tensor | None:
    """The bytes by rows, in the tensor's own shape (of numbers of four bits: in half of it)."""
    data = q.rowwise_data
    return data if data is None or q.dim() == 2 else data.view(*q.shape[:-1], data.shape[-1])


def _quantize_into(target: QuantizedTensor, tensor: Tensor, noop_flag: Tensor | None) -> QuantizedTensor:
    """`tensor` into `target` by the quantizer that made it, or with fresh scales; nothing if `noop_flag` is not 0."""
    return target if noop_flag is not None and noop_flag.item() else target.requantize_(tensor)


def _usages(q: QuantizedTensor) -> dict[str, bool]:
    """Which copies there are; a parameter has, or can make, both."""
    if isinstance(q, Weight):
        return {ROWWISE: True, COLUMNWISE: True}
    return {ROWWISE: q.rowwise_data is not None, COLUMNWISE: q.columnwise_data is not None}


def _update_usage(q: QuantizedTensor, rowwise: bool | None, columnwise: bool | None) -> None:
    """Frees the copies that are not wanted (False); None leaves one as it is. One that is gone cannot be made again."""
    wanted, there = {ROWWISE: rowwise, COLUMNWISE: columnwise}, _usages(q)
    gone = [direction for direction, want in wanted.items() if want and not there[direction]]
    if gone:
        raise ValueError(
            f"update_usage({gone[0]}_usage=True): the {gone[0]} copy is not there; quantize the tensor again."
        )
    for direction, drop in ((ROWWISE, QuantizedTensor.drop_rowwise), (COLUMNWISE, QuantizedTensor.drop_columnwise)):
        if wanted[direction] is False and there[direction]:
            drop(q)


def _rowwise_storage(tensor: QuantizedTensor) -> Any:
    return DirectionStorage(tensor, ROWWISE) if _usages(tensor)[ROWWISE] else None


def _columnwise_storage(tensor: QuantizedTensor) -> Any:
    """What backward multiplies by: columnwise bytes, or the values where backward is not quantized; None where the copy is not there."""
    if not _usages(tensor)[COLUMNWISE]:
        return None
    if _is_hybrid_weight(tensor) and tensor.memory.recipe.backward_override is not None:  # type: ignore[attr-defined]
        return IdentityTensorStorage(tensor.dequantize())
    return DirectionStorage(tensor, COLUMNWISE)


def lend_attributes() -> None:
    """`QuantizedTensor` answers to TransformerEngine's names of its bytes and scales."""
    for name, attribute in _ATTRIBUTES.items():
        setattr(QuantizedTensor, name, attribute)


def take_attributes_back() -> None:
    """Undoes `lend_attributes`. What programs have made until now is nothing to the next."""
    for name in _ATTRIBUTES:
        delattr(QuantizedTensor, name)
    HYBRID_RECIPES.clear()
    IDENTITY_RECIPES.clear()
