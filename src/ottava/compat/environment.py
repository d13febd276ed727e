"""TransformerEngine's environment variables, which change nothing here: a script that is run with some of them is told."""

from __future__ import annotations

import os

from ottava.notices import log

PREFIX = "NVTE_"
_INSTEAD = {
    "NVTE_BACKWARD_OVERRIDE": "the recipe's backward_override",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "Float8BlockScaling(use_f32_scales=True)",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "Float8CurrentScaling(use_power_2_scales=True)",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "NVFP4BlockScaling(disable_2d_quantization=True)",
    "NVTE_NVFP4_DISABLE_RHT": "NVFP4BlockScaling(disable_rht=True)",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "NVFP4BlockScaling(disable_stochastic_rounding=True)",
}
"""Those that have a field of a recipe for it."""


def tell_of_variables() -> None:
    """Warns of variables of TransformerEngine that are set: Ottava reads none."""
    found = sorted(name for name in os.environ if name.startswith(PREFIX))
    if not found:
        return
    said = ", ".join(f"{name} (use {_INSTEAD[name]})" if name in _INSTEAD else name for name in found)
    log.warning(
        "ottava: no environment variable of TransformerEngine changes anything here, and these are set: %s.", said
    )
