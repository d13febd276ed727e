"""Recipes: TransformerEngine's fields and defaults, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from ottava import recipe
from ottava.recipe import Format, MMParams, QParams

FAST, SPLIT = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)
ALL = ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"]

# Field by field, with the defaults of TransformerEngine 2.20 (its environment variables unset).
FIELDS = {
    "DelayedScaling": {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
    "Float8CurrentScaling": {
        "use_power_2_scales": False,
        "fp8_format": Format.HYBRID,
        "fp8_gemm_fprop": FAST,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "fp8_quant_fwd_inp": QParams(power_2_scale=False, amax_epsilon=0.0),
        "fp8_quant_fwd_weight": QParams(power_2_scale=False, amax_epsilon=0.0),
        "fp8_quant_bwd_grad": QParams(power_2_scale=False, amax_epsilon=0.0),
    },
    "Float8BlockScaling": {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": SPLIT,
        "fp8_gemm_dgrad": SPLIT,
        "fp8_gemm_wgrad": SPLIT,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "fp8_quant_fwd_inp": QParams(power_2_scale=True, amax_epsilon=0.0),
        "fp8_quant_fwd_weight": QParams(power_2_scale=True, amax_epsilon=0.0),
        "fp8_quant_bwd_grad": QParams(power_2_scale=True, amax_epsilon=0.0),
    },
    "MXFP8BlockScaling": {
        "margin": 0,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "enable_2d_quantization": False,
    },
    "NVFP4BlockScaling": {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
}


@pytest.mark.parametrize("name", ALL)
def test_fields_and_defaults(name: str) -> None:
    made = getattr(recipe, name)()
    assert {f.name: getattr(made, f.name) for f in dataclasses.fields(made)} == FIELDS[name]
    assert [f.name for f in dataclasses.fields(made)] == list(
        FIELDS[name]
    )  # arguments by position, where TransformerEngine has them


def test_formats() -> None:
    assert {f.name: tuple(f.value) for f in Format} == {
        "E2M1": (6, 6), "E4M3": (448, 448), "E5M2": (57344, 57344), "HYBRID": (448, 57344)
    }  # fmt: skip
    assert Format.HYBRID.value.max_fwd == 448 and Format.HYBRID.value.max_bwd == 57344
    assert (Format.HYBRID.forward, Format.HYBRID.backward) == ("e4m3", "e5m2")
    assert (Format.E4M3.forward, Format.E4M3.backward) == ("e4m3", "e4m3")


def test_nvfp4_options_follow_from_what_is_disabled() -> None:
    full = recipe.NVFP4BlockScaling()
    assert full.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert full.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert full.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    bare = recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert bare.fp4_quant_fwd_inp == bare.fp4_quant_fwd_weight == bare.fp4_quant_bwd_grad == QParams()


@pytest.mark.parametrize("name", ALL)
def test_what_a_recipe_says_of_itself(name: str) -> None:
    made = getattr(recipe, name)()
    answers = {
        "delayed": ["DelayedScaling"],
        "float8_current_scaling": ["Float8CurrentScaling"],
        "float8_per_tensor_scaling": ["DelayedScaling", "Float8CurrentScaling"],
        "float8_block_scaling": ["Float8BlockScaling"],
        "mxfp8": ["MXFP8BlockScaling"],
        "nvfp4": ["NVFP4BlockScaling"],
        "custom": [],
    }
    for question, kinds in answers.items():
        assert getattr(made, question)() == (name in kinds)


@pytest.mark.parametrize("name", ALL)
def test_frozen_hashable_comparable_copyable(name: str) -> None:
    kind = getattr(recipe, name)
    one, two = kind(), kind()
    assert one == two and hash(one) == hash(two) and len({one, two}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"use dataclasses.replace\(recipe, fp8_format=...\)"):
        one.fp8_format = Format.E4M3
    with pytest.raises(AttributeError, match=rf"{name}\.zzz cannot be assigned to.*its fields are: .*fp8_format"):
        one.zzz = 1
    assert copy.deepcopy(one) == one and pickle.loads(pickle.dumps(one)) == one and dataclasses.replace(one) == one
    assert name in repr(one)


@pytest.mark.parametrize("name", ALL)
def test_an_unknown_field_names_the_nearest(name: str) -> None:
    kind = getattr(recipe, name)
    with pytest.raises(
        ValueError, match=rf"{name} has no field 'fp8_formt'\. Did you mean 'fp8_format'\? Its fields are: "
    ):
        kind(fp8_formt=Format.E4M3)
    with pytest.raises(
        TypeError, match="has no field 'zzz'. Its fields"
    ):  # what dataclasses raise, for code that expects that
        kind(zzz=1)


@pytest.mark.parametrize(
    "kind,options,message",
    [
        ("DelayedScaling", {"amax_history_len": 0}, "amax_history_len must be an integer of at least 1, got 0"),
        ("DelayedScaling", {"amax_history_len": 2.5}, "amax_history_len must be an integer of at least 1, got 2.5"),
        ("DelayedScaling", {"amax_compute_algo": "mean"}, "must be 'max', 'most_recent' or a function, got 'mean'"),
        ("DelayedScaling", {"fp8_format": Format.E5M2}, "must be Format.E4M3 or Format.HYBRID, got Format.E5M2"),
        ("DelayedScaling", {"fp8_format": "E4M3"}, "must be an ottava.recipe.Format, got 'E4M3'"),
        ("DelayedScaling", {"backward_override": "high_precision"}, "backward_override must be None"),
        ("Float8BlockScaling", {"fp8_dpa": True}, "fp8_dpa=True asks for FP8 attention.*one scale a tensor. Leave fp8_dpa=False"),
        ("MXFP8BlockScaling", {"fp8_mha": True}, "fp8_mha=True asks for FP8 attention.*or use DelayedScaling"),
        ("NVFP4BlockScaling", {"fp8_dpa": True}, "fp8_dpa=True asks for FP8 attention"),
        ("Float8CurrentScaling", {"backward_override": "bf16"}, r"must be one of \(None, 'high_precision', 'dequantized'\), got 'bf16'"),
        ("Float8CurrentScaling", {"fp8_format": Format.E2M1}, "training needs e4m3 in the forward pass"),
        ("Float8BlockScaling", {"x_block_scaling_dim": 3}, "x_block_scaling_dim must be 1 or 2, got 3"),
        ("Float8BlockScaling", {"x_block_scaling_dim": 2}, "two operands of one GEMM cannot both have 128x128 blocks"),
        ("Float8BlockScaling", {"fp8_gemm_fprop": FAST}, "fp8_gemm_fprop must use the split accumulator"),
        ("MXFP8BlockScaling", {"margin": 1}, "margin must be 0, got 1"),
        ("MXFP8BlockScaling", {"enable_2d_quantization": True}, "not offered: .*Leave enable_2d_quantization=False"),
        ("NVFP4BlockScaling", {"row_scaled_activation": True}, "row_scaled_activation=True is not offered: a tensor has one scale"),
        ("NVFP4BlockScaling", {"nvfp4_4over6": "all"}, "nvfp4_4over6='all' is not offered: .*Leave nvfp4_4over6='none'"),
        ("NVFP4BlockScaling", {"fp4_format": Format.E4M3}, "fp4_format must be Format.E2M1"),
        ("NVFP4BlockScaling", {"fp8_format": Format.HYBRID}, "fp8_format must be Format.E4M3"),
    ],
)  # fmt: skip
def test_values_that_are_refused(kind: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"{kind}: .*{message}"):
        getattr(recipe, kind)(**options)


@pytest.mark.parametrize("kind", ["DelayedScaling", "Float8CurrentScaling"])
def test_fp8_attention_can_be_asked_for_and_is_shown(kind: str) -> None:
    made = getattr(recipe, kind)(fp8_dpa=True, fp8_mha=True)
    assert made.fp8_dpa and made.fp8_mha and "fp8_dpa=True, fp8_mha=True" in repr(made)
    assert made != getattr(recipe, kind)() and "fp8_dpa=False" in repr(getattr(recipe, kind)())


def test_given_qparams_are_kept() -> None:
    q = QParams(power_2_scale=True, amax_epsilon=1e-6)
    made = recipe.Float8CurrentScaling(fp8_quant_fwd_weight=q)
    assert made.fp8_quant_fwd_weight is q and made.fp8_quant_fwd_inp == QParams()
