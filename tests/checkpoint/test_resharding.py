"""What is saved on one mesh is, bit for bit, what is loaded on another; plain `dcp.load` agrees."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint.sharded_state import (
    GATED,
    MESHES,
    canonical,
    fsdp_model,
    fsdp_state,
    gathered,
    mesh_of,
    sharded,
    with_parts,
)
from distributed.ranks import Ranks
from ottava.checkpoint import Checkpoints, Relaxed, verify


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [n for n in wanted if found[n].dtype != wanted[n].dtype or not torch.equal(found[n], wanted[n])]


def save_on_every_mesh(root: str) -> list[str]:
    for i, name in enumerate(MESHES):
        mesh = mesh_of(name)
        with Checkpoints(root, keep_last=0, config={"mesh": name}) as checkpoints:
            checkpoints.save(i, {"model": with_parts(sharded(mesh, fill=True)), "lr": 0.125, "order": [3, 1]})
    return list(MESHES)


def load_on_every_mesh(root: str, steps: int) -> list[Any]:
    problems = []
    for name in MESHES:
        mesh = mesh_of(name)
        for step in range(steps):
            model = sharded(mesh, fill=False)
            state: dict[str, Any] = {"model": with_parts(model), "lr": 0.0, "order": [0]}
            with Checkpoints(root) as checkpoints:
                loaded = checkpoints.load(state, step)
            state["model"] = model
            assert loaded is not None and (state["lr"], state["order"]) == (0.125, [3, 1])
            problems += [(name, step, n) for n in differences(gathered(state["model"], mesh), canonical())]
            # a reader that we did not write; it knows nothing of the permuted rows
            plain = sharded(mesh, fill=False)
            del plain[GATED]
            dcp.load({"model": plain}, checkpoint_id=loaded.path)
            ours = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state["model"].items() if n != GATED}
            theirs = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in plain.items()}
            problems += [(name, step, n, "dcp") for n in differences(ours, theirs)]
    return problems


def fsdp_round_trip(root: str, saved_on: str) -> list[Any]:
    model, optimizer = fsdp_model(saved_on, seed=1)
    before = fsdp_state(model, optimizer)
    with Checkpoints(root) as checkpoints:
        path = checkpoints.save(5, before)
    wanted = {f"{a}.{n}": t for a in ("model",) for n, t in _full(before[a]).items()} | _full(
        before["optimizer"]["state"]
    )
    problems = []
    for name in MESHES:
        other, others = fsdp_model(name, seed=2)
        state = fsdp_state(other, others)
        with Checkpoints(root) as checkpoints:
            loaded = checkpoints.load(state)
        assert loaded is not None and loaded.rejected == () and loaded.kept == ()
        found = {f"model.{n}": t for n, t in _full(state["model"]).items()} | _full(state["optimizer"]["state"])
        problems += [(name, n) for n in differences(found, wanted)]
        assert state["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
        plain = fsdp_state(*fsdp_model(name, seed=3))
        dcp.load({"model": plain["model"]}, checkpoint_id=path)
        weights = {f"model.{n}": t for n, t in _full(plain["model"]).items()}
        problems += [(name, n, "dcp") for n in differences(weights, {n: t for n, t in wanted.items() if n in weights})]
    return problems


def _full(tree: Any, prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _full(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            found[f"{prefix}{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def async_saves(root: str) -> list[str]:
    mesh = mesh_of("(2,2)")
    state = sharded(mesh, fill=True)
    with Checkpoints(root, keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save_async(step, {"model": with_parts(state), "step": step})
            for tensor in state.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).add_(1)  # training goes on at once
    with Checkpoints(root) as checkpoints:
        model = sharded(mesh, fill=False)
        back: dict[str, Any] = {"model": with_parts(model), "step": 0}
        checkpoints.load(back, 2)
        back["model"] = model
    wanted = {n: t.add(1) for n, t in canonical().items()}
    return [*differences(gathered(back["model"], mesh), wanted), *([] if back["step"] == 2 else ["step"])]


def by_rank(root: str) -> list[str]:
    """State of one rank has the rank in its name; a rank that is new keeps its own."""
    import torch.distributed as dist

    rank = dist.get_rank()
    with Checkpoints(root) as checkpoints:
        if rank < 4:
            checkpoints.save(1, {"rng": {str(rank): torch.full((3,), rank)}, "w": torch.ones(2)})
        state = {
            "rng": {str(rank + 1): torch.full((3,), -1)},
            "w": torch.zeros(2),
        }  # ranks 1, 2, 3 and one that was not there
        loaded = checkpoints.load(state, relaxed=Relaxed(missing=["rng.*"], extra=["rng.*"]))
    assert loaded is not None and state["w"].tolist() == [1, 1]
    assert state["rng"][str(rank + 1)].tolist() == [rank + 1 if rank < 3 else -1] * 3
    return list(loaded.kept)


def contradictions(root: str) -> list[str]:
    import torch.distributed as dist

    rank, texts = dist.get_rank(), []
    states: list[dict[str, Any]] = [
        {"w": torch.zeros(2 + (rank == 2))},
        {"step": 7 + (rank == 1)},
        {"w": object() if rank == 3 else 1},
        {"w": torch.zeros(2)} if rank else {"w": 3},
    ]
    with Checkpoints(root) as checkpoints:
        for state in states:
            try:
                checkpoints.save(1, state)
            except ValueError as error:
                texts.append(str(error))
    return texts


STEPS = len(MESHES) + 1  # the last was saved by one process


def save_by_one_process(root: str) -> None:
    Checkpoints(root, keep_last=0).save(STEPS - 1, {"model": canonical(), "lr": 0.125, "order": [3, 1]})


def all_cases(root: str) -> dict[str, Any]:
    """In one run of the ranks: a new process group in old processes finds meshes of the one before in DTensor's caches."""
    return {
        "saved": save_on_every_mesh(f"{root}/meshes"),
        "resharded": load_on_every_mesh(f"{root}/meshes", STEPS),
        "fsdp (2,2)": fsdp_round_trip(f"{root}/fsdp", "(2,2)"),
        "fsdp hsdp": fsdp_round_trip(f"{root}/hsdp", "hsdp (2,1,2)"),
        "async": async_saves(f"{root}/async"),
        "by rank": by_rank(f"{root}/by_rank"),
        "contradictions": contradictions(f"{root}/contradictions"),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def answers(root: Path) -> list[dict[str, Any]]:
    """Of each rank."""
    save_by_one_process(f"{root}/meshes")
    with Ranks(4) as ranks:
        return ranks.run(all_cases, str(root), timeout=200)


@pytest.mark.parametrize("case", ["resharded", "fsdp (2,2)", "fsdp hsdp"])
def test_every_mesh_loads_what_any_other_saved_as_dcp_does(answers: list[dict[str, Any]], case: str) -> None:
    assert [a[case] for a in answers] == [[]] * 4


@pytest.mark.parametrize("step", range(STEPS))
def test_one_process_loads_what_any_mesh_saved(answers: list[dict[str, Any]], root: Path, step: int) -> None:
    state: dict[str, Any] = {"model": {n: torch.zeros_like(t) for n, t in canonical().items()}, "lr": 0.5, "order": []}
    loaded = Checkpoints(root / "meshes").load(state, step)
    assert loaded is not None and not differences(state["model"], canonical())
    assert loaded.config == (None if step == len(MESHES) else {"mesh": list(MESHES)[step]})
    plain = {n: torch.zeros_like(t) for n, t in canonical().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to load in a single process": it is
        dcp.load({"model": plain}, checkpoint_id=loaded.path)
    assert not differences(plain, canonical())  # in canonical order, the gated rows too
    assert all(row.good for row in verify(loaded.path))


def test_an_asynchronous_save_has_the_state_of_its_step(answers: list[dict[str, Any]], root: Path) -> None:
    assert [a["async"] for a in answers] == [[]] * 4
    assert sorted(p.name for p in (root / "async").iterdir()) == ["step-00000002", "step-00000003"]


def test_state_of_one_rank(answers: list[dict[str, Any]]) -> None:
    assert [a["by rank"] for a in answers] == [[], [], [], ["rng.4"]]


def test_ranks_that_contradict_each_other_all_get_the_same_error(answers: list[dict[str, Any]], root: Path) -> None:
    texts = answers[0]["contradictions"]
    assert all(a["contradictions"] == texts for a in answers) and len(texts) == 4
    for text, part in zip(texts, ["in rank 2", "Put the rank in its name", "rank 3: w is", "A tensor in one rank"]):
        assert part in text, text
    assert not (root / "contradictions").exists()
