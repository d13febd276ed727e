"""The loop in real ranks: it learns, it resumes bit for bit, it ends with the right code."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distributed.ranks import Ranks
from ottava.models.hf_files import export_hf, import_hf
from ottava.train import exits
from ottava.train.config import Config, GateSection
from ottava.train.report import write_report
from train.runs import lines, samples, tiny, train

EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")


class Cluster:
    """Ranks and the store they meet at."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def run(self, config: Config, **options: Any) -> int:
        """Exit code, the same in all ranks; the message goes to `said`."""
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        answers = self.ranks.run(_train, config, store.port, options, timeout=240)
        self.said = next((text for _, text in answers if text), "")
        codes = {code for code, _ in answers}
        assert len(codes) == 1, answers
        return codes.pop()


def _train(config: Config, port: int, options: dict[str, Any]) -> tuple[int, str]:
    return train(config, port, **options)


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield Cluster(ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(two, folder) -> Config:
    """A run that nothing happened to."""
    config = tiny(folder, "whole")
    assert two.run(config) == exits.DONE, two.said
    return config


@pytest.fixture(scope="module")
def unquantized(two, folder) -> Config:
    """The same without FP8: ranks put other samples into a microbatch, and its samples share scales."""
    config = tiny(folder, "unquantized", precision={"recipe": "none"})
    assert two.run(config) == exits.DONE, two.said
    return config


def exact(config: Config) -> list[dict[str, Any]]:
    return [{key: line.get(key) for key in EXACT} for line in lines(config)]


def test_a_line_a_step_with_the_promised_keys(whole):
    found = lines(whole)
    assert [line["step"] for line in found] == list(range(1, 11))
    promised = "step loss grad_norm lr tokens tokens_per_s step_s tflops_per_gpu mfu_basis peak_reserved_gib"
    parts = "data_s forward_s backward_s communication_s optimizer_s checkpoint_s"
    for line in found:
        assert set(promised.split()) | set(parts.split()) <= set(line)
        assert all(0 <= line[part] <= line["step_s"] for part in parts.split())
    assert found[-1]["tokens"] == 10 * 8 * 32
    assert found[-1]["loss"] < found[0]["loss"] - 0.3
    assert [line["step"] for line in found if "validation_loss" in line] == [5, 10]


def test_the_folder_of_a_run(whole):
    folder = whole.run_folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["outcome"] == "done" and summary["step"] == 10 and summary["gates"] == []
    assert summary["perplexity"] == pytest.approx(math.exp(summary["validation_loss"]))
    assert (folder / "checkpoints" / "step-00000010" / "manifest.json").is_file()
    looks = [json.loads(line) for line in (folder / "fp8.jsonl").read_text().splitlines()]
    assert [look["step"] for look in looks] == [5, 10]
    tensors = looks[0]["tensors"]
    names = [
        f"layers.{layer}.{tensor}.{role}"
        for layer in (0, 1)
        for tensor in ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp", "layernorm_mlp.fc2")
        for role in ("input", "weight", "grad")
    ]
    assert sorted(tensors) == sorted(names)
    for figures in tensors.values():
        assert 0 <= figures["underflow"] < 0.5 and 0 < figures["saturated"] < 0.5 and figures["amax"] > 0
        # One scale a tensor: amax lands on the format's largest number.
        assert figures["amax"] * figures["scale"] == pytest.approx(448, rel=1e-5) or figures["amax"] * figures[
            "scale"
        ] == pytest.approx(57344, rel=1e-5)


def test_a_report_of_the_run(whole, tmp_path):
    page = write_report([whole.run_folder], tmp_path / "report.html").read_text()
    assert "FP8 health: whole" in page and "Where a step" in page


def test_the_learning_rate_and_the_samples_follow_the_configuration(whole):
    assert [line["lr"] for line in lines(whole)][:3] == pytest.approx(
        [1.5e-3, 3e-3, 3e-3 * (0.1 + 0.9 * 0.961940)], rel=1e-5
    )
    seen = [samples(whole, step) for step in range(10)]
    assert all(len(some) == 8 for some in seen) and len(set.union(*seen)) == 80


@pytest.mark.parametrize(
    "name,sections",
    [
        ("Float8CurrentScaling", {}),
        ("DelayedScaling", {"precision": {"recipe": "DelayedScaling"}}),
        ("dropout", {"model": {"architecture": "gpt", "dropout": 0.1}, "data": {"document_mask": True}}),
    ],
)
def test_a_run_that_died_goes_on_bit_for_bit_without_losing_a_sample(two, folder, whole, name, sections):
    if sections:
        whole = tiny(folder, f"whole-{name}", **sections)
        assert two.run(whole) == exits.DONE, two.said
    config = tiny(folder, f"died-{name}", **sections)
    assert two.run(config, die_at=6) == -9
    assert [line["step"] for line in lines(config)] == [1, 2, 3, 4, 5, 6]
    for path in config.run_folder.glob("seen-*.txt"):
        path.unlink()
    assert two.run(config) == exits.DONE, two.said
    assert exact(config) == exact(whole)
    assert [line["attempt"] for line in lines(config)] == [0] * 4 + [1] * 6
    for step in range(4, 10):
        assert samples(config, step) == samples(whole, step)


@pytest.mark.parametrize("more", [True, False], ids=["from one to two", "from two to one"])
def test_on_another_number_of_ranks_it_goes_on_with_the_same_samples(two, folder, unquantized, more):
    config = tiny(folder, f"{'more' if more else 'fewer'}-ranks", precision={"recipe": "none"})
    with Ranks(1) as ranks:
        one = Cluster(ranks)
        first, then = (one, two) if more else (two, one)
        assert first.run(config, die_at=6) == -9
        for path in config.run_folder.glob("seen-*.txt"):
            path.unlink()
        assert then.run(config) == exits.DONE, then.said
    for ours, theirs in zip(exact(config), exact(unquantized), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["tokens"] == theirs["tokens"]
    for step in range(4, 10):
        assert samples(config, step) == samples(unquantized, step)


def test_a_gate_that_fails_is_exit_code_3(two, folder, capfd):
    config = replace(
        tiny(folder, "gate", train={"steps": 4}),
        gate=GateSection(max_reserved_gib=0.001, warmup_steps=1),
    )
    assert two.run(config) == exits.GATE_FAILED
    (gate,) = json.loads((config.run_folder / "summary.json").read_text())["gates"]
    assert gate["name"] == "max_reserved_gib" and gate["limit"] == 0.001 and not gate["passed"] and gate["value"] > 0.1


def test_mfu_of_an_unknown_device_cannot_be_a_gate(two, folder):
    config = replace(tiny(folder, "no-mfu"), gate=GateSection(min_mfu=0.4, warmup_steps=1))
    assert two.run(config) == exits.WRONG_USAGE
    assert "--metrics.measure-peak" in two.said


def test_another_run_in_the_same_folder_is_refused(two, whole):
    assert two.run(replace(whole, train=replace(whole.train, seed=7))) == exits.WRONG_USAGE
    assert "train.seed was 1234, now 7" in two.said


def test_a_loss_that_stays_non_finite_is_exit_code_5(two, folder):
    config = tiny(folder, "nan", optimizer={"lr": 1e30}, health={"retries": 1}, checkpoint={"every": 1})
    assert two.run(config) == exits.NON_FINITE
    assert json.loads((config.run_folder / "summary.json").read_text())["outcome"] == "non-finite loss"


def test_a_passing_nan_is_skipped(two, folder, whole):
    config = tiny(folder, "passing", train={"steps": 6}, health={"retries": 1})
    assert two.run(config, nan_at=(4,)) == exits.DONE, two.said
    found = lines(config)
    assert found[4]["event"] == "skipped: non-finite loss" and found[4]["loss"] is None
    assert found[5]["loss"] is not None and found[5]["loss"] != lines(whole)[5]["loss"]


def test_more_in_a_row_than_allowed_roll_back(two, folder, whole):
    config = tiny(folder, "passing-two", health={"retries": 1})
    # Copies in memory from before the way back would lead behind it again if a rank died then.
    faults = ((6, "copied"), (9, "no copies"))
    assert two.run(config, nan_at=(7, 8), faults=faults) == exits.DONE, two.said
    found = lines(config)
    assert [line["step"] for line in found] == list(range(1, 11))
    # Steps 8 and 9 are two in a row. There is no checkpoint of step 8, which was skipped: back to that of step 4, and all over again.
    assert found[4]["event"] == "rolled back from step 9: not finite"
    assert exact(config) == exact(whole)


def test_a_step_that_is_judged_when_the_next_one_is_launched_rolls_back_all_the_same(folder):
    """One rank with FusedAdam: weights that are NaN from step 6 on are seen later, and the lines are those of a sound run."""
    fused = {"optimizer": {"name": "fused_adam"}, "health": {"retries": 1}}
    sound, poisoned = tiny(folder, "ahead", **fused), tiny(folder, "ahead-nan", **fused)
    with Ranks(1) as ranks:
        one = Cluster(ranks)
        assert one.run(sound) == exits.DONE, one.said
        assert one.run(poisoned, faults=((5, "nan"),)) == exits.DONE, one.said
    assert [line["step"] for line in lines(sound)] == list(range(1, 11))
    assert lines(poisoned)[4]["event"].startswith("rolled back from step 7: not finite")
    assert exact(poisoned) == exact(sound)


def test_a_damaged_checkpoint_is_passed_over_and_none_left_is_exit_code_4(two, folder):
    config = tiny(folder, "damaged", train={"steps": 8})
    assert two.run(config) == exits.DONE
    longer = replace(config, train=replace(config.train, steps=9))
    newest, _ = sorted((config.run_folder / "checkpoints").glob("step-*"), reverse=True)
    for path in newest.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-7])
    assert two.run(longer) == exits.DONE
    assert lines(longer)[-1]["step"] == 9 and [line["attempt"] for line in lines(longer)] == [0] * 4 + [1] * 5
    for path in (config.run_folder / "checkpoints").glob("step-*/*.distcp"):
        path.write_bytes(b"")
    assert two.run(replace(config, train=replace(config.train, steps=10))) == exits.NO_CHECKPOINT
    assert "No usable checkpoint" in two.said


