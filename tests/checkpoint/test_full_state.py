"""Whole tensors and whole state dicts of models on any mesh are those of one process, by torch's own functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.full_state_cases import CASES, EVERYTHING, Case, check_everything
from checkpoint.mesh_cases import Pool
from distributed.ranks import Ranks

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, id="each recipe once"),
        pytest.param(EVERYTHING, id="both models under every recipe", marks=pytest.mark.extra),
    ],
)
def test_torch_gathers_and_loads_what_one_process_has(tmp_path: Path, cases: list[Case]) -> None:
    with Ranks(Pool.SIZE) as ranks:
        answers = ranks.run(check_everything, str(tmp_path), cases, timeout=1700)
    assert [problem for found in answers for problem in found] == []
