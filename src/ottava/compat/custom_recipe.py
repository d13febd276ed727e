"""`CustomRecipe(qfactory)`: TransformerEngine's recipe whose quantizers a function chooses, as the Ottava recipe that does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ottava.compat.quantizers import (
    DelayedScalingRequest,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    Quantizer,
    QuantizerRequest,
    QuantizerRole,
)
from ottava.compat.tensors import HYBRID_RECIPES, IDENTITY_RECIPES
from ottava.notices import warn_once
from ottava.quant.scheme import ROLES, Scheme
from ottava.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HybridScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

__all__ = ["CustomRecipe", "Unquantized"]

_TENSOR_TYPES = dict(zip(ROLES, ("input", "weight", "grad_output")))


class _Resolved(type):
    """Makes `CustomRecipe(...)` give the recipe that it stands for."""

    def __call__(
        cls,
        qfactory: Callable,
        fp8_format: Format = Format.HYBRID,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        quantization_alignment: int = 128,
    ) -> Recipe:
        # There too fp8_format changes nothing: the quantizers say their formats. The alignment is for padding, which nothing needs here.
        if quantization_alignment <= 0:
            raise ValueError(f"CustomRecipe: quantization_alignment must be above 0, got {quantization_alignment}.")
        recipe = _resolve(qfactory, backward_override)
        wanted = {"fp8_dpa": fp8_dpa, "fp8_mha": fp8_mha}
        return _with_attention(recipe, wanted) if any(wanted.values()) and recipe.quantizes else recipe


class CustomRecipe(metaclass=_Resolved):
    """Asks `qfactory` once, for a linear layer's input, weight and gradient; layers cannot be told apart by their names."""


@dataclass(frozen=True)
class Unquantized(Recipe):
    """A recipe whose quantizers are all `IdentityQuantizer`s: contexts that are given it are switched off."""

    quantizes = False


def _resolve(qfactory: Callable, override: str | None) -> Recipe:
    answers = _asked(qfactory, "linear")
    _warn_of_layers(qfactory, answers)
    requests = [a for a in answers.values() if isinstance(a, QuantizerRequest)]
    if requests:
        return _delayed(answers)
    for role, answer in answers.items():
        if isinstance(answer, Float8Quantizer):
            raise ValueError(
                f"CustomRecipe: qfactory answered a Float8Quantizer for the {_TENSOR_TYPES[role]} of a linear layer, whose scale would be "
                "the same for all layers and steps. Answer with DelayedScalingRequest(), or with a Float8CurrentScalingQuantizer."
            )
        if not isinstance(answer, Quantizer):
            raise ValueError(
                f"CustomRecipe: qfactory answered {type(answer).__name__} for the {_TENSOR_TYPES[role]} of a linear layer; "
                "a quantizer of transformer_engine.pytorch was expected."
            )
    if all(isinstance(answer, IdentityQuantizer) for answer in answers.values()):
        IDENTITY_RECIPES.add(found := Unquantized())
        return found
    if override is None:
        override = _backward(answers)
    hybrid = isinstance(answers["weight"], HybridQuantizer)
    if override is not None:
        forward = {r: a.rowwise_quantizer if isinstance(a, HybridQuantizer) else a for r, a in answers.items()}
        answers = forward | {"grad": None}
    schemes = {role: None if answer is None else answer.scheme() for role, answer in answers.items()}
    recipe = _recipe_of(schemes, override)
    if hybrid:
        HYBRID_RECIPES[id(recipe)] = recipe
    if hybrid and override == "high_precision":
        warn_once(
            "CustomRecipe: the weights' columnwise direction is to be in high precision. Weights that quantized_model_init stores in FP8 "
            "have no such copy here: their backward multiplies by the dequantized bytes.",
        )
    return recipe


class _WatchedRole(QuantizerRole):
    """Notices that a factory reads a layer's name."""

    names_read: ClassVar[list[bool]] = []

    def __getattribute__(self, attribute: str) -> Any:
        if attribute == "name":
            _WatchedRole.names_read.append(True)
        return super().__getattribute__(attribute)


def _asked(qfactory: Callable, module_type: str) -> dict[str, Any]:
    """The factory's answers for input, weight and gradient of a layer."""
    return {role: qfactory(_WatchedRole(module_type, kind)) for role, kind in _TENSOR_TYPES.items()}