def test_a_global_batch_that_ranks_cannot_share(two, folder):
    config = tiny(folder, "batch", train={"global_batch": 6})
    assert two.run(config) == exits.WRONG_USAGE
    assert "train.global_batch (6)" in two.said and "2 data-parallel ranks" in two.said


@pytest.mark.parametrize(
    "name,sections",
    [
        ("ddp", {"parallel": {"strategy": "ddp"}}),
        ("fsdp1", {"parallel": {"strategy": "fsdp1"}}),
        pytest.param("tp", {"parallel": {"tp": 2}}, marks=pytest.mark.extra),
        ("sequence-parallel", {"parallel": {"tp": 2, "sequence_parallel": True}}),
        ("recompute", {"parallel": {"recompute": "full", "reshard_after_forward": False}}),
        ("fused_adam", {"optimizer": {"name": "fused_adam"}, "train": {"deterministic": True}}),
    ],
)
def test_other_plans_train_the_same_and_resume(two, folder, whole, name, sections):
    config = tiny(folder, name, **sections)
    assert two.run(config, die_at=5) == -9, two.said
    assert two.run(config) == exits.DONE, two.said
    losses, wanted = ([line["loss"] for line in lines(c)] for c in (config, whole))
    assert losses == pytest.approx(wanted, rel=2e-4)


