"""Collectives under products on paper: schedules end when their chunks do, and the page shows what the rates give."""

from __future__ import annotations

from pathlib import Path

import pytest

from ottava.plan.devices import find_gpu
from ottava.plan.overlap_time import (
    COLLECTIVES,
    LLAMA3_8B,
    gathered_pipeline_seconds,
    layer_overlap,
    pieces_of,
    ring_seconds,
    scattered_pipeline_seconds,
    table,
    total,
)

ROOT = Path(__file__).resolve().parents[2]
TIMES = [(4.0, 4.0), (1.0, 7.0), (9.0, 2.0), (5.0, 0.0)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("gemm", "communication"), TIMES)
def test_a_schedule_lies_between_the_bound_and_one_after_the_other(
    gemm: float, communication: float, ranks: int
) -> None:
    pieces = pieces_of(4, ranks)
    for seconds in (
        ring_seconds(gemm, communication, ranks),
        gathered_pipeline_seconds(gemm, communication, ranks, pieces),
        scattered_pipeline_seconds(gemm, communication, ranks, pieces),
    ):
        assert max(gemm, communication) - 1e-9 <= seconds <= gemm + communication + 1e-9


def test_a_ring_of_two_ranks_hides_at_most_half_of_its_product() -> None:
    assert ring_seconds(4.0, 4.0, 2) == 6.0  # 0.75 of sequential, the ideal
    assert gathered_pipeline_seconds(4.0, 4.0, 2, 4) == scattered_pipeline_seconds(4.0, 4.0, 2, 4) == 4.5


def test_the_layer_has_ten_collectives_with_half_the_gathered_bytes_in_fp8() -> None:
    gpu = find_gpu("h200")
    bf16, fp8 = layer_overlap(gpu, LLAMA3_8B, 8192, 8), layer_overlap(gpu, LLAMA3_8B, 8192, 8, "delayed", 1.0)
    assert len(bf16) == len(COLLECTIVES) == 10
    for wide, narrow in zip(bf16, fp8, strict=True):
        assert wide.bytes_sent == 8192 * 4096 * 2 * 7 / 8
        assert narrow.bytes_sent == wide.bytes_sent / (2 if wide.collective == "all-gather" else 1)
        assert wide.bound <= wide.overlapped <= wide.sequential
    assert total(bf16).hidden_share > 0.5
    # Attention's products are short: there communication is the bound at 8 ranks, and at 4 hardly any longer.
    assert all(row.communication > row.gemm for row in bf16 if row.product in ("qkv", "proj"))
    assert total(layer_overlap(gpu, LLAMA3_8B, 8192, 4)).hidden_share > 0.8


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="tp must be 2 or more, got 1"):
        layer_overlap(find_gpu("h200"), LLAMA3_8B, 8192, 1)


@pytest.mark.parametrize(("kind", "gathered"), [("bf16", 2.0), ("delayed", 1.0)])
def test_the_page_shows_the_table_that_the_rates_give(kind: str, gathered: float) -> None:
    page = (ROOT / "docs" / "overlap.md").read_text(encoding="utf-8")
    assert table(layer_overlap(find_gpu("h200"), LLAMA3_8B, 8192, 8, kind, gathered)) in page