def _warn_of_layers(qfactory: Callable, answers: dict[str, Any]) -> None:
    """Says so where the factory would quantize some layers otherwise: here all are quantized alike."""
    if _WatchedRole.names_read:
        _WatchedRole.names_read.clear()
        warn_once(
            "CustomRecipe: qfactory reads role.name, but is asked once, without a name: all layers are quantized alike. To leave some "
            "unquantized use ottava.leave_unquantized; to quantize them otherwise, an inner autocast with another recipe."
        )
    if _said(_asked(qfactory, "grouped_linear")) != _said(answers):
        warn_once(
            "CustomRecipe: qfactory answers otherwise for grouped_linear: here GroupedLinear is quantized as Linear is. Use an inner "
            "autocast with another recipe around it."
        )
    _WatchedRole.names_read.clear()


def _said(answers: dict[str, Any]) -> list[str]:
    """Answers in words, which can be compared: tensors and process groups in them cannot."""
    return [repr(answer) for answer in answers.values()]


def _with_attention(recipe: Recipe, wanted: dict[str, bool]) -> Recipe:
    """`recipe` with FP8 attention, if it can have that."""
    if not hasattr(recipe, "fp8_dpa"):
        raise ValueError(
            f"CustomRecipe: {wanted} asks for FP8 attention, which a recipe of two others does not offer: {recipe!r}."
        )
    warn_once(
        "CustomRecipe: FP8 attention has one scale a tensor, from the tensors at hand; qfactory is not asked about it."
    )
    found = replace(recipe, **wanted)  # type: ignore[type-var]
    if HYBRID_RECIPES.get(id(recipe)) is recipe:
        HYBRID_RECIPES[id(found)] = found
    return found


def _delayed(answers: dict[str, Any]) -> DelayedScaling:
    first = answers["input"]
    if not isinstance(first, DelayedScalingRequest) or any(a != first for a in answers.values()):
        raise ValueError("CustomRecipe: qfactory asks for delayed scaling of some tensors only, or in several ways.")
    return DelayedScaling(**vars(first))


def _backward(answers: dict[str, Any]) -> str | None:
    """What `backward_override` says of quantizers that leave backward unquantized."""

    def identity(role: str) -> bool:
        columns = getattr(answers[role], "columnwise_quantizer", None)
        return isinstance(columns, IdentityQuantizer)

    if not (identity("input") and identity("weight") and isinstance(answers["grad"], IdentityQuantizer)):
        return None
    sources = {answers[role].columnwise_source for role in ("input", "weight")}
    return "high_precision" if sources == {"original"} else "dequantized"


def _candidates(override: str | None) -> Iterator[Recipe]:
    for fmt in (Format.HYBRID, Format.E4M3):
        for power_of_two in (False, True):
            yield Float8CurrentScaling(power_of_two, fmt, backward_override=override)
            yield Float8BlockScaling(not power_of_two, fmt, backward_override=override)
        yield MXFP8BlockScaling(fp8_format=fmt, backward_override=override)
    for rht in (False, True):
        for rounding in (False, True):
            for square in (False, True):
                yield NVFP4BlockScaling(rht, rounding, square, backward_override=override)


def _along(scheme: Scheme | None, direction: str) -> Scheme | None:
    return None if scheme is None else scheme.along(direction)


def _quantizes(asked: dict[str, Scheme | None], override: str | None) -> Recipe | None:
    """The recipe that gives these schemes to these roles, if there is one."""
    for recipe in _candidates(override):
        if all(Scheme.of(recipe, role).rounded == scheme for role, scheme in asked.items()):
            return recipe
    return None


def _recipe_of(schemes: dict[str, Scheme | None], override: str | None) -> Recipe:
    asked = {role: scheme for role, scheme in schemes.items() if not (override is not None and role == "grad")}
    two_ways = {role for role, scheme in asked.items() if scheme is not None and scheme.columns is not None}
    if not two_ways:
        recipe = _quantizes(asked, override)
        if recipe is not None:
            return recipe
    elif "grad" not in two_ways:  # both products that take the gradient are of the backward pass
        forward = _quantizes({role: _along(asked[role], "rowwise") for role in ("input", "weight")}, None)
        backward = _quantizes({role: _along(scheme, "columnwise") for role, scheme in asked.items()}, None)
        if forward is not None and backward is not None:
            return HybridScaling(forward, backward)
    said = ", ".join(f"{_TENSOR_TYPES[role]}: {scheme or 'unquantized'}" for role, scheme in schemes.items())
    raise ValueError(
        f"CustomRecipe: no recipe of Ottava's quantizes so ({said}). Those of a DelayedScaling, Float8CurrentScaling, Float8BlockScaling, "
        "MXFP8BlockScaling or NVFP4BlockScaling are there, with backward quantized alike, as by another of these (HybridScaling), or not "
        "at all; for no quantization at all use autocast(enabled=False)."
    )
