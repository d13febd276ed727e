"""`train.cuda_graph`: the bits of a run without it. On a CPU a replay is the same work again on the same static tensors (`Rerun`)."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ottava.graphs import Rerun
from ottava.notices import warn_once
from ottava.train import microbatch_graph
from ottava.train.config import Config
from ottava.train.loop import Loop
from ottava.train.world import Place, World
from train.runs import lines, tiny

EXACT = ("step", "loss", "grad_norm", "lr", "validation_loss")


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replays instead of CUDA graphs; the list has one entry a replay."""
    replays: list[int] = []

    class Counted(Rerun):
        def record(self, run: Any) -> Any:
            replay = super().record(run)
            return lambda: (replays.append(1), replay())[1]

    monkeypatch.setattr(microbatch_graph, "recorder_for", lambda device: Counted())
    warn_once.cache_clear()
    return replays


def _run(config: Config) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as resources:
        world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=60.0))
        loop = Loop(config, world, resources)
        assert loop.finish(loop.run()) == 0
        state = {name: value.detach().clone() for name, value in loop.model.module.state_dict().items()}
    return [{key: line.get(key) for key in EXACT} for line in lines(config)], state


CASES: dict[str, dict[str, Any]] = {
    "one microbatch": {"precision": {"recipe": "none"}, "train": {"global_batch": 2}},
    "delayed": {"precision": {"recipe": "DelayedScaling"}},
    "block": {
        "precision": {"recipe": "Float8BlockScaling"},
        "model": {"hidden_size": 128, "ffn_hidden_size": 128, "layers": 1},
    },
    "no wrapper": {"precision": {"recipe": "DelayedScaling"}, "parallel": {"strategy": "none"}},
    "documents": {"precision": {"recipe": "Float8CurrentScaling"}, "data": {"document_mask": True}},
    "dropout": {"precision": {"recipe": "none"}, "model": {"architecture": "gpt", "dropout": 0.1}},
    "stored": {
        "precision": {"recipe": "Float8CurrentScaling", "fp8_weights": True},
        "optimizer": {"name": "fused_adam"},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_graphed_run_has_the_bits_of_the_run_without(case: str, tmp_path: Path, rerun: list[int]) -> None:
    sections = {**CASES[case]}
    train = {
        "steps": 5,
        "evaluate_every": 3,
        "evaluate_batches": 1,
        "global_batch": 4,
        "micro_batch": 2,
        **sections.pop("train", {}),
    }
    common = {"checkpoint": {"every": 0}, "metrics": {"fp8_every": 4}, **sections}
    plain, plain_state = _run(tiny(tmp_path, "plain", train=train, **common))
    assert not rerun
    graphed, state = _run(tiny(tmp_path, "graphed", train={**train, "cuda_graph": True}, **common))
    looked_at = int(common["precision"]["recipe"] != "none")  # the fourth step is sampled, and so runs as it is
    assert len(rerun) == (5 - microbatch_graph.WARM_UP - looked_at) * train["global_batch"] // 2
    assert graphed == plain
    assert state.keys() == plain_state.keys()
    assert all(torch.equal(state[name], plain_state[name]) for name in state)


def test_weights_that_move_are_recorded_anew(tmp_path: Path, rerun: list[int], caplog: Any) -> None:
    config = tiny(
        tmp_path, train={"steps": 6, "evaluate_every": 0, "cuda_graph": True}, precision={"recipe": "DelayedScaling"}
    )
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as resources, caplog.at_level(logging.WARNING):
        world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=60.0))
        loop = Loop(config, world, resources)
        for _ in range(4):
            loop._step()
        assert loop.graphs is not None
        recorded = dict(loop.graphs._replays)
        assert recorded and "records anew" not in caplog.text
        norm = loop.model.module.norm.weight
        norm.data = norm.data.clone()
        loop._step()
        assert "records anew" in caplog.text
        assert not set(map(id, recorded.values())) & set(map(id, loop.graphs._replays.values()))


def test_a_step_of_another_shape_runs_without_a_graph_and_says_so(
    tmp_path: Path, rerun: list[int], caplog: Any
) -> None:
    config = tiny(tmp_path, train={"evaluate_every": 0, "cuda_graph": True}, precision={"recipe": "none"})
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as resources, caplog.at_level(logging.WARNING):
        world = resources.enter_context(World(Place(0, 1, 0, 1, "localhost", store.port), timeout=60.0))
        loop = Loop(config, world, resources)
        for _ in range(3):
            loop._step()
        before, graphs = len(rerun), loop.graphs
        assert graphs is not None and before == 4
        batch = loop.data.batch(0, 1, (0, 1))
        graphs.begin([batch], 1.0)
        loop.optimizer.zero_grad()
        graphs.run(batch, None)
        assert len(rerun) == before and "run without a graph" in caplog.text
        assert all(p.grad is not None for p in loop.model.module.parameters())


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"parallel": {"strategy": "ddp"}}, "lies whole on one rank"),
        ({"parallel": {"tp": 2}}, "lies whole on one rank"),
        ({"parallel": {"ranks": 2}}, "needs one rank"),
        ({"parallel": {"cpu_offload": True}}, "cpu_offload"),
        ({"parallel": {"recompute": "full"}}, "random states"),
        ({"train": {"compile": True}, "precision": {"recipe": "none"}}, "do not go together"),
    ],
)
def test_configurations_that_a_graph_cannot_hold_are_named(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    train = {"cuda_graph": True, **sections.pop("train", {})}
    with pytest.raises(ValueError, match=said):
        tiny(tmp_path, train=train, **sections)


def test_a_cpu_has_no_graphs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CUDA graphs, but this run is on the cpu"):
        microbatch_graph.recorder_for(torch.device("cpu"))


def test_the_configuration_of_a_run_says_whether_it_was_graphed(tmp_path: Path, rerun: list[int]) -> None:
    config = tiny(tmp_path, train={"steps": 3, "evaluate_every": 0, "cuda_graph": True}, checkpoint={"every": 0})
    _run(config)
    assert "cuda_graph = true" in (config.run_folder / "config.toml").read_text()
    assert json.loads((config.run_folder / "summary.json").read_text())["outcome"] == "done"
