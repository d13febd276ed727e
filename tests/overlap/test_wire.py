"""What travels, collective by collective: quantized bytes with their scales, about half of bfloat16's, and no copy more than there must be.

The table of docs/overlap.md ("What travels") is the one that is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distributed.ranks import Ranks
from distributed.tp_ranks import Run
from distributed.tp_ranks import compare as compare_with_one_process
from ottava.overlap import measuring
from overlap.cases import HIDDEN, Case, options, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "overlap.md"
BYTES = {
    "none": 2.0,
    "delayed": 1.0,
    "current": 1.0,
    "block": 1.0 + 4 / 128,
    "mxfp8": 1.0 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
    "square gradients": 1.0 + 4 / 128,
}
"""An element of a gather, by recipe: data, and its share of a scale."""
TWICE = ("block", "mxfp8", "nvfp4")
"""Recipes whose gradients have a columnwise copy that is not the transpose of the rowwise one."""
COLUMNS = {
    "none": "none",
    "delayed": "per tensor",
    "block": "block",
    "square gradients": "square",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}
TOKENS = 1024


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def _sent(kind: str, method: str) -> dict[str, dict[str, int]]:
    """Bytes that a rank sends in a step, by recipe and by what carries them; bfloat16 activations."""
    found = {}
    for recipe in BYTES:
        with measuring() as meter:
            run(Case(kind, recipe, method, bias=False, tokens=TOKENS, dtype=torch.bfloat16), options(method))
        found[recipe] = {name: flow.bytes_sent for name, flow in meter.by_name.items()} | meter.collectives
    return found


NAMES = {"ring": "ring_all_gather", "pipeline": "pipelined_all_gather"}
KINDS = [("column", "ring"), ("row", "pipeline"), ("grouped column", "pipeline"), ("grouped row", "ring")]


@pytest.mark.parametrize(("kind", "method"), KINDS)
def test_every_gather_has_half_the_bytes_of_bfloat16_and_sums_have_all(ranks: Ranks, kind: str, method: str) -> None:
    """x travels in forward and again for wgrad; dY once where its bytes can be transposed, else once in each direction."""
    elements = TOKENS // 2 * (HIDDEN if "column" in kind else 2 * HIDDEN)
    for found in ranks.run(_sent, kind, method):
        for recipe, flows in found.items():
            gathers = {name: count / elements for name, count in flows.items() if "all_gather" in name}
            sums = [count for name, count in flows.items() if "reduce_scatter" in name]
            assert sums == [2 * elements], (recipe, flows)
            per_element = 1.0 + 4 / 128**2 if recipe == "square gradients" and "row" in kind else BYTES[recipe]
            twice = "column" in kind or recipe in TWICE
            assert gathers == {NAMES[method]: per_element, **({"bulk_all_gather": per_element} if twice else {})}, (
                recipe
            )
            assert recipe == "none" or max(gathers.values()) <= 0.55 * BYTES["none"]


def test_bytes_are_the_same_without_overlap(ranks: Ranks) -> None:
    for kind in ("column", "row"):
        plain, hidden = ranks.run(_sent, kind, "none")[0], ranks.run(_sent, kind, "ring")[0]
        for recipe in BYTES:
            assert sum(plain[recipe].values()) == sum(hidden[recipe].values()), (kind, recipe)


def test_the_table_of_the_documentation_is_what_is_measured(ranks: Ranks) -> None:
    column, row = ranks.run(_sent, "column", "ring")[0], ranks.run(_sent, "row", "ring")[0]
    rows = {
        "all-gather of x, forward": (column, "ring_all_gather"),
        "all-gather of x, for wgrad": (column, "bulk_all_gather"),
        "all-gather of dY, rowwise, for dgrad": (row, "ring_all_gather"),
        "all-gather of dY, columnwise, for wgrad": (row, "bulk_all_gather"),
        "reduce-scatter of y": (row, "pipelined_reduce_scatter"),
        "reduce-scatter of dX": (column, "bulk_reduce_scatter"),
    }
    text = PAGE.read_text()
    for title, (sent, flow) in rows.items():
        whole = sent["none"].get(flow) or row["none"]["ring_all_gather"]
        shares = [sent[recipe].get(flow) for recipe in COLUMNS]
        cells = ["-" if share is None else f"{share / whole:.2f}" for share in shares]
        assert f"| {title} | {' | '.join(cells)} |" in text, (title, cells)


def _of_a_layer() -> dict[str, float]:
    """Bytes of all gathers of a layer, by recipe, of bfloat16's: two columns and two rows of one width."""
    column, row = _sent("column", "ring"), _sent("row", "ring")

    def gathered(sent: dict[str, int]) -> int:
        return sum(count for name, count in sent.items() if name.endswith("all_gather"))

    # dY of the row is twice as wide as x of the column here.
    whole = {recipe: gathered(column[recipe]) + gathered(row[recipe]) / 2 for recipe in COLUMNS}
    return {recipe: count / whole["none"] for recipe, count in whole.items()}


def test_the_sum_in_the_documentation_is_what_is_measured(ranks: Ranks) -> None:
    shares = ranks.run(_of_a_layer)[0]
    cells = [f"{share:.2f}" for share in shares.values()]
    assert f"| all gathers of a layer | {' | '.join(cells)} |" in PAGE.read_text(), cells
    for recipe in ("delayed", "square gradients", "nvfp4"):
        assert shares[recipe] <= 0.55


def test_gradients_in_square_blocks_are_those_of_one_process(ranks: Ranks) -> None:
    """They travel once, and are transposed behind the gather."""
    for tokens in (128, 24):
        for errors in ranks.run(
            compare_with_one_process, "row", Run("square gradients", sequence_parallel=True, tokens=tokens)
        ):
            assert errors["y"] == 0.0 and max(errors.values()) <= 1e-6, errors


def _dequantized() -> dict[str, int]:
    with measuring() as meter:
        run(Case("column", "current dequantized", "ring", tokens=TOKENS, dtype=torch.bfloat16), options("ring"))
    return {name: flow.bytes_sent for name, flow in meter.by_name.items()}


def test_inputs_that_backward_dequantizes_travel_before_they_are(ranks: Ranks) -> None:
    for sent in ranks.run(_dequantized):
        assert sent["bulk_all_gather"] == sent["ring_all_gather"] == TOKENS // 2 * HIDDEN
