"""metrics.jsonl and the sinks."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select
from unittest.mock import Mock

import pytest

from ottava.train.metrics import Metrics, StepMetrics, keep_before, read_metrics, write_whole
from ottava.train.restarts import note_restart
from ottava.train.run_folder import next_attempt
from ottava.train.sinks import Console, TensorBoard, WandB, one_line

INTERFACE = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "tflops_per_gpu", "mfu", "mfu_basis", "peak_reserved_gib",
}  # fmt: skip


def step(number: int, **more) -> StepMetrics:
    values = {
        "loss": 6 / number,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 64 * number,
        "tokens_per_s": 640.0,
        "step_s": 0.1,
    }
    return StepMetrics(step=number, **{**values, **more})


def test_a_line_has_the_keys_that_scripts_rely_on(tmp_path):
    full = step(1, tflops_per_gpu=400.0, mfu=0.4, mfu_basis="6N", peak_reserved_gib=80.0)
    with Metrics(tmp_path) as metrics:
        metrics.record(full)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert set(json.loads(line)) >= INTERFACE
    assert json.loads(line)["mfu"] == 0.4


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.record(step(1, loss=math.nan, grad_norm=math.inf, event="skipped: non-finite loss"))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text)["loss"] is None and json.loads(text)["event"] == "skipped: non-finite loss"


def test_a_line_is_there_as_soon_as_it_is_recorded(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.record(step(1))
        assert len(list(read_metrics(metrics.path))) == 1


def test_a_resumed_run_tells_each_step_once(tmp_path):
    with Metrics(tmp_path) as metrics:
        for n in range(1, 6):
            metrics.record(step(n))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    with Metrics(tmp_path, first_step=4) as metrics:  # the checkpoint was of step 3
        for n in (4, 5):
            metrics.record(step(n, attempt=1))
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [(line["step"], line["attempt"]) for line in lines] == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]
    assert [line["loss"] for line in lines] == [6 / n for n in range(1, 6)]


@pytest.mark.parametrize(
    "wrong", ['"loss": "x"', '"attempt": null', '"attempt": 1e9', '"step_s": []', '"tokens": 1e31']
)
def test_a_line_with_something_else_in_the_place_of_a_number_is_damaged(tmp_path, wrong):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, ' + wrong + "}\n")
    assert [line["step"] for line in read_metrics(path)] == [1]
    assert next_attempt(tmp_path) == 1 and note_restart(tmp_path, 1, 1) is not None


def test_lines_at_the_end_are_dropped_on_a_full_disk_too(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    monkeypatch.setattr("ottava.train.metrics.write_whole", full)
    keep_before(path, 3)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    keep_before(path, 3)


def test_lines_that_a_full_disk_does_not_take_count_all_the_same(tmp_path):
    class Full:
        """Takes 10 bytes more."""

        def __init__(self, file) -> None:
            self.file, self.left, self.close, self.fileno = file, 10, file.close, file.fileno

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            taken, self.left = self.file.write(data[: self.left]), 0
            return taken

    metrics = Metrics(tmp_path)
    metrics.record(step(1))
    metrics._file = Full(metrics._file)
    for n in (2, 3, 4):
        metrics.record(step(n))
    assert [line["step"] for line in read_metrics(metrics.path)] == [1]
    assert [line["step"] for line in metrics.lines()] == [1, 2, 3, 4]
    metrics.rewind(4)  # to a checkpoint of step 3; the disk has room again
    metrics.record(step(4, attempt=1))
    metrics.close()
    assert [(line["step"], line["attempt"]) for line in read_metrics(metrics.path)] == [(1, 0), (2, 0), (3, 0), (4, 1)]


def test_a_disk_that_is_read_only_when_ranks_meet_again_is_waited_for(tmp_path, monkeypatch, caplog):
    """A rank that died then ended the run, with exit code 2."""
    with Metrics(tmp_path) as metrics:
        for n in (1, 2, 3):
            metrics.record(step(n))
    with monkeypatch.context() as patch:
        for name in ("open_to_append_bytes", "keep_before"):
            patch.setattr(f"ottava.train.metrics.{name}", Mock(side_effect=OSError(30, "Read-only file system")))
        with pytest.raises(OSError, match="Read-only"):
            Metrics(tmp_path, first_step=3)
        metrics = Metrics(tmp_path, first_step=3, patient=True)
        metrics.record(step(3, attempt=1))
        assert [(line["step"], line["attempt"]) for line in metrics.lines()] == [(1, 0), (2, 0), (3, 1)]
        metrics.rewind(2)
        metrics.record(step(2, attempt=2))
        assert [line["step"] for line in read_metrics(metrics.path)] == [1, 2, 3]
    metrics.record(step(3, attempt=2))
    assert [(line["step"], line["attempt"]) for line in read_metrics(metrics.path)] == [(1, 0), (2, 2), (3, 2)]
    metrics.close()
    assert "are lost" not in caplog.text
    lost = Metrics(tmp_path, first_step=4)
    monkeypatch.setattr(lost, "_is_in_place", Mock(side_effect=OSError(30, "Read-only file system")))
    lost.record(step(4))
    lost.close()
    assert "the lines of steps 4 to 4 could not be written, and are lost." in caplog.text


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="what is there is no file"):
            write_whole(path, "x")
    assert (tmp_path / "pipe").is_fifo()


def test_a_last_line_without_its_end_gets_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    with Metrics(tmp_path, first_step=3) as metrics:
        metrics.record(step(3))
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_a_damaged_line_is_set_aside_and_said(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\noops\n\xff\xfe\n[1]\n{"step": 3}\n{"step": 9}\n')
    keep_before(path, 9)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == b"oops\n\xff\xfe\n[1]\n"
    assert "metrics.jsonl, line 2: not a line of metrics" in caplog.text and "line 4" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.damaged"]


def test_lines_that_cannot_be_written_are_kept_and_written_later(tmp_path, caplog):
    class Full:
        """A disk that takes 10 bytes of a line, and no more."""

        def __init__(self) -> None:
            self.left, self.fileno = 10, file.fileno

        def write(self, data: bytes) -> int:
            if not self.left:
                raise OSError(28, "No space left on device")
            taken, self.left = data[: self.left], 0
            return file.write(taken)

    with Metrics(tmp_path) as metrics:
        metrics.record(step(1))
        file = metrics._file
        metrics._file = Full()
        for n in (2, 3):
            metrics.record(step(n))
        assert caplog.text.count("No space left on device. Its lines are kept") == 1
        metrics._file = file
        metrics.record(step(4))
    assert [line["step"] for line in read_metrics(metrics.path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["removed", "moved", "folder"])
def test_a_file_that_is_taken_away_is_begun_anew_and_said(tmp_path, caplog, how):
    run = tmp_path / "run"
    with Metrics(run) as metrics:
        metrics.record(step(1))
        if how == "removed":
            metrics.path.unlink()
        elif how == "moved":
            metrics.path.rename(tmp_path / "rotated.jsonl")
        else:
            run.rename(tmp_path / "elsewhere")
            metrics.record(step(2))
            assert [line["step"] for line in metrics.lines()] == [2]  # waits
            run.mkdir()
        metrics.record(step(3))
        wanted = [2, 3] if how == "folder" else [3]
        assert [json.loads(line)["step"] for line in metrics.path.read_text().splitlines()] == wanted
        assert [line["step"] for line in metrics.lines()] == wanted
        run.joinpath("metrics.jsonl").unlink()
        assert metrics.lines() == []
        metrics.rewind(3)
    assert caplog.text.count("metrics.jsonl was removed or replaced under the run") == 1


def test_a_sink_that_fails_is_left_out_with_one_warning(tmp_path, caplog):
    told = []

    class Good:
        def record(self, metrics: StepMetrics) -> None:
            told.append(metrics.step)

        def close(self) -> None:
            told.append("closed")

    class Dead(Good):
        def record(self, metrics: StepMetrics) -> None:
            raise ConnectionError("W&B is down")

        def close(self) -> None:
            raise AssertionError("it was left out")

    class DiesLast(Good):
        def close(self) -> None:
            raise OSError("no such host")

    with Metrics(tmp_path, [Dead(), Good(), DiesLast()]) as metrics:
        for n in (1, 2):
            metrics.record(step(n))
    assert told == [1, 1, 2, 2, "closed"]
    assert caplog.text.count("Dead failed and is left out from now on: ConnectionError: W&B is down") == 1
    assert "DiesLast failed" in caplog.text


def test_a_console_whose_reader_has_gone_is_given_up_with_one_warning(caplog):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        console = Console(steps=30, every=1, stream=stream)
        for n in range(1, 4):
            console.record(step(n))
        console.close()
    assert caplog.text.count("the console is gone") == 1


def test_sinks_are_told(tmp_path):
    told = []

    class Listener:
        def record(self, metrics: StepMetrics) -> None:
            told.append(metrics.step)

        def close(self) -> None:
            told.append("closed")

    with Metrics(tmp_path, [Listener()]) as metrics:
        metrics.record(step(1))
        metrics.record(step(2))
    assert told == [1, 2, "closed"]


def test_a_console_that_is_no_terminal_gets_plain_lines():
    stream = io.StringIO()
    console = Console(steps=30, every=10, stream=stream)
    for n in range(1, 31):
        console.record(step(n, validation_loss=2.0 if n == 15 else None, event="loss spike" if n == 17 else None))
    console.close()
    lines = stream.getvalue().splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in lines] == [1, 10, 15, 17, 20, 30]
    assert "\x1b" not in stream.getvalue()
    assert lines[1] == "step 10/30  loss 0.6000  grad 1.00  lr 1.00e-03  640 tok/s"
    assert lines[2].endswith("validation 2.0000") and lines[3].endswith("loss spike")


def test_a_line_has_the_beginning_of_a_long_event():
    line = one_line(step(1, event="21% of a step is communication. " + "Change: parallel.prefetch. " * 9), 10)
    assert "21% of a step is communication. Change" in line and line.endswith(" ...") and len(line) < 180


def test_a_line_says_mfu_and_memory_if_known():
    assert "MFU 41.2%  80.0 GiB" in one_line(step(1, mfu=0.412, peak_reserved_gib=80.0), 10)


def test_a_terminal_gets_a_progress_bar():
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream:
        console = Console(steps=3, stream=stream)
        for n in range(1, 4):
            console.record(step(n, validation_loss=1.5 if n == 2 else None))
        console.close()
        stream.flush()
        shown = ""
        while select.select([parent], [], [], 0.5)[0]:  # it comes in pieces
            shown += os.read(parent, 100_000).decode()
    os.close(parent)
    assert "\x1b[" in shown and "step 3/3" in shown and "validation 1.5000" in shown


def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    for n in (1, 2):
        sink.record(step(n, mfu=0.25, mfu_basis="words"))
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"loss", "mfu", "grad_norm"} <= set(events.Tags()["scalars"])
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 6.0), (2, 3.0)]


@pytest.mark.slow
def test_weights_and_biases_works_offline(tmp_path):
    for n in (1, 2):  # the second time as a resumed run
        sink = WandB(tmp_path, "ottava-test", "offline", {"train": {"steps": 2}})
        sink.record(step(n))
        sink.close()
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    # offline-run-DATE-ID; a second one of the same second has a number behind that
    assert len(runs) == 2 and len({run.name.split("-")[3] for run in runs}) == 1
    assert any(file.stat().st_size > 100 for run in runs for file in run.glob("*.wandb"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.jsonl.damaged"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_a_strangers_run_leads_to_no_file_of_the_users(tmp_path, caplog, name, dangling):
    (tmp_path / "run").mkdir()
    target = tmp_path / "mine"
    if not dangling:
        target.write_bytes(b"precious")
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b"damaged\n")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(target)
    Metrics(tmp_path / "run").close()
    assert target.exists() != dangling and (dangling or target.read_bytes() == b"precious")
    assert f"{name} is a link, which a run does not follow" in caplog.text
