"""Three steps on every mesh are three steps in one process: same start to the bit, same weights after, equal scales on all ranks.

In float32 on the CPU this is equality of bits: sums over ranks have the order of one process (`kernels/fixed_order.py`,
`overlap/collectives.py`). It has to be: FP8 turns a difference of 1e-7 into one of 1e-3 within three steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distributed.parity import RECIPES, Case, alone, spread
from distributed.ranks import Ranks

# By number of ranks: the pools are started one after the other, so that no more processes live than a case needs.
PLANS: dict[int, list[dict[str, Any]]] = {
    2: [{"dp_shard": 2}, {"tp": 2, "dp_shard": 1}, {"dp_shard": 2, "strategy": "fsdp1"}],
    4: [
        {"dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
        {"dp_shard": 4},
        {"dp_shard": 1, "tp": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "strategy": "ddp"},
    ],
    6: [{"dp_shard": 3, "tp": 2}],
    8: [{"dp_replicate": 2, "dp_shard": 2, "tp": 2}],
}


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, same_meshes=True) as ranks:  # two plans with equal meshes make equal groups
        yield ranks


def difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative Frobenius error over all parameters."""
    error = sum(float((got[n].double() - w.double()).square().sum()) for n, w in expected.items())
    return (error / sum(float(w.double().square().sum()) for w in expected.values())) ** 0.5


def chosen(plan: dict[str, Any], whole: bool) -> Iterator[Case]:
    """Both models under all recipes; or every fourth of these, so that four plans in a row have all of them together."""
    number = [p for plans in PLANS.values() for p in plans].index(plan)
    every = [Case(model, recipe, plan) for model in ("llama", "gpt") for recipe in RECIPES]
    yield from (c for i, c in enumerate(every) if whole or (i + number + (c.model == "gpt")) % 4 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.extra)], ids=["some", "all"])
@pytest.mark.parametrize(
    "pool, plan", [(n, p) for n, plans in PLANS.items() for p in plans], indirect=["pool"], ids=str
)
def test_training_on_a_mesh_equals_one_process(pool: Ranks, plan: dict[str, Any], whole: bool) -> None:
    failed = []
    for case in chosen(plan, whole):
        answers = pool.run(spread, case, timeout=240.0)
        expected = alone(case.model, case.width, case.recipe, case.dp, case.batch)
        got = answers[0]
        assert got["start"].keys() == expected["start"].keys(), case
        assert all(torch.equal(got["start"][n], w) for n, w in expected["start"].items()), f"{case}: another start"
        for name, scale in got["scales"].items():
            assert all(torch.equal(a["scales"][name], scale) for a in answers), f"{case}: {name} differs between ranks"
        error = difference(got["end"], expected["end"])
        if error > 0.0 or got["losses"] != pytest.approx(expected["losses"], rel=1e-6):
            failed.append(f"{case}: weights {error:.1e}, losses {got['losses']} for {expected['losses']}")
    assert not failed, "\n".join(failed)
