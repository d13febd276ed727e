"""TransformerEngine's `CustomRecipe` gives the recipe that quantizes so, or says that there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ottava import compat
from ottava.compat.tensors import HYBRID_RECIPES
from ottava.quant.scheme import Scheme
from ottava.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HybridScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


@pytest.fixture
def te() -> Iterator[Any]:
    with compat.installed():
        import transformer_engine.pytorch as module

        yield module


def custom(te: Any, factory: Any, **options: Any) -> Any:
    from transformer_engine.common.recipe import CustomRecipe

    return CustomRecipe(qfactory=factory, **options)


@pytest.mark.parametrize(
    "factory, recipe",
    [
        ("delayed_scaling_factory", DelayedScaling()),
        ("current_scaling_factory", Float8CurrentScaling()),
        ("float8_block_scaling_factory", Float8BlockScaling()),
        ("mxfp8_factory", MXFP8BlockScaling()),
        ("nvfp4_factory", NVFP4BlockScaling()),
    ],
)
def test_the_factories_of_its_recipes_give_them(te: Any, factory: str, recipe: Any) -> None:
    from transformer_engine.pytorch.custom_recipes import quantizer_factories

    assert custom(te, getattr(quantizer_factories, factory)) == recipe


def test_a_programs_own_factory_is_asked_by_role(te: Any) -> None:
    asked = []

    def factory(role: Any) -> Any:
        asked.append((role.module_type, role.tensor_type))
        dim = 2 if role.tensor_type == "weight" else 1
        return te.Float8BlockQuantizer(te.DType.kFloat8E4M3, block_scaling_dim=dim, force_pow_2_scales=False)

    assert custom(te, factory) == Float8BlockScaling(use_f32_scales=True)
    assert asked[:3] == [("linear", "input"), ("linear", "weight"), ("linear", "grad_output")]
    e4m3 = custom(te, lambda role: te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu"))
    assert e4m3 == Float8CurrentScaling(fp8_format=Format.E4M3)


def test_two_directions_alike_are_one_recipe_and_its_weights_are_hybrid(te: Any) -> None:
    def factory(role: Any) -> Any:
        if role.tensor_type == "grad_output":
            return te.MXFP8Quantizer(te.DType.kFloat8E4M3)
        one, other = (te.MXFP8Quantizer(fp8_dtype=te.DType.kFloat8E4M3) for _ in range(2))
        return te.HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=other)

    recipe = custom(te, factory)
    assert recipe == MXFP8BlockScaling()
    with te.quantized_model_init(recipe=recipe):
        hybrid = te.Linear(32, 32, device="cpu").weight
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        other = te.Linear(32, 32, device="cpu").weight
    assert isinstance(hybrid, te.HybridQuantizedTensor) and isinstance(hybrid, te.MXFP8TensorStorage)
    assert not isinstance(other, te.HybridQuantizedTensor) and isinstance(other, te.MXFP8TensorStorage)
    assert not isinstance(torch.zeros(2), te.HybridQuantizedTensor)
    for _ in range(8):  # a program may make one in every step: those that nothing uses are not kept
        custom(te, factory)
    gc.collect()
    assert list(HYBRID_RECIPES.values()) == [recipe]


def test_two_formats_in_one_tensor_are_a_hybrid_recipe(te: Any) -> None:
    from transformer_engine.pytorch.custom_recipes.quantizer_factories import current_scaling_factory, mxfp8_factory

    def factory(role: Any) -> Any:
        if role.tensor_type == "grad_output":
            return current_scaling_factory(role)
        return te.HybridQuantizer(
            rowwise_quantizer=mxfp8_factory(role), columnwise_quantizer=current_scaling_factory(role)
        )

    recipe = custom(te, factory)
    assert Scheme.of(recipe, "weight") == Scheme.of(
        HybridScaling(MXFP8BlockScaling(), Float8CurrentScaling()), "weight"
    )
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(32, 64, device="cpu")
    weight = layer.weight
    assert isinstance(weight, te.HybridQuantizedTensor)
    rows, columns = weight._rowwise_storage, weight._columnwise_storage
    assert isinstance(rows, te.MXFP8TensorStorage) and isinstance(columns, te.Float8TensorStorage)
    assert rows._scale_inv.shape == (64, 1) and columns._scale_inv.shape == (1,)
    assert columns._data.shape == (64, 32) and torch.equal(rows.dequantize(), weight.dequantize())
    with te.autocast(recipe=recipe):
        layer(torch.randn(32, 32, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("source, override", [("original", "high_precision"), ("rowwise_dequantized", "dequantized")])
def test_an_unquantized_backward_is_an_override(te: Any, source: str, override: str) -> None:
    def factory(role: Any) -> Any:
        if role.tensor_type == "grad_output":
            return te.IdentityQuantizer()
        rows = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
        return te.HybridQuantizer(
            rowwise_quantizer=rows, columnwise_quantizer=te.IdentityQuantizer(), columnwise_source=source
        )

    recipe = custom(te, factory)
    assert isinstance(recipe, Float8CurrentScaling) and recipe.backward_override == override


def test_a_recipe_that_quantizes_nothing_switches_contexts_off(te: Any) -> None:
    from transformer_engine.pytorch.custom_recipes.quantizer_factories import high_precision_factory
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityTensor

    recipe = custom(te, high_precision_factory)
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(32, 32, device="cpu")
    assert isinstance(layer.weight, IdentityTensor) and not isinstance(layer.weight, te.QuantizedTensor)
    x = torch.randn(32, 32)
    with te.autocast(recipe=Float8CurrentScaling()), te.autocast(recipe=recipe):
        y = layer(x)
    assert torch.equal(y, layer(x))


def test_one_direction_of_a_weight_has_rows_first(te: Any) -> None:
    from transformer_engine.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage

    values = torch.randn(64, 32)
    for recipe in (MXFP8BlockScaling(), Float8CurrentScaling(), Float8BlockScaling()):
        with te.quantized_model_init(recipe=recipe):
            weight = te.Linear(32, 64, device="cpu").weight
        weight.quantize_(values)
        for direction in ("rowwise", "columnwise"):
            storage = getattr(weight, f"_{direction}_storage")
            assert isinstance(storage, te.MXFP8TensorStorage) == isinstance(recipe, MXFP8BlockScaling)
            buffers, meta = storage.fsdp_extract_buffers()
            assert meta["direction"] == direction and all(b.is_contiguous() for b in buffers)
            data = weight.rowwise_data if direction == "rowwise" else weight.columnwise_data.t()
            assert torch.equal(buffers[0], data) and torch.equal(getattr(storage, f"_{direction}_data"), data)
        assert torch.equal(weight._rowwise_storage.dequantize(), weight.dequantize())
    with pytest.raises(AttributeError, match="columnwise direction of a e4m3:128x128:pow2 tensor has no '_amax'"):
        getattr(weight._columnwise_storage, "_amax")  # noqa: B009

    def unquantized_backward(role: Any) -> Any:
        if role.tensor_type == "grad_output":
            return te.IdentityQuantizer()
        rows = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
        return te.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=te.IdentityQuantizer())

    with te.quantized_model_init(recipe=custom(te, unquantized_backward)):
        weight = te.Linear(32, 64, device="cpu").weight
    assert isinstance(weight._columnwise_storage, IdentityTensorStorage)
    assert torch.equal(weight._columnwise_storage.dequantize(), weight.dequantize())


def test_what_no_recipe_does_is_refused_by_name(te: Any) -> None:
    from transformer_engine.pytorch.custom_recipes.quantizer_factories import (
        current_scaling_factory,
        mxfp8_factory,
    )

    def mixed(role: Any) -> Any:
        return te.HybridQuantizer(
            rowwise_quantizer=mxfp8_factory(role), columnwise_quantizer=current_scaling_factory(role)
        )

    with pytest.raises(ValueError, match=r"grad_output: e4m3:1x32/e5m2:tensor"):  # both its products are backward's
        custom(te, mixed)
    with pytest.raises(ValueError, match=r"e4m3:1x32 rowwise and no columnwise quantization"):
        custom(
            te,
            lambda role: te.HybridQuantizer(
                rowwise_quantizer=mxfp8_factory(role), columnwise_quantizer=te.IdentityQuantizer()
            ),
        )
    with pytest.raises(ValueError, match="no recipe of Ottava's quantizes so"):
        custom(te, lambda role: mxfp8_factory(role) if role.tensor_type == "weight" else current_scaling_factory(role))
    with pytest.raises(ValueError, match="qfactory answered NoneType for the input"):
        custom(te, lambda role: None)
    with pytest.raises(ValueError, match="one of .*kFloat8E4M3.*got .*kBFloat16"):
        custom(te, lambda role: te.MXFP8Quantizer(te.DType.kBFloat16))


@pytest.mark.strict
def test_a_custom_recipe_trains_as_the_recipe_that_it_is(te: Any) -> None:
    from transformer_engine.pytorch.custom_recipes.quantizer_factories import current_scaling_factory

    x = torch.randn(32, 32)
    outputs = []
    for recipe in (custom(te, current_scaling_factory), Float8CurrentScaling()):
        torch.manual_seed(1)
        layer = te.Linear(32, 32, device="cpu")
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.square().sum().backward()
        outputs.append((y, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*outputs))


def test_tensors_answer_to_its_attribute_names(te: Any) -> None:
    import ottava

    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        weight = te.Linear(32, 64, device="cpu").weight
    assert weight._data is not None and weight._data.dtype == torch.uint8 and weight._data.shape == (64, 32)
    assert torch.equal(weight._scale_inv, weight.rowwise_scale_inv)
    assert weight._rowwise_storage._scale_inv.numel() == weight._columnwise_storage._scale_inv.numel() == 1
    values = torch.randn(64, 32)
    weight.quantize_(values)
    expected = ottava.quantize(values, Float8CurrentScaling(), role="weight")
    assert torch.equal(weight._data, expected.rowwise_data)
    compat.uninstall()
    assert not hasattr(weight, "_data")
    compat.install()


def test_its_other_fields_act_or_are_refused(te: Any, caplog: pytest.LogCaptureFixture) -> None:
    from transformer_engine.pytorch.custom_recipes import quantizer_factories as factories

    assert custom(te, factories.current_scaling_factory, fp8_dpa=True) == Float8CurrentScaling(fp8_dpa=True)
    assert "qfactory is not asked about it" in caplog.text
    assert custom(te, factories.mxfp8_factory, fp8_format=Format.E4M3) == MXFP8BlockScaling()
    with pytest.raises(ValueError, match="fp8_mha=True asks for FP8 attention"):
        custom(te, factories.mxfp8_factory, fp8_mha=True)
    with pytest.raises(ValueError, match="quantization_alignment must be above 0"):
        custom(te, factories.mxfp8_factory, quantization_alignment=0)
    with pytest.raises(TypeError, match="unknown"):
        custom(te, factories.mxfp8_factory, unknown=1)
    scale = torch.ones(1)
    with pytest.raises(ValueError, match="Answer with DelayedScalingRequest"):
        custom(te, lambda role: te.Float8Quantizer(scale, scale.clone(), te.DType.kFloat8E4M3))


def test_a_factory_that_tells_layers_apart_is_told_that_they_are_not(te: Any, caplog: pytest.LogCaptureFixture) -> None:
    from transformer_engine.pytorch.custom_recipes import quantizer_factories as factories

    def by_kind(role: Any) -> Any:
        grouped = role.module_type == "grouped_linear"
        return (factories.mxfp8_factory if grouped else factories.current_scaling_factory)(role)

    def by_name(role: Any) -> Any:
        return te.IdentityQuantizer() if role.name == "head" else factories.mxfp8_factory(role)

    assert custom(te, factories.mxfp8_factory) == MXFP8BlockScaling() and not caplog.records
    assert custom(te, by_kind) == Float8CurrentScaling()
    assert "answers otherwise for grouped_linear" in caplog.text and "role.name" not in caplog.text
    assert custom(te, by_name) == MXFP8BlockScaling()
    assert "reads role.name" in caplog.text
