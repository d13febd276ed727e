"""Small functions of TransformerEngine that ask what the machine and the current `autocast` offer."""

from __future__ import annotations

from typing import Any

import torch

from ottava.kernels.gemm import recipe_emulated_because
from ottava.nn.base import QuantizedModule as TransformerEngineBaseModule
from ottava.quant.quantization import Quantization
from ottava.quant.scheme import Scheme, weight_scheme
from ottava.quant.state import CURRENT, default_recipe
from ottava.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

__all__ = [
    "FP8GlobalStateManager",
    "TransformerEngineBaseModule",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "get_align_size_for_quantization",
    "get_cudnn_version",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_device_compute_capability",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_non_tn_fp8_gemm_supported",
    "is_nvfp4_available",
    "torch_version",
]

Support = tuple[bool, str]


def get_device_compute_capability() -> tuple[int, int]:
    """(major, minor) of the current GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch); (0, 0, 0) without cuDNN."""
    version = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    if version is None:
        return 0, 0, 0
    base = 10000 if version >= 90000 else 1000  # 90100 is 9.1.0, 8907 is 8.9.7
    return version // base, version % base // 100, version % 100


def _native(recipe: Recipe, what: str) -> Support:
    """Whether the products of `recipe` are multiplied natively, so that a script that chooses by speed chooses well.

    The GEMM itself is asked. A CPU multiplies none of them; there all recipes run by exact emulation and are equally available.
    """
    have = get_device_compute_capability()
    why = None if have == (0, 0) else recipe_emulated_because(recipe, have)
    if why is None:
        return True, ""
    return False, f"{what} runs by exact emulation on compute capability {have[0]}.{have[1]}: {why}."


def check_fp8_support() -> Support:
    """(available, why not) for one scale a tensor."""
    return _native(Float8CurrentScaling(), "FP8")


def check_fp8_block_scaling_support() -> Support:
    """(available, why not) for blocks of 128."""
    return _native(Float8BlockScaling(), "FP8 block scaling")


def check_mxfp8_support() -> Support:
    """(available, why not) for MXFP8."""
    return _native(MXFP8BlockScaling(), "MXFP8")


def check_nvfp4_support() -> Support:
    """(available, why not) for NVFP4."""
    return _native(NVFP4BlockScaling(), "NVFP4")


def is_fp8_available(return_reason: bool = False) -> bool | Support:
    """Whether to use `DelayedScaling` and `Float8CurrentScaling`; with return_reason also why not."""
    return check_fp8_support() if return_reason else check_fp8_support()[0]


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | Support:
    """Whether to use `Float8BlockScaling`."""
    return check_fp8_block_scaling_support() if return_reason else check_fp8_block_scaling_support()[0]


def is_mxfp8_available(return_reason: bool = False) -> bool | Support:
    """Whether to use `MXFP8BlockScaling`. It runs everywhere; the answer is whether it runs natively."""
    return check_mxfp8_support() if return_reason else check_mxfp8_support()[0]


def is_nvfp4_available(return_reason: bool = False) -> bool | Support:
    """Whether to use `NVFP4BlockScaling`. It runs everywhere; the answer is whether it runs natively."""
    return check_nvfp4_support() if return_reason else check_nvfp4_support()[0]


def is_bf16_available(return_reason: bool = False) -> bool | Support:
    """Whether to use bfloat16."""
    have = get_device_compute_capability()
    available = have == (0, 0) or have >= (8, 0)
    reason = "" if available else f"bfloat16 needs compute capability 8.0, got {have[0]}.{have[1]}."
    return (available, reason) if return_reason else available


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether FP8 products take operands that are not transposed; programs that ask then expect no transposed copies."""
    have = get_device_compute_capability()
    return have == (0, 0) or have >= (10, 0)


def torch_version() -> tuple[int, ...]:
    """(major, minor, patch) of torch."""
    return tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:3] if n.isdigit())


def get_default_recipe() -> Recipe:
    """What `autocast()` uses when it is given no recipe."""
    return default_recipe()


get_default_fp8_recipe = get_default_recipe


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """What `Fp8Padding` fills the rows of a group up to a multiple of, without being told."""
    return 128 if weight_scheme(recipe).elements_per_byte > 1 else Quantization.of(recipe).feature_multiple


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype | None:
    """torch's type of what the recipe makes of inputs, or of gradients (fprop_tensor=False); None of 4-bit elements."""
    return Scheme.of(fp8_recipe, "input" if fprop_tensor else "grad").element.dtype


class FP8GlobalStateManager:
    """Read access to what `autocast` and `quantized_model_init` have switched on."""

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Inside an enabled `autocast`."""
        return CURRENT.recipe is not None and not CURRENT.calibrating

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Inside `autocast(enabled=False, calibrating=True)`."""
        return CURRENT.calibrating

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Inside `quantized_model_init`."""
        return CURRENT.init is not None

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """The recipe in force, or the default one."""
        return CURRENT.recipe if CURRENT.recipe is not None else default_recipe()

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Where a module's `fp8_meta` has the delayed scaling of a direction."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fp8_group() -> Any:
        """The ranks that share delayed-scaling statistics, if `autocast` was given any."""
        return CURRENT.group

    @staticmethod
    def reset() -> None:
        """TransformerEngine's tests call it. Ottava's state belongs to modules and `with` blocks, so nothing is left to reset."""
