"""`Scheme`: how one tensor is quantized, as one comparable, printable value.

A scheme names the element format, the block of elements that shares a scale, and the options that change bytes. Custom ops
carry its string, so the same word appears in an op's schema, in a module's `extra_repr` and in a checkpoint.

    >>> from ottava.quant.scheme import Scheme
    >>> str(Scheme("e4m3", (1, 128), power_of_two=True))
    'e4m3:1x128:pow2'
    >>> Scheme.parse("e5m2:tensor").element.max
    57344.0

[Note: two ways] A matrix may be quantized in one way rowwise and in another columnwise (`recipe.HybridScaling`). Its scheme then is that
of the rowwise copy, and has that of the columnwise one in `columns`. What it answers about elements, blocks and scales is true of rows
only, so who works on one direction asks `along(direction)`. Ops that quantize take the whole of it, all others one direction's.

    >>> str(Scheme.parse("e4m3:1x32/e4m3:tensor").along("columnwise"))
    'e4m3:tensor'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ottava.quant.formats import ELEMENTS, Element, e8m0_to_float
from ottava.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    HybridScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

ROLES = ("input", "weight", "grad")
DIRECTIONS = ("rowwise", "columnwise")


class GatherDims(NamedTuple):
    """The dimension along which the tokens of one direction lie: in its bytes, and in its scales (None: one scale for all)."""

    data: int
    scale: int | None


@dataclass(frozen=True)
class Scheme:
    """Element format, block shape and options of one quantization."""

    format: str
    """Name of the element format: "e4m3", "e5m2" or "e2m1"."""
    block: tuple[int, int] | None = None
    """Rows x columns that share a scale; None: the whole tensor."""
    power_of_two: bool = False
    """Round scales down to a power of two."""
    epsilon: float = 0.0
    """Smallest amax that a scale is computed from."""
    hadamard: bool = False
    """Apply a 16-point random Hadamard transform to the columnwise copy (E2M1)."""
    stochastic: bool = False
    """Round stochastically (E2M1)."""
    from_float32: bool = False
    """A fused producer hands its float32 result over without rounding it to the activation dtype first."""
    columns: Scheme | None = None
    """[Note: two ways]; None: both copies are made alike."""

    def along(self, direction: str) -> Scheme:
        """That of one direction."""
        if self.columns is None:
            return self
        return self.columns if direction == "columnwise" else self._with(self.from_float32, None)

    def _with(self, from_float32: bool, columns: Scheme | None) -> Scheme:
        """Written out: dynamo of torch 2.11 cannot trace `dataclasses.replace` of a frozen dataclass."""
        options = self.power_of_two, self.epsilon, self.hadamard, self.stochastic
        return Scheme(self.format, self.block, *options, from_float32, columns)

    @property
    def element(self) -> Element:
        """The element format."""
        return ELEMENTS[self.format]

    @property
    def per_tensor(self) -> bool:
        """One scale for the whole tensor."""
        return self.block is None

    @property
    def kind(self) -> str:
        """Which scaling rule of numerics applies: "tensor", "block", "mx" or "nvfp4"."""
        if self.block is None:
            return "tensor"
        if self.format == "e2m1":
            return "nvfp4"
        return "mx" if self.block[1] == 32 else "block"

    @property
    def tensor_class(self) -> str:
        """What TransformerEngine calls the class of a tensor that is quantized so."""
        return _TENSOR_CLASSES[self.kind]

    @property
    def transposable(self) -> bool:
        """The columnwise copy is the transpose of the rowwise one: square blocks and whole tensors."""
        if self.columns is not None:
            return False
        return self.block is None or (self.block[0] == self.block[1] and not self.hadamard)

    def same_bytes(self, other: Scheme) -> bool:
        """Whether a GEMM that wants operands in `other` can take those in this scheme: same elements, same blocks."""
        return self._layout == other._layout

    @property
    def two_copies(self) -> bool:
        """Rowwise and columnwise bytes differ: blocks that lie along one dimension, a transform of one direction, two ways."""
        return not self.transposable

    @property
    def needs_tensor_amax(self) -> bool:
        """A scale depends on the largest magnitude of the whole tensor: one scale a tensor, and NVFP4's second one."""
        return (
            self.block is None or self.format == "e2m1" or (self.columns is not None and self.columns.needs_tensor_amax)
        )

    @property
    def of_tensor(self) -> Scheme | None:
        """That of a direction which has one scale for the whole tensor, if there is one."""
        return self if self.block is None else self.columns.of_tensor if self.columns is not None else None

    @property
    def feature_multiple(self) -> int:
        """What both sizes of a matrix must be a multiple of to be multiplied in this scheme."""
        own = 32 if self.kind == "mx" else 16
        return own if self.columns is None else max(own, self.columns.feature_multiple)

    @property
    def row_multiple(self) -> int:
        """Rows of the rowwise copy that share a scale: it may be cut between multiples of them."""
        return 1 if self.block is None else self.block[0]

    @property
    def elements_per_byte(self) -> int:
        """Elements that one byte of data holds."""
        return 8 // self.element.bits

    @property
    def scale_dtype(self) -> torch.dtype:
        """float32, or uint8 for E8M0 (MX) and E4M3 (NVFP4) block scales."""
        return torch.uint8 if self.kind in ("mx", "nvfp4") else torch.float32

    def scales_as_float(self, scale_inv: torch.Tensor) -> torch.Tensor:
        """Block or tensor scales as float32, whatever they are stored as."""
        if self.kind == "mx":
            return e8m0_to_float(scale_inv)
        return scale_inv.view(torch.float8_e4m3fn).float() if self.kind == "nvfp4" else scale_inv.float()

    @property
    def rounded(self) -> Scheme:
        """This scheme for values that were rounded to the activation dtype first: how a stored or printed tensor is called."""
        if not self.from_float32 and self.columns is None:
            return self
        return self._with(False, None if self.columns is None else self.columns.rounded)

    @property
    def _layout(self) -> tuple:
        """What bytes mean, without how they came about."""
        return self.format, self.block, None if self.columns is None else self.columns._layout

    def fills_blocks(self, tokens: int) -> bool:
        """Whether columnwise blocks end where `tokens` rows do. Else a block needs rows that another rank may hold."""
        block = self.block if self.columns is None else self.columns.block
        return block is None or tokens % block[1] == 0

    def gather_dims(self, direction: str) -> GatherDims:
        """Along which dimension parts of a tensor that hold different tokens are concatenated.

        >>> Scheme.parse("e4m3:1x128").gather_dims("columnwise")
        GatherDims(data=1, scale=1)
        """
        if direction not in DIRECTIONS:
            raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}.")
        dim = 0 if direction == "rowwise" else 1
        return GatherDims(dim, None if self.block is None else dim)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the rowwise scales of a matrix [rows, columns]; of the columnwise ones with the sizes exchanged.

        >>> Scheme.parse("e4m3:128x128").scale_shape(256, 300)
        (2, 3)
        """
        if self.block is None:
            return (1,)
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    def __hash__(self) -> int:
        return hash((self.format, self.block))  # two fields tell schemes apart well enough, and `str` hashes often

    def __str__(self) -> str:
        if torch.compiler.is_compiling():
            return self._spell()
        text = _TEXTS.get(self)  # ops carry the string: modules spell each scheme several times in a forward pass
        if text is None:
            text = _TEXTS[self] = self._spell()
        return text

    def _spell(self) -> str:
        parts = [self.format, "tensor" if self.block is None else f"{self.block[0]}x{self.block[1]}"]
        parts += ["pow2"] * self.power_of_two
        if self.epsilon != 0.0:  # not `[...] * condition`: torch.compile(dynamic=True) cannot print a symbolic 0.0
            parts.append(f"eps={self.epsilon!r}")
        parts += ["rht"] * self.hadamard + ["stochastic"] * self.stochastic + ["f32"] * self.from_float32
        return ":".join(parts) + ("" if self.columns is None else f"/{self.columns._spell()}")

    def as_bytes(self, device: Any = None) -> torch.Tensor:
        """What the bytes of a stored tensor mean (element format and block), as text in a tensor: uint8 [24]."""
        columns = None if self.columns is None else Scheme(self.columns.format, self.columns.block)
        text = str(Scheme(self.format, self.block, columns=columns)).encode().ljust(24, b"\0")
        return torch.tensor(list(text), dtype=torch.uint8, device=device)

    @staticmethod
    def parse(text: str) -> Scheme:
        """The scheme whose string is `text`."""
        return _parse(text)

    @staticmethod
    def of(recipe: Recipe, role: str) -> Scheme:
        """The scheme that `recipe` gives to inputs, weights or gradients (`role`)."""
        if role not in ROLES:
            raise ValueError(f"role must be one of {ROLES}, got {role!r}.")
        for kind, make in _MAKERS.items():
            if isinstance(recipe, kind):
                return make(recipe, role)
        check_is_recipe(recipe)
        raise ValueError(f"Unknown recipe {type(recipe).__name__}; known: {', '.join(k.__name__ for k in _MAKERS)}.")


def check_is_recipe(recipe: Any, who: str = "") -> None:
    """Raises ValueError, which begins with `who`, for what is no recipe; above all for a recipe's class.

    >>> check_is_recipe(recipe.DelayedScaling, "autocast: ")
    Traceback (most recent call last):
    ValueError: autocast: recipe must be one of ottava.recipe's recipes, got the class DelayedScaling: write DelayedScaling().
    """
    if isinstance(recipe, Recipe):
        return
    given = f"{type(recipe).__name__}; for example recipe=ottava.recipe.Float8CurrentScaling()"
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        given = f"the class {recipe.__name__}: write {recipe.__name__}()"
    raise ValueError(f"{who}recipe must be one of ottava.recipe's recipes, got {given}.")


_TEXTS: dict[Scheme, str] = {}
_TENSOR_CLASSES = {
    "tensor": "Float8Tensor",
    "block": "Float8BlockwiseQTensor",
    "mx": "MXFP8Tensor",
    "nvfp4": "NVFP4Tensor",
}


def weight_scheme(recipe: Recipe) -> Scheme:
    """That of weights, which no fused producer hands over: by `quantized_model_init`, or by who shards a model."""
    return Scheme.of(recipe, "weight").rounded


@lru_cache(maxsize=256)
def _parse(text: str) -> Scheme:
    rows, _, columns = text.partition("/")
    fmt, shape, *options = rows.split(":")
    if fmt not in ELEMENTS:
        raise ValueError(f"Unknown element format {fmt!r} in scheme {text!r}; known: {', '.join(ELEMENTS)}.")
    block = None if shape == "tensor" else tuple(int(n) for n in shape.split("x"))
    epsilon = next((float(o[4:]) for o in options if o.startswith("eps=")), 0.0)
    return Scheme(
        fmt,
        block,  # type: ignore[arg-type]
        power_of_two="pow2" in options,
        epsilon=epsilon,
        hadamard="rht" in options,
        stochastic="stochastic" in options,
        from_float32="f32" in options,
        columns=_parse(columns) if columns else None,
    )


def _format(recipe: Any, role: str) -> str:
    return recipe.fp8_format.backward if role == "grad" else recipe.fp8_format.forward


def _qparams(recipe: Any, role: str) -> QParams:
    return {
        "input": recipe.fp8_quant_fwd_inp,
        "weight": recipe.fp8_quant_fwd_weight,
        "grad": recipe.fp8_quant_bwd_grad,
    }[role]


def _delayed(recipe: DelayedScaling, role: str) -> Scheme:
    return Scheme(_format(recipe, role), from_float32=True)


def _current(recipe: Float8CurrentScaling, role: str) -> Scheme:
    q = _qparams(recipe, role)
    return Scheme(_format(recipe, role), power_of_two=q.power_2_scale, epsilon=q.amax_epsilon)


def _block(recipe: Float8BlockScaling, role: str) -> Scheme:
    q = _qparams(recipe, role)
    dims = {
        "input": recipe.x_block_scaling_dim,
        "weight": recipe.w_block_scaling_dim,
        "grad": recipe.grad_block_scaling_dim,
    }
    block = (1, 128) if dims[role] == 1 else (128, 128)
    return Scheme(_format(recipe, role), block, power_of_two=q.power_2_scale, epsilon=q.amax_epsilon)


def _mxfp8(recipe: MXFP8BlockScaling, role: str) -> Scheme:
    return Scheme(_format(recipe, role), (1, 32), from_float32=True)


def _nvfp4(recipe: NVFP4BlockScaling, role: str) -> Scheme:
    q = {
        "input": recipe.fp4_quant_fwd_inp,
        "weight": recipe.fp4_quant_fwd_weight,
        "grad": recipe.fp4_quant_bwd_grad,
    }[role]
    block = (16, 16) if q.fp4_2d_quantization else (1, 16)
    return Scheme("e2m1", block, hadamard=q.random_hadamard_transform, stochastic=q.stochastic_rounding)


def _hybrid(recipe: HybridScaling, role: str) -> Scheme:
    backward = Scheme.of(recipe.backward, role)
    forward = backward if role == "grad" else Scheme.of(recipe.forward, role)
    return forward if forward == backward else replace(forward, columns=backward)


_MAKERS: dict[type, Callable[[Any, str], Scheme]] = {
    DelayedScaling: _delayed,
    Float8CurrentScaling: _current,
    Float8BlockScaling: _block,
    MXFP8BlockScaling: _mxfp8,
    NVFP4BlockScaling: _nvfp4,
    HybridScaling: _hybrid,
}
