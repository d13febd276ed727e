"""What the tests on a GPU say of kernels, by the interpreter: those that ask what is computed, not what is launched, and are small enough.

They compare with references that are called by name, or with float64; "cuda" is the pretended one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu import (
    test_attention,
    test_fp8_attention,
    test_grouped,
    test_head_loss,
    test_kernels,
    test_numbers,
    test_qkv_rope,
    test_residual,
)
from pretended_cuda import pretended_cuda

CHOSEN = {
    test_fp8_attention: ("test_bytes_and_scales_equal_the_reference", "test_output_is_near_the_reference_and_float64"),
    test_grouped: (
        "test_fp8_groups_are_close_to_float64",
        "test_unquantized_groups_are_close_to_float64",
        "test_operands_at_odd_addresses_are_not_read_as_they_lie",
    ),
    test_head_loss: (
        "test_a_scaled_copy_has_the_bits_of_a_product_that_is_rounded",
        "test_the_kernels_agree_with_the_reference_also_for_parts_of_a_vocabulary",
    ),
    test_kernels: (
        "test_a_given_scale_and_amax_raises_the_amax_in_place",
        "test_activations_give_the_reference_bytes_both_ways",
        "test_amax_ignores_nan_and_keeps_inf",
        "test_cast_gives_the_reference_bytes",
        "test_delayed_update_equals_the_reference",
        "test_delayed_updates_of_many_are_one_launch_and_equal_the_reference",
        "test_gemm_is_close_to_float64",
        "test_norm_gives_the_reference_bytes_from_the_same_statistics",
        "test_norm_statistics_and_backward_are_close_to_float64",
        "test_one_direction_alone",
    ),
    test_numbers: (
        "test_gated_gradients_are_counted_in_both_halves",
        "test_kernels_count_what_the_reference_counts_and_give_its_bytes",
    ),
    test_qkv_rope: (
        "test_the_bytes_of_the_reference",
        "test_gradients_that_lie_strided_as_attention_leaves_them",
        "test_a_position_beyond_the_table_is_nan",
    ),
    test_residual: (
        "test_a_nan_and_an_infinity_are_added_and_kept_out_of_the_amax",
        "test_strided_rows_are_added_as_they_lie",
    ),
}
for _module, _names in CHOSEN.items():
    globals().update({name: getattr(_module, name) for name in _names})


@pytest.fixture(autouse=True)
def on_pretended_cuda() -> Iterator[None]:
    with pretended_cuda():
        yield


def test_packed_documents() -> None:
    test_attention.test_documents_of_one_token_are_their_values("triton")
    for dim, rows in ((64, [[300], [1, 1, 63, 235], [129, 171]]), (128, [[1, 128, 171]]), (80, [[1, 128, 171]])):
        test_attention.test_packed_documents_against_float64("triton", dim, rows)