@pytest.mark.parametrize(
    "name,sections",
    [
        (
            "fp8-weights",
            {
                "optimizer": {"name": "fused_adam"},
                "precision": {"fp8_weights": True},
                "checkpoint": {"background": True},
            },
        ),
        (
            "fp8-weights-tp",
            {
                "optimizer": {"name": "fused_adam"},
                "precision": {"fp8_weights": True},
                "parallel": {"tp": 2},
                "checkpoint": {"background": True},
            },
        ),
        ("fp8-head-tp", {"precision": {"fp8_head": True}, "model": {"pad_vocab_to": 256}, "parallel": {"tp": 2}}),
        (
            "float8-moments",
            {
                "optimizer": {
                    "name": "fused_adam",
                    "moments": "float8",
                    "masters": "remainder",
                    "stochastic_rounding": True,
                },
                "precision": {"weights": "bfloat16"},
            },
        ),
        pytest.param("mxfp8", {"precision": {"recipe": "MXFP8BlockScaling"}}, marks=pytest.mark.extra),
        ("plain", {"precision": {"recipe": "none"}, "train": {"z_loss": 1e-4}}),
    ],
)
def test_other_precisions_resume_bit_for_bit(two, folder, name, sections):
    wanted, config = tiny(folder, f"{name}-whole", **sections), tiny(folder, name, **sections)
    assert two.run(wanted) == exits.DONE, two.said
    assert two.run(config, die_at=5) == -9, two.said
    assert two.run(config) == exits.DONE, two.said
    assert exact(config) == exact(wanted)
    assert lines(config)[-1]["loss"] < lines(config)[0]["loss"] - 0.3


