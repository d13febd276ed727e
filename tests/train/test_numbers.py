"""Numbers that are wrong: counted, named, found by a replay; and no false alarm."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed.ranks import Ranks
from ottava.train import exits
from ottava.train.config import Config
from train.number_faults import Fault, blamed, events, train_with
from train.runs import lines, tiny

INF, NAN = math.inf, math.nan
MLP, QKV = "layers.1.layernorm_mlp", "layers.0.self_attention.layernorm_qkv"
RECIPES = (
    "Float8CurrentScaling",
    "DelayedScaling",
    "Float8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "none",
)


class Team:
    """Ranks, and the store they meet at."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def run(self, config: Config, *faults: Fault, timeout: float = 240.0, forward_alone: bool = False) -> int:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        answers = self.ranks.run(train_with, config, store.port, faults, forward_alone, timeout=timeout)
        self.said = next((text for _, text in answers if text), "")
        codes = {code for code, _ in answers}
        assert len(codes) == 1, answers
        return codes.pop()


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield Team(ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def small(folder: Path, name: str, **sections: Any) -> Config:
    """8 steps of two microbatches, a checkpoint after every second."""
    base: dict[str, Any] = {
        "train": {"steps": 8, "evaluate_every": 0, "global_batch": 8, "micro_batch": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "data": {"validation_fraction": 0.0},
        "metrics": {"fp8_every": 0},
        "health": {"retries": 3, "replay_every": 0, "watchdog_s": 40.0},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return tiny(folder, name, **base)


def losses(config: Config) -> list[float]:
    return [line["loss"] for line in lines(config)]


@pytest.fixture(scope="module")
def whole(two, folder) -> Config:
    """A run that nothing happened to, with every look at every step."""
    config = small(folder, "whole", health={"replay_every": 1})
    assert two.run(config) == exits.DONE, two.said
    assert events(config) == []
    return config


def test_bad_numbers_are_named_with_layer_operand_rank_step_and_direction(two, folder):
    config = small(folder, "named", train={"steps": 12}, checkpoint={"every": 1})
    faults = {
        # hidden by FP8: the loss stays finite
        2: (Fault(2, 1, "output", f"{QKV}", INF, call=0), ("forward", QKV)),
        4: (Fault(4, 0, "gradient", MLP, NAN, call=0), ("backward", MLP)),
        6: (Fault(6, 1, "output", MLP, NAN, call=1), ("forward", "the model")),  # gone when the step is run again
        8: (Fault(8, 1, "weight", f"{MLP}.fc2_weight", INF), ("", MLP)),
        9: (Fault(9, 0, "exp_avg", "layers.0.self_attention.proj.weight", 1e28), ("", "layers.0.self_attention.proj")),
        10: (Fault(10, 1, "weight", "norm.weight", 3e36), ("", "norm")),
    }
    assert two.run(config, *(fault for fault, _ in faults.values())) == exits.DONE, two.said
    found = blamed(config)
    assert sorted(found) == sorted(faults)
    for step, (fault, (direction, layer)) in faults.items():
        assert found[step]["rank"] == fault.rank and found[step]["direction"] == direction, found[step]
        assert found[step]["layer"] == layer, found[step]


def test_what_fp8_hides_is_found_in_the_step_that_has_it(two, folder):
    """An infinity inside of a module, or in a weight, saturates: loss and gradients are finite."""
    config = small(folder, "hidden", precision={"recipe": "DelayedScaling"}, checkpoint={"every": 1})
    inside = Fault(2, 1, "gradient", MLP, INF, call=1)
    scale = Fault(5, 0, "scale", MLP, 1e30, seed=3)
    assert two.run(config, inside, scale) == exits.DONE, two.said
    found, story = blamed(config), lines(config)
    assert found[2] | {"value": ""} == found[2] | {
        "kind": "non-finite", "layer": MLP, "operand": "fc2.gradient", "rank": 1, "direction": "backward", "value": "",
    }  # fmt: skip
    assert story[2]["loss"] is not None and story[2]["event"].startswith(
        "skipped: non-finite numbers that FP8 hides: fc2.gradient of "
    )
    assert found[5]["operand"] == "scale (fwd_scale)" and found[5]["layer"] == MLP and found[5]["rank"] == 0
    assert story[5]["event"].startswith(
        "rolled back from step 6: not plausible: scale (fwd_scale) of layers.1.layernorm_mlp"
    )


def test_flipped_bits_are_found_by_a_replay_with_their_rank_and_the_run_is_what_it_would_have_been(two, folder, whole):
    config = small(folder, "flips", health={"replay_every": 1, "retries": 8}, checkpoint={"every": 1})
    faults = (
        Fault(1, 1, "weight", seed=1),
        Fault(2, 0, "exp_avg", seed=2),
        Fault(3, 1, "output", seed=3),
        Fault(4, 0, "output", seed=4, call=3),  # the replay itself
        Fault(5, 1, "exp_avg_sq", seed=5),
        Fault(6, 0, "gradient", seed=6),
    )
    assert two.run(config, *faults) == exits.DONE, two.said
    found = blamed(config)
    assert {step: f["rank"] for step, f in found.items()} == {fault.step: fault.rank for fault in faults}, found
    kinds = {"output": "replay", "gradient": "replay"}
    assert [found[f.step]["kind"] for f in faults] == [kinds.get(f.place, "memory") for f in faults]
    assert [found[f.step]["detail"].partition(":")[0] for f in faults] == [
        "transient" if f.place in kinds else "persistent" for f in faults
    ]
    assert losses(config) == losses(whole)


@pytest.mark.parametrize("gathered", [False, True], ids=["gathered again", "stays gathered"])
def test_a_replay_without_backward_finds_flips_and_leaves_the_run_as_it_would_have_been(two, folder, gathered):
    """As on a GPU, whose gradients do not repeat themselves. The passes after it must not notice."""
    options: dict[str, Any] = {
        "train": {"steps": 5},
        "precision": {"recipe": "DelayedScaling"},
        "parallel": {"reshard_after_forward": not gathered},
    }
    config = small(folder, f"forward-{gathered}", health={"replay_every": 1}, checkpoint={"every": 1}, **options)
    flips = (Fault(2, 1, "output", seed=3), Fault(3, 0, "output", seed=4, call=3))
    assert two.run(config, *flips, forward_alone=True) == exits.DONE, two.said
    found = blamed(config)
    assert {step: (f["kind"], f["rank"]) for step, f in found.items()} == {2: ("replay", 1), 3: ("replay", 0)}
    undisturbed = small(folder, f"forward-{gathered}-whole", **options)
    assert two.run(undisturbed) == exits.DONE and losses(config) == losses(undisturbed)


def test_replicas_that_differ_are_found_and_the_rank_is_told_after_the_steps_were_done_again(two, folder):
    """Under DDP; the bit flips at a step that nobody looks at."""
    options: dict[str, Any] = {"parallel": {"strategy": "ddp"}, "checkpoint": {"every": 4}}
    config = small(folder, "replicas", health={"replay_every": 4, "retries": 2}, **options)
    assert two.run(config, Fault(5, 1, "weight", "layers.0.self_attention.proj.weight", 0.125)) == exits.DONE, two.said
    story = events(config)
    assert [event["what"] for event in story] == ["found", "rolled back", "attributed"]
    assert (
        story[0]["step"] == 8
        and story[0]["findings"][0]["kind"] == "replicas"
        and story[0]["findings"][0]["rank"] is None
    )
    assert {finding["rank"] for finding in story[2]["findings"]} == {1}
    undisturbed = small(folder, "replicas-whole", **options)
    assert two.run(undisturbed) == exits.DONE and losses(config) == losses(undisturbed)


def test_without_a_checkpoint_a_transient_fault_costs_a_step_and_bad_state_the_run(two, folder, whole):
    none = {"checkpoint": {"every": 0}}
    config = small(folder, "transient", health={"replay_every": 1}, **none)
    assert two.run(config, Fault(2, 1, "output", seed=9)) == exits.DONE, two.said
    assert losses(config) == losses(whole) and [e["what"] for e in events(config)] == ["found", "rolled back"]
    config = small(folder, "lost", **none)
    assert two.run(config, Fault(2, 1, "weight", "norm.weight", INF)) == exits.NON_FINITE
    (found, *_) = events(config)
    assert found["text"] == "Weight (weight) of norm is not finite (inf at 0) in rank 1, step 3."


@pytest.mark.extra
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_false_alarm_in_2000_undisturbed_steps(two, folder, recipe):
    config = small(
        folder, f"calm-{recipe}", train={"steps": 2000, "global_batch": 4, "micro_batch": 2}, precision={"recipe": recipe},
        checkpoint={"every": 500}, health={"replay_every": 10, "watchdog_s": 300.0},
    )  # fmt: skip
    assert two.run(config, timeout=3000.0) == exits.DONE, two.said
    assert events(config) == [] and len(lines(config)) == 2000
    told = {line.get("event") for line in lines(config)} - {None, "loss spike"}
    assert all("communication" in event for event in told), told  # two ranks on busy cores do wait for each other


@pytest.mark.extra
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp", "fsdp1"])
def test_flips_all_found_with_their_rank(two, folder, strategy):
    """With the others, more than 200: weights, both moments, activations and gradients, in every bit that leaves a finite number."""
    places = ("weight", "exp_avg", "exp_avg_sq", "output", "gradient", "output")
    faults = [Fault(1 + i, i * 7 // 3 % 2, places[i % 6], seed=i, call=1 if i % 6 != 5 else 3) for i in range(68)]
    config = small(
        folder, f"flips-{strategy}", train={"steps": 70}, parallel={"strategy": strategy}, checkpoint={"every": 1},
        health={"replay_every": 1, "retries": 5, "watchdog_s": 300.0},
    )  # fmt: skip
    assert two.run(config, *faults, timeout=1500.0) == exits.DONE, two.said
    found = blamed(config)
    wrong = [(fault, found.get(fault.step)) for fault in faults if found.get(fault.step, {}).get("rank") != fault.rank]
    assert wrong == []
    undisturbed = small(folder, f"flips-{strategy}-whole", train={"steps": 70}, parallel={"strategy": strategy})
    assert two.run(undisturbed, timeout=600.0) == exits.DONE and losses(config) == losses(undisturbed)


@pytest.mark.extra
@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "Float8BlockScaling"])
def test_infinities_and_nans_are_named_every_time(two, folder, recipe):
    faults = []
    for i in range(20):
        place = ("weight", "output", "gradient", "exp_avg")[i % 4]
        faults.append(Fault(1 + 2 * i, i // 2 % 2, place, value=(INF, NAN, -INF)[i % 3], call=0, seed=i))
    config = small(
        folder, f"named-{recipe}", train={"steps": 42}, precision={"recipe": recipe}, checkpoint={"every": 1},
        health={"watchdog_s": 300.0},
    )  # fmt: skip
    assert two.run(config, *faults, timeout=900.0) == exits.DONE, two.said
    found = blamed(config)
    assert {f.step: f.rank for f in faults} == {step: f["rank"] for step, f in found.items()}
    kinds = {"weight": "weight", "exp_avg": "moment", "output": ("output", "input"), "gradient": "gradient"}
    for fault in faults:
        operand, direction = found[fault.step]["operand"], found[fault.step]["direction"]
        assert operand.startswith(kinds[fault.place]) or kinds[fault.place][0] in operand, (fault, found[fault.step])
        assert direction == {"output": "forward", "gradient": "backward"}.get(fault.place, ""), (
            fault,
            found[fault.step],
        )
