"""Bad numbers, bad disks, bad files: what a run does not save, what it goes back to, and what it goes on without."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.ranks import Ranks
from ottava.checkpoint import CheckpointError, Checkpoints
from ottava.checkpoint.directory import LocalStorage
from ottava.checkpoint.inspect import newest
from ottava.train import exits
from ottava.train.config import Config
from ottava.train.run_folder import check_same, describe, prepare
from ottava.train.tokenize import tokenize
from ottava.train.trust import non_finite
from train.runs import lines, tiny, token_file
from train.test_loop import Cluster, exact


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield Cluster(ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def small(folder: Path, name: str, **sections: Any) -> Config:
    """8 steps in full precision, a checkpoint every 2."""
    train = {"steps": 8, "evaluate_every": 0, "micro_batch": 4, **sections.pop("train", {})}
    checkpoint = {"every": 2, **sections.pop("checkpoint", {})}
    off: dict[str, Any] = {"data": {"validation_fraction": 0.0}, "precision": {"recipe": "none"}}
    return tiny(folder, name, train=train, checkpoint=checkpoint, **{**off, **sections})


@pytest.fixture(scope="module")
def whole(two, folder) -> Config:
    """A run that nothing happened to."""
    config = small(folder, "whole")
    assert two.run(config) == exits.DONE, two.said
    return config


def saved(config: Config) -> list[int]:
    return sorted(int(p.name[5:]) for p in (config.run_folder / "checkpoints").glob("step-*"))


def test_numbers_that_are_not_finite_are_found_in_any_type():
    nan, inf = torch.nan, torch.inf
    state = {
        "fine": torch.ones(3), "empty": torch.empty(0), "whole": torch.ones(2, dtype=torch.long), "step": 4,
        "a": torch.tensor([1.0, inf]), "b": torch.tensor([nan], dtype=torch.bfloat16),
        "c": torch.tensor([0.0, -inf], dtype=torch.float64), "d": torch.tensor([nan]).to(torch.float8_e4m3fn),
        "large": torch.tensor([3e38]),
    }  # fmt: skip
    assert non_finite(state) == ["a", "b", "c", "d"] and non_finite({"step": 1}) == []


@pytest.mark.parametrize("kind", ["inf", "nan"])
def test_weights_that_are_not_finite_are_not_saved_and_the_run_goes_back(two, folder, whole, kind):
    config = small(folder, f"not-saved-{kind}", health={"retries": 1})
    # After the backward pass of step 4: it is finite itself, and the checkpoint that follows it would hold the number.
    assert two.run(config, faults=((3, kind),)) == exits.DONE, two.said
    assert exact(config) == exact(whole)
    assert lines(config)[2]["event"] == "rolled back from step 4: not finite: weight (weight) of head, rank 1"


def test_a_poisoned_newest_checkpoint_is_passed_over_and_does_not_count(two, folder, whole):
    config = small(folder, "poisoned", train={"steps": 4})
    assert two.run(config, faults=((3, "blind"), (3, "nan"))) == exits.DONE, two.said
    assert saved(config) == [2, 4]
    longer = replace(config, train=replace(config.train, steps=8), checkpoint=replace(config.checkpoint, every=3))
    assert two.run(longer, die_at=3) == -9
    assert saved(config) == [2, 3, 4]  # the good ones are the two that are kept
    assert two.run(longer) == exits.DONE, two.said  # 4 is passed over again, or was written anew
    assert [line["attempt"] for line in lines(config)] == [0, 0, 1, 2, 2, 2, 2, 2]
    assert saved(config)[-2:] == [6, 8]


def test_a_checkpoint_that_leads_nowhere_is_gone_behind(two, folder):
    """Its numbers are finite, and what follows from them is not: as blind as a release that looks at no numbers."""
    config = small(folder, "nowhere", train={"steps": 4})
    assert two.run(config, faults=((3, "blind"), (3, "nan"))) == exits.DONE, two.said
    longer = replace(config, train=replace(config.train, steps=8), health=replace(config.health, retries=2))
    assert two.run(longer, faults=((-1, "blind"),)) == exits.DONE, two.said
    assert all(line["loss"] is not None for line in lines(config)) and saved(config)[-1] == 8


def test_a_start_after_it_does_not_begin_with_the_checkpoint_that_was_gone_behind(two, folder):
    config = small(folder, "behind", train={"steps": 4})
    assert two.run(config, faults=((3, "blind"), (3, "nan"))) == exits.DONE, two.said
    longer = replace(config, train=replace(config.train, steps=8), health=replace(config.health, retries=2))
    assert two.run(longer, faults=((-1, "blind"),), die_at=2) == -9  # from 4, to 4 again, to 2: and there it ends
    mark = config.run_folder / "checkpoints" / "step-00000004.distrusted"
    assert mark.is_file()
    assert two.run(longer, faults=((-1, "blind"),)) == exits.DONE, two.said
    assert [line["attempt"] for line in lines(config)] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert not any("event" in line for line in lines(config)), "it began with the one of step 4"
    assert not mark.exists() and saved(config)[-1] == 8  # it was written anew


def test_a_distrusted_checkpoint_is_taken_when_no_other_is_left(tmp_path):
    state, storage = {"w": torch.ones(4), "step": 0}, LocalStorage(tmp_path)
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state | {"step": step})
        storage.distrust(2)
        assert checkpoints.load(state).step == 1 and newest(tmp_path).name == "step-00000001"
        storage.distrust(1)
        assert checkpoints.load(state).step == 2
        checkpoints.save(2, state)  # written anew, it is as good as any
        assert not storage.distrusted(2)
        checkpoints.save(3, state)  # what is pruned leaves no mark
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_signal_while_steps_are_skipped_saves_nothing_that_is_suspect(two, folder):
    config = small(folder, "suspect", health={"retries": 3})
    assert two.run(config, nan_at=(4,), faults=((3, "signal"),)) == exits.STOPPED, two.said
    assert saved(config) == [2, 4]
    summary = json.loads((config.run_folder / "summary.json").read_text())
    assert summary["outcome"] == "stopped by SIGTERM" and summary["step"] == 5


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_event_and_training_goes_on(two, folder, whole, background):
    config = small(folder, f"full-{background}", checkpoint={"background": background})
    assert two.run(config, faults=((1, "full disk 2"),)) == exits.DONE, two.said
    assert exact(config) == exact(whole) and saved(config) == [6, 8]
    events = [line["event"] for line in lines(config) if "event" in line]
    assert len(events) == 1 and events[0].count("checkpoint failed: step 2 was not saved: ") == 2, events
    assert "No space left on device" in events[0]


def test_too_many_failed_saves_are_exit_code_7_with_a_summary(two, folder):
    config = small(folder, "no-room", checkpoint={"max_failed": 3})
    assert two.run(config, faults=((3, "full disk 1000"),)) == exits.NOT_SAVED, two.said
    assert saved(config) == [2]
    summary = json.loads((config.run_folder / "summary.json").read_text())
    assert summary["outcome"] == "checkpoints could not be saved" and summary["step"] == 5


@pytest.mark.parametrize("kind, said", [("cut data", "was cut short"), ("overwrite data", "has the checksum")])
def test_data_that_change_under_a_run_are_named(two, folder, tmp_path, kind, said):
    path = shutil.copy(token_file(folder), tmp_path / "moving.tokens")
    config = small(folder, kind, data={"files": (str(path),), "validation_fraction": 0.0})
    assert two.run(config, faults=((2, kind),)) == exits.WRONG_USAGE
    assert f"moving.tokens {said}" in two.said and saved(config) == [2]


def test_other_data_under_the_same_name_are_refused_at_a_restart(two, folder, tmp_path):
    path = tmp_path / "same.tokens"
    shutil.copy(token_file(folder), path)
    config = small(folder, "other-data", train={"steps": 3}, data={"files": (str(path),), "validation_fraction": 0.0})
    assert two.run(config) == exits.DONE, two.said
    longer = replace(config, train=replace(config.train, steps=4))
    tokenize([Path(__file__)], path, overwrite=True)
    assert two.run(longer) == exits.WRONG_USAGE
    assert "same.tokens is not the file that" in two.said
    shutil.copy(token_file(folder), path)  # with another time
    (config.run_folder / "data.json").write_text("{")  # and nothing to compare with: said, and accepted
    assert two.run(longer) == exits.DONE, two.said


@pytest.mark.parametrize("damage", ["lost", "empty", "garbage"])
def test_a_lost_configuration_is_that_of_the_checkpoints(two, whole, damage):
    path = whole.run_folder / "config.toml"
    path.unlink() if damage == "lost" else path.write_text("" if damage == "empty" else "[model\n\0")
    assert two.run(replace(whole, train=replace(whole.train, seed=7))) == exits.WRONG_USAGE
    assert "train.seed was 1234, now 7" in two.said
    assert two.run(whole) == exits.DONE and "seed = 1234" in path.read_text()


def test_what_the_run_was_is_told_by_its_checkpoints_not_by_a_file_that_was_cut_or_edited(whole, caplog):
    path = whole.run_folder / "config.toml"
    text = path.read_text()
    cut, edited = text[: text.index("seed =")], text.replace("seed = 1234", "seed = 7")
    for content in (cut, edited, 'model = 3\ndata = "x"\n'):
        path.write_text(content)
        with pytest.raises(ValueError, match="holds another run: train.seed was 1234, now 7"):
            check_same(replace(whole, train=replace(whole.train, seed=7)), whole.run_folder)
        check_same(whole, whole.run_folder)
    assert (
        "config.toml is not what the run was started with (train.seed was 1234, now 7): the configuration that"
        in caplog.text
    )
    path.write_text(text)


def test_a_restart_in_place_prepares_the_folder_that_nobody_prepared(whole):
    none = replace(whole, checkpoint=replace(whole.checkpoint, load="none"))
    with pytest.raises(ValueError, match=r"checkpoint\.load is none"):
        prepare(none)
    prepare(none, again=True)  # the checkpoints are its own
    path = whole.run_folder / "config.toml"
    describe(none)
    before = path.stat().st_mtime_ns
    describe(none)
    assert path.stat().st_mtime_ns == before  # nothing to write on a disk that may be full
    path.unlink()
    describe(whole)
    assert "seed = 1234" in path.read_text()


def test_a_start_that_is_refused_by_its_checkpoint_leaves_the_configuration_as_it_was(two, folder):
    fused = {"optimizer": {"name": "fused_adam"}, "train": {"steps": 4}}
    config = small(folder, "refused", **fused)
    assert two.run(config) == exits.DONE, two.said
    before = [(config.run_folder / name).read_bytes() for name in ("config.toml", "data.json")]
    other = replace(config, optimizer=replace(config.optimizer, moments="bfloat16"))
    assert two.run(other) == exits.WRONG_USAGE
    assert "of another type: optimizer.state.embedding.weight.exp_avg" in two.said
    assert [(config.run_folder / name).read_bytes() for name in ("config.toml", "data.json")] == before


def test_without_any_configuration_it_is_refused_in_plain_words(two, whole, folder):
    config = replace(whole, train=replace(whole.train, run=str(folder / "nameless")))
    (config.run_folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert two.run(config) == exits.WRONG_USAGE
    assert "config.toml is missing, and no checkpoint has the configuration" in two.said


def test_checkpoints_that_are_gone_are_missed(two, folder):
    config = small(folder, "unmounted", train={"steps": 3})
    config.run_folder.mkdir()
    (config.run_folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    checkpoints = config.run_folder / "checkpoints"
    checkpoints.symlink_to(folder / "no-such-disk")  # a disk that is not mounted
    with pytest.raises(ValueError, match="checkpoints is not a folder, or a link that leads nowhere"):
        prepare(config)
    checkpoints.unlink()
    assert two.run(config) == exits.DONE, two.said
    assert lines(config)[0]["event"] == "2 steps were done, and no checkpoint is left: began again at step 0"


# --------------------------------------------------------------------------------------------------------- checkpoints alone


def test_an_old_error_is_not_raised_after_a_newer_save(tmp_path, caplog):
    broken = True

    def hook(phase: str) -> None:
        if phase == "writing" and broken:
            raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path, hook=hook)
    checkpoints.save_async(1, {"w": torch.ones(4)})
    checkpoints._background._thread.join()
    broken = False
    checkpoints.finish(2, {"w": torch.ones(4)})
    assert checkpoints.last_saved == 2 and "step 1 was not saved" in caplog.text
    broken = True
    checkpoints.save_async(3, {"w": torch.ones(4)})
    with pytest.raises(CheckpointError, match="step 3 was not saved"):
        checkpoints.finish(3, {"w": torch.ones(4)})


def test_a_rotten_checkpoint_does_not_count_towards_those_that_are_kept(tmp_path):
    state = {"w": torch.ones(1000)}
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
    (shard,) = (tmp_path / "step-00000002").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[-1500] ^= 1
    shard.write_bytes(content)
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.load(state).step == 1 and checkpoints.rotten == {2}
        checkpoints.save(3, state)
        assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["1", "2", "3"]
        checkpoints.save(2, state)  # written anew, it is as good as any
        assert checkpoints.rotten == set()
