"""How ops are defined: every one has a schema, a fake and the pt2 tag."""

from __future__ import annotations

import pytest
import torch

import ottava  # noqa: F401
from ottava.kernels import registry

DEFINED = sorted(
    name.removeprefix("ottava::").partition(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("ottava::")
)


def test_the_ops_of_the_design_are_there() -> None:
    wanted = {
        "quantize", "amax", "dequantize", "column_sum", "scaled_mm", "mm",
        "norm_stats", "norm_apply", "norm_quantize", "norm_backward", "norm_add_stats", "norm_backward_add",
        "activation", "activation_quantize", "activation_backward", "activation_backward_quantize",
        "record_amax_", "delayed_update_", "bias_residual",
    }  # fmt: skip
    assert wanted <= set(DEFINED)


@pytest.mark.parametrize("name", DEFINED)
def test_every_op_is_ready_for_torch_compile(name: str) -> None:
    overload = getattr(torch.ops.ottava, name).default
    assert torch.Tag.pt2_compliant_tag in overload.tags
    # An op that writes says so in its schema, and its name ends in an underscore.
    assert overload._schema.is_mutable == name.endswith("_")
    assert (
        torch._C._dispatch_has_kernel_for_dispatch_key(f"ottava::{name}", "Meta")
        or torch._library.simple_registry.singleton.find(f"ottava::{name}").fake_impl.kernel
    )


def test_define_registers_reference_and_fake() -> None:
    def reference(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n

    op = registry.define("test_only_times", reference, lambda x, n: torch.empty_like(x))
    assert op(torch.ones(2), 3).tolist() == [3.0, 3.0]
    assert op(torch.ones(2, device="meta"), 3).device.type == "meta"
    torch.library.opcheck(op, (torch.ones(2), 3))


def test_has_triton_is_asked_once() -> None:
    assert registry.has_triton() in (True, False)
    assert registry.has_triton.cache_info().currsize == 1
