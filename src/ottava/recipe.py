"""What the user asks for: how tensors become FP8. Frozen dataclasses, nothing else.

Field names and defaults are TransformerEngine's, so a script written for it reads the same here.

    >>> from ottava import recipe
    >>> recipe.DelayedScaling(amax_history_len=16).fp8_format
    <Format.HYBRID: ...>
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "HybridScaling",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "UnknownFieldError",
]


class _Maxima(NamedTuple):
    """Largest finite magnitude of the forward and of the backward element format, and which pass is which."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Element format of the forward and backward tensors; HYBRID is e4m3 forward, e5m2 for gradients."""

    E2M1 = _Maxima(6, 6)
    E4M3 = _Maxima(448, 448)
    E5M2 = _Maxima(57344, 57344)
    HYBRID = _Maxima(448, 57344)

    @property
    def forward(self) -> str:
        """Name of the element format of inputs and weights: "e4m3", "e5m2" or "e2m1"."""
        return "e4m3" if self is Format.HYBRID else self.name.lower()

    @property
    def backward(self) -> str:
        """Name of the element format of gradients."""
        return "e5m2" if self is Format.HYBRID else self.name.lower()


class UnknownFieldError(ValueError, TypeError):
    """A keyword that the recipe does not have. Both a ValueError (ours) and a TypeError (what dataclasses raise)."""


@dataclass(frozen=True)
class MMParams:
    """How a GEMM accumulates: split (float32 promotion) or fast."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How one kind of tensor is quantized."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


_BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Recipe:
    """Base of all recipes."""

    fp8_dpa: bool = False
    fp8_mha: bool = False
    quantizes = True
    """Whether contexts that are given it have anything to switch on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Recipe:
        names = list(getattr(cls, "__dataclass_fields__", {}))
        for name in kwargs:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UnknownFieldError(
                    f"{cls.__name__} has no field {name!r}.{hint} Its fields are: {', '.join(names)}."
                )
        return super().__new__(cls)

    # TransformerEngine scripts ask a recipe what it is by these names.
    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from the amax history of earlier steps."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether scales come from the tensor itself, one a tensor."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether there is one scale for a whole tensor."""
        return issubclass(cls, DelayedScaling | Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether scales belong to blocks of 128."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether scales belong to 1x32 blocks with E8M0 exponents."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether elements are E2M1 with E4M3 block scales."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether TransformerEngine has it as a `CustomRecipe` alone."""
        return issubclass(cls, HybridScaling)

    def _refuse(self, why: str, *names: str) -> None:
        """Fields of TransformerEngine that can only be left as they are."""
        for name in names:
            given, only = getattr(self, name), type(self).__dataclass_fields__[name].default  # type: ignore[attr-defined]
            _check(
                given == only, f"{type(self).__name__}: {name}={given!r} is not offered: {why}. Leave {name}={only!r}."
            )

    def _check_common(self) -> None:
        name = type(self).__name__
        fmt = getattr(self, "fp8_format", Format.HYBRID)
        _check(isinstance(fmt, Format), f"{name}: fp8_format must be an ottava.recipe.Format, got {fmt!r}.")
        _check(
            fmt in (Format.E4M3, Format.HYBRID),
            f"{name}: fp8_format must be Format.E4M3 or Format.HYBRID, got {fmt}: training needs e4m3 in the forward pass.",
        )
        override = getattr(self, "backward_override", None)
        _check(
            override in _BACKWARD_OVERRIDES,
            f"{name}: backward_override must be one of {_BACKWARD_OVERRIDES}, got {override!r}.",
        )
        for field in ("fp8_dpa", "fp8_mha"):
            _check(
                not getattr(self, field, False) or self.float8_per_tensor_scaling(),
                f"{name}: {field}=True asks for FP8 attention, which has one scale a tensor. Leave {field}=False, or use DelayedScaling "
                "or Float8CurrentScaling.",
            )


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale a tensor, from the amax history of earlier steps: one pass over the data.

    `amax_compute_algo`: "max" over the window, "most_recent", or a function `(history[len, n]) -> amax[n]`.
    `scaling_factor_compute_algo`: None for `fp8_max / 2**margin / amax`, or a function `(amax, old_scale, fp8_max, recipe) -> scale`.
    `reduce_amax`: MAX-reduce amax over the group given to `autocast`.
    `fp8_dpa`: attention's forward in FP8, where a kernel does that and is faster; its scales are those of the tensors at hand.
    `fp8_mha`: the same (docs/recipes.md, "FP8 attention").
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check_common()
        _check(
            isinstance(self.amax_history_len, int) and self.amax_history_len >= 1,
            f"DelayedScaling: amax_history_len must be an integer of at least 1, got {self.amax_history_len!r}.",
        )
        _check(
            callable(self.amax_compute_algo) or self.amax_compute_algo in ("max", "most_recent"),
            f"DelayedScaling: amax_compute_algo must be 'max', 'most_recent' or a function, got {self.amax_compute_algo!r}.",
        )
        _check(
            self.backward_override is None,
            f"DelayedScaling: backward_override must be None, got {self.backward_override!r}.",
        )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from the tensor's own amax: two passes over the data, no state.

    `fp8_dpa`, `fp8_mha`: attention's forward in FP8, see `DelayedScaling`.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    def __post_init__(self) -> None:
        self._check_common()
        _fill_qparams(self, QParams(power_2_scale=self.use_power_2_scales))


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """One scale a block of 128: 1x128 for inputs and gradients, 128x128 for weights. Scales are powers of two."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    fp8_quant_fwd_inp: QParams | None = None
    fp8_quant_fwd_weight: QParams | None = None
    fp8_quant_bwd_grad: QParams | None = None

    def __post_init__(self) -> None:
        self._check_common()
        _fill_qparams(self, QParams(power_2_scale=not self.use_f32_scales))
        dims = {n: getattr(self, f"{n}_block_scaling_dim") for n in ("x", "w", "grad")}
        for name, dim in dims.items():
            _check(dim in (1, 2), f"Float8BlockScaling: {name}_block_scaling_dim must be 1 or 2, got {dim!r}.")
        _check(
            sum(dim == 2 for dim in dims.values()) <= 1,
            f"Float8BlockScaling: two operands of one GEMM cannot both have 128x128 blocks, got {dims}.",
        )
        for gemm in ("fprop", "dgrad", "wgrad"):
            _check(
                getattr(self, f"fp8_gemm_{gemm}").use_split_accumulator,
                f"Float8BlockScaling: fp8_gemm_{gemm} must use the split accumulator.",
            )


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale (E8M0) a 1x32 block. Runs by exact emulation on every device today."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        self._check_common()
        self._refuse("blocks of weights are 1x32, not 32x32", "enable_2d_quantization")
        _check(
            self.margin == 0,
            f"MXFP8BlockScaling: margin must be 0, got {self.margin!r}: its scales are exact powers of two.",
        )


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """4-bit elements (E2M1), an E4M3 scale a 1x16 block (16x16 for weights), a float32 scale a tensor.

    Gradients are rounded stochastically and the wgrad operands pass a 16-point random Hadamard transform, unless disabled.
    Runs by exact emulation on every device today.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self._check_common()
        self._refuse("a tensor has one scale above those of its blocks, not one a row", "row_scaled_activation")
        self._refuse(
            "the largest magnitude of a block becomes 6, not 4",
            *("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"),
        )
        _check(
            self.fp4_format is Format.E2M1,
            f"NVFP4BlockScaling: fp4_format must be Format.E2M1, got {self.fp4_format!r}.",
        )
        _check(
            self.fp8_format is Format.E4M3,
            f"NVFP4BlockScaling: fp8_format must be Format.E4M3, got {self.fp8_format!r}.",
        )

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        """How inputs are quantized."""
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        """How weights are quantized."""
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        """How gradients are quantized."""
        return QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )


