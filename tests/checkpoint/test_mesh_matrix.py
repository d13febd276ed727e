"""Every kind of module, recipe and storage, saved on every mesh and loaded on every mesh, by torch's DCP and by `Checkpoints`."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.mesh_cases import MESHES, MODULES, OPTIMIZERS, RECIPES, WAYS, Case, Job, Pool, all_cases, run_jobs
from distributed.ranks import Ranks

pytestmark = pytest.mark.timeout(3600)


def slice_of_the_product() -> list[Job]:
    """Every module on a pair of meshes or two, stored or not, or both: every value of every axis."""
    recipes, meshes = list(RECIPES), list(MESHES)
    jobs = []
    for i, module in enumerate(MODULES):
        for stored in (False, True) if i % 2 == 0 else (i % 4 == 1,):
            number = 2 * i + stored
            torchs = i % 5 == 0 if stored else i % 2 == 0
            case = Case(module, recipes[(number * 2 + i // 5) % 5], stored, "AdamW" if torchs else "FusedAdam")
            source = meshes[number % 6]
            other = meshes[(number + 1 + i // 2) % 6]
            jobs.append(Job(case, source, (source, other) if i % 5 == 0 else (other,), (WAYS[number // 6 % 2],)))
    float8 = Case("Linear", "current", False, "FusedAdam float8")
    jobs.append(Job(float8, "2x2", ("dp4", "3x2", "one")))
    jobs.append(Job(Case("LayerNormMLP-swiglu", "block", True, "FusedAdam float8"), "3x2", ("2x2",)))
    jobs.append(Job(Case("Llama", "hybrid", True, "FusedAdam"), "2x2", ("3x2",)))
    jobs.append(Job(Case("TransformerLayer-gelu", "hybrid", False, "AdamW"), "dp4", ("tp4",)))
    return jobs


def problems_of(jobs: list[Job], root: Path, seconds: float) -> list[str]:
    with Ranks(Pool.SIZE) as ranks:
        return [problem for found in ranks.run(run_jobs, str(root), jobs, timeout=seconds) for problem in found]


def test_a_slice_covers_every_value_of_every_axis() -> None:
    jobs = slice_of_the_product()
    assert {job.case.module for job in jobs} == set(MODULES) and {job.case.recipe for job in jobs} == set(RECIPES)
    assert {(job.case.stored, job.case.optimizer) for job in jobs} == {
        (stored, optimizer) for stored in (False, True) for optimizer in OPTIMIZERS
    }
    assert {job.source for job in jobs} == {target for job in jobs for target in job.targets} == set(MESHES)
    assert {way for job in jobs for way in job.ways} == set(WAYS)


def test_what_one_mesh_saves_another_loads_to_the_bit_and_goes_on(tmp_path: Path) -> None:
    assert problems_of(slice_of_the_product(), tmp_path, 900) == []


@pytest.mark.extra
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", MODULES)
def test_every_pair_of_meshes(tmp_path: Path, module: str, recipe: str) -> None:
    cases = [case for case in all_cases(recipe) if case.module == module]
    jobs = [Job(case, source, tuple(MESHES)) for case in cases for source in MESHES]
    assert problems_of(jobs, tmp_path, 3000) == []
