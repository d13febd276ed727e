"""Whole runs: saved on one mesh, loaded on another bit for bit, and continued as if nothing had happened."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from checkpoint.run_cases import MESHES, all_cases
from distributed.ranks import Ranks

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all ranks


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="each mesh under a recipe or two"),
        pytest.param(True, id="each mesh under every recipe", marks=pytest.mark.extra),
    ],
)
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, list[str]]]]:
    """By world size, of each rank."""
    everything = request.param
    root = str(tmp_path_factory.mktemp("runs"))
    with Ranks(4) as four, Ranks(6) as six, ThreadPoolExecutor(2) as threads:
        futures = {
            ranks.world_size: threads.submit(
                ranks.run, all_cases, root, ranks.world_size, everything, timeout=1700 if everything else 550
            )
            for ranks in (four, six)
        }
        alone = all_cases(root, 1, everything)
        return {1: [alone], **{world: future.result() for world, future in futures.items()}}


@pytest.mark.parametrize("world", MESHES)
def test_five_more_steps_are_those_of_the_uninterrupted_run(answers: dict, world: int) -> None:
    assert [a["continued"] for a in answers[world]] == [[]] * world


@pytest.mark.parametrize("world", MESHES)
def test_every_mesh_holds_what_another_had(answers: dict, world: int) -> None:
    assert [a["resharded"] for a in answers[world]] == [[]] * world