@dataclass(frozen=True)
class HybridScaling(Recipe):
    """The products of the forward pass as `forward` makes them, both products of the backward pass as `backward` does.

    Inputs and weights, which take part in both, are quantized in two ways: their rowwise copies as `forward` says, their columnwise
    copies as `backward` says. TransformerEngine has this as a `HybridQuantizer` in a `CustomRecipe`.

        >>> HybridScaling(forward=MXFP8BlockScaling(), backward=Float8CurrentScaling()).mxfp8()
        False
    """

    forward: Recipe
    backward: Recipe
    backward_override: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            recipe = getattr(self, name)
            _check(
                isinstance(recipe, Float8CurrentScaling | Float8BlockScaling | MXFP8BlockScaling),
                f"HybridScaling: {name} must be a Float8CurrentScaling, Float8BlockScaling or MXFP8BlockScaling, got {recipe!r}.",
            )
            _check(
                recipe.backward_override is None and not recipe.fp8_dpa and not recipe.fp8_mha,
                f"HybridScaling: backward_override, fp8_dpa and fp8_mha of {name} must be left as they are, got {recipe!r}.",
            )
        _check(
            not (self.forward.float8_current_scaling() and self.backward.float8_current_scaling()),
            "HybridScaling: forward and backward both have one scale a tensor. Use Float8CurrentScaling alone: its fields are by operand.",
        )


def _fill_qparams(recipe: Recipe, default: QParams) -> None:
    """Sets the QParams that the user left out; they follow the recipe's power-of-two choice."""
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        if getattr(recipe, name) is None:
            object.__setattr__(recipe, name, default)


def _refuse_assignment(recipe: Recipe, name: str, value: Any) -> None:
    fields = list(type(recipe).__dataclass_fields__)  # type: ignore[attr-defined]
    how = f"use dataclasses.replace(recipe, {name}=...)" if name in fields else f"its fields are: {', '.join(fields)}"
    raise FrozenInstanceError(
        f"{type(recipe).__name__}.{name} cannot be assigned to, recipes stay as they were made: {how}."
    )


for _recipe in Recipe.__subclasses__():  # what frozen dataclasses say themselves is no help
    _recipe.__setattr__ = _refuse_assignment  # type: ignore[assignment,method-assign]
