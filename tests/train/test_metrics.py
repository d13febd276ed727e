"""metrics.jsonl and the sinks."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select

import pytest

from ottava.train.metrics import Metrics, StepMetrics, keep_before, read_metrics
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


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\noops\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        keep_before(path, 9)
    assert "oops" in path.read_text()


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
    assert len({run.name.rsplit("-", 1)[1] for run in runs}) == 1  # one id
    assert any(file.stat().st_size > 100 for run in runs for file in run.glob("*.wandb"))