def test_a_new_run_begins_with_the_checkpoint_of_another(two, folder, whole):
    """Same mesh, everything in it: what follows has the same bits."""
    source = whole.run_folder / "checkpoints" / "step-00000008"
    config = tiny(folder, "begun", checkpoint={"load": str(source)})
    assert two.run(config) == exits.DONE, two.said
    assert exact(config) == exact(whole)[8:]
    none = replace(config, checkpoint=replace(config.checkpoint, load="none"))
    assert two.run(none) == exits.WRONG_USAGE and "has a run already" in two.said
    for chosen in (whole.run_folder, whole.run_folder / "checkpoints"):
        assert two.run(tiny(folder, "many", checkpoint={"load": str(chosen)})) == exits.WRONG_USAGE
        assert f"{chosen} is not a checkpoint, but has some: name one of them, such as" in two.said


def test_a_new_run_begins_with_weights_of_hugging_face_if_that_is_said(two, folder, whole):
    theirs, ours = folder / "hf", folder / "imported"
    export_hf(whole.run_folder / "checkpoints" / "step-00000008", theirs, dtype="float32")
    path = import_hf(theirs, ours, pad_vocab_to=whole.model.pad_vocab_to)
    other = tiny(
        folder, "other-heads", model={"heads": 4, "norm_eps": 1e-6, "rope_theta": 1e4}, checkpoint={"load": str(path)}
    )
    other = replace(other, checkpoint=replace(other.checkpoint, allow_missing=("optimizer.*", "step")))
    assert two.run(other) == exits.WRONG_USAGE  # its tensors have the same shapes
    assert "model.heads is 2 there and 4 here" in two.said and "model.rope_theta is 500000" in two.said
    assert "model.norm_eps is 1e-05 there and 1e-06 here" in two.said
    config = tiny(folder, "fine-tuned", checkpoint={"load": str(path)})
    assert two.run(config) == exits.WRONG_USAGE
    assert "missing in the checkpoint: optimizer." in two.said and "allow_missing" in two.said
    allowed = replace(config.checkpoint, allow_missing=("optimizer.*", "step"))
    assert two.run(replace(config, checkpoint=allowed)) == exits.DONE, two.said
    first, then = lines(config)[0], lines(whole)[8]
    assert first["step"] == 1 and abs(first["loss"] - then["loss"]) < 0.2 < abs(first["loss"] - lines(whole)[0]["loss"])


def test_tensor_parallel_runs_say_what_they_sent_and_waited_for(two, folder, whole):
    parallel = {"tp": 2, "sequence_parallel": True}
    losses, sent = {}, {}
    for overlap in ("none", "pipeline"):
        config = tiny(
            folder,
            f"overlap-{overlap}",
            parallel={**parallel, "overlap": overlap, "overlap_minimum_tokens": 0},
            train={"steps": 2, "evaluate_every": 0},
            schedule={"warmup_steps": 0},
        )
        assert two.run(config) == exits.DONE, two.said
        found = lines(config)
        assert all(0 <= line["tp_exposed_s"] <= line["communication_s"] <= line["step_s"] for line in found)
        losses[overlap], sent[overlap] = [line["loss"] for line in found], {line["tp_sent_mb"] for line in found}
    assert losses["pipeline"] == losses["none"]
    assert sent["pipeline"] == sent["none"] and len(sent["none"]) == 1 and min(sent["none"]) > 0
    assert all("tp_sent_mb" not in line and "tp_exposed_s" not in line for line in lines(whole))
