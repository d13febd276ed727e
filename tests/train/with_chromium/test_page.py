"""The report in a real browser without a network: what is drawn, where, and how large. (tests/train/test_report.py has the rest.)"""

from __future__ import annotations

import html
import itertools
import json
import math
import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ottava.train.arguments import to_toml
from ottava.train.clock import PARTS
from ottava.train.config import Config
from ottava.train.gates import Gate
from ottava.train.metrics import Metrics, StepMetrics
from ottava.train.report import POLICY, write_report

MEASURE = (Path(__file__).parent / "measure.js").read_text()
# Whatever the page would fetch is refused, and the refusal is told on the console.
ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
WIDTHS = (1280, 400)
TALL = 20_000
"""Pixels: the whole page is in the window, so that a point of it can be asked what is there."""


# -------------------------------------------------------------------------------------------------------------------- runs


def make_run(folder: Path, steps: int = 600, layers: int = 12, second: float = 1.0, mfu: float = 0.45) -> Path:
    """A noisy run: a restart after 40% of the steps, one after 70%, a step that was skipped, and gates.

    layers: those of which FP8 health is known, every 20 steps. second: how long a step takes.
    """
    noise = random.Random(0)
    with Metrics(folder) as metrics:
        for n in range(1, steps + 1):
            loss = math.nan if n == steps // 2 else 2.6 + 8 / n**0.5 + noise.gauss(0, 0.03)
            parts = [share * second * noise.uniform(0.9, 1.2) for share in (0.01, 0.28, 0.5, 0.1, 0.05)]
            parts.append(1.5 * second if n % 100 == 0 else 0.0)  # a checkpoint
            took = 1.02 * sum(parts) + (40.0 if n == 1 else 0.0)  # the first step compiles kernels
            metrics.record(
                StepMetrics(
                    n, loss, 0.4 + 3 / n**0.5, 6e-4 * min(n / 100, 1.0), 524_288 * n, 524_288 / took, took,
                    tflops_per_gpu=989 * mfu, mfu=mfu / took * second, mfu_basis="989 TFLOP/s, from the data sheet",
                    peak_reserved_gib=66.0 if n < steps / 3 else 69.5, validation_loss=loss if n % 50 == 0 else None,
                    attempt=(n > 0.4 * steps) + (n > 0.7 * steps),
                    event="skipped: parallel.reshard_after_forward_or_something_else" if n == steps // 2 else None,
                    **{f"{part}_s": seconds for part, seconds in zip(PARTS, parts)},
                )
            )  # fmt: skip
    (folder / "config.toml").write_text(to_toml(Config()))
    gates = [Gate("min_mfu", 0.4, mfu).as_dict(), Gate("max_reserved_gib", 80.0, 69.5).as_dict()]
    (folder / "summary.json").write_text(json.dumps({"outcome": "done", "gates": gates}))
    with (folder / "fp8.jsonl").open("w") as file:
        for step in range(20, steps + 1, 20) if layers else ():
            tensors = {
                f"layers.{i}.{name}": {"underflow": 0.05 * i / layers * noise.random(), "saturated": 1e-4}
                for i in range(layers)
                for name in ("self_attention.proj.input", "layernorm_mlp.fc2.grad")
            }
            file.write(json.dumps({"step": step, "tensors": tensors}) + "\n")
    return folder


def two_runs(folder: Path) -> Path:
    """BF16 against FP8."""
    runs = [make_run(folder / "llama-160m-bf16", layers=0, second=1.4), make_run(folder / "llama-160m-fp8", mfu=0.38)]
    return write_report(runs, folder / "report.html")


def many_runs(folder: Path) -> Path:
    """Six, with names that cannot be broken into words, and one that has just begun."""
    runs = [
        make_run(folder / f"{i}_llama_8b_mxfp8_block_scaling_fsdp2_tp4_lr3e4_seed{i}", 12_000 if i == 0 else 100, 48)
        for i in range(5)
    ]
    with Metrics(folder / "new") as metrics:
        metrics.record(StepMetrics(1, 12.5, 1.0, 1e-7, 64, 640.0, 0.1))
    return write_report([*runs, folder / "new"], folder / "report.html")


# ----------------------------------------------------------------------------------------------------------------- browser


def look(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """Opens a copy of the page in a frame of this width (a window has a least width) and returns what measure.js saw."""
    text = page.read_text().replace(
        POLICY, "style-src 'unsafe-inline'"
    )  # its own lets no script run, not even the one that measures
    text = text.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{ALONE}">', 1)
    (folder / "copy.html").write_text(text.replace("</body>", f"<script>{MEASURE}</script></body>"))
    (folder / "around.html").write_text(
        '<!doctype html><link rel="icon" href="data:,"><body style="margin: 0"><pre id="seen"></pre><script>'
        'onmessage = (event) => { document.getElementById("seen").textContent = event.data }</script>'
        f'<iframe src="copy.html" style="border: 0; width: {width}px; height: {TALL}px"></iframe></body>'
    )
    command = [
        "chromium", "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
        "--no-sandbox",  # root has none; the page is our own
        "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}", f"--window-size=1400,{TALL}", "--enable-logging=stderr",
        "--virtual-time-budget=5000", "--dump-dom", f"file://{folder / 'around.html'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "LC_ALL": "C.UTF-8"})
    found = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, flags=re.S)
    assert done.returncode == 0 and found, done.stderr[-4000:]
    console = re.findall(r":CONSOLE[:(].*?\] (.*)", done.stderr)
    return {**json.loads(html.unescape(found[1])), "console": console}


def inside(inner: list[float], outer: list[float], slack: float = 1.0) -> bool:
    """Whether a box lies in another one: left, top, right, bottom. slack: pixels."""
    return (
        inner[0] >= outer[0] - slack and inner[1] >= outer[1] - slack
        and inner[2] <= outer[2] + slack and inner[3] <= outer[3] + slack
    )  # fmt: skip


def overlap(a: list[float], b: list[float], slack: float = 2.0) -> bool:
    """Whether two boxes cover each other by more than `slack` pixels both ways."""
    return min(a[2], b[2]) - max(a[0], b[0]) > slack and min(a[3], b[3]) - max(a[1], b[1]) > slack


def complaints(seen: dict[str, Any]) -> list[str]:
    """What a reader would say of the page. Nothing is good."""
    said = [f"console: {line}" for line in seen["console"]]
    if seen["needs"] > seen["width"]:
        said.append(f"the page is {seen['needs']} px wide in a window of {seen['width']}")
    window = [0, 0, seen["width"], TALL]
    for text in seen["texts"]:
        what = f"{text['tag']} {text['text']!r}"
        if not text["visible"] or text["box"][2] <= text["box"][0]:
            said.append(f"{what} is not to be seen")
        elif text["tag"] in ("h1", "h2", "p") and not inside(text["box"], window):
            said.append(f"{what} leaves the window")
        if text["pixels"] < 12:
            said.append(f"{what} has {text['pixels']} px")
    return said + [f"{chart['title']}: {line}" for chart in seen["charts"] for line in chart_complaints(chart, window)]


def chart_complaints(chart: dict[str, Any], window: list[float]) -> list[str]:
    """The same of one chart."""
    said = [] if inside(chart["box"], window) else ["leaves the window"]
    if chart["box"][2] - chart["box"][0] < 300 or chart["box"][3] - chart["box"][1] < 40:
        said.append("is too small")
    if not chart["marks"]:
        said.append("nothing is drawn")
    for mark in chart["marks"]:
        left, top, right, bottom = mark["box"]
        if not mark["drawn"] or max(right - left, bottom - top) < 2:
            said.append(f"{mark['tag']} {mark['name']!r} is not drawn")
        if not inside(mark["box"], chart["box"]):
            said.append(f"{mark['tag']} {mark['name']!r} leaves the chart")
    for text in chart["texts"]:
        if text["pixels"] < 9:
            said.append(f"{text['text']!r} has {text['pixels']:.1f} px")
        if not inside(text["box"], chart["box"]):
            said.append(f"{text['text']!r} is cut off")
    for a, b in itertools.combinations(chart["texts"], 2):
        if overlap(a["box"], b["box"]):
            said.append(f"{a['text']!r} and {b['text']!r} cover each other")
    return said


# ------------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module", params=WIDTHS)
def two(request, tmp_path_factory):
    """The report of two runs, as seen at this width."""
    folder = tmp_path_factory.mktemp("two")
    return request.param, look(two_runs(folder), request.param, folder)


def test_two_runs_side_by_side_are_readable_without_complaint(two):
    width, seen = two
    assert seen["width"] == width  # the frame has the width that this test is about
    assert complaints(seen) == []
    assert seen["pushed"] == []


def test_every_heading_is_there(two):
    headings = [text["text"] for text in two[1]["texts"] if text["tag"] in ("h1", "h2")]
    assert headings == [
        "Training report", "Summary", "Gates", "What happened",
        "Loss", "Validation loss", "MFU", "Tokens a second", "Reserved memory, GiB", "Gradient norm", "Learning rate",
        "Where a step's seconds go: llama-160m-bf16", "Where a step's seconds go: llama-160m-fp8",
        "FP8 health: llama-160m-fp8",
    ]  # fmt: skip


def test_every_chart_has_its_marks(two):
    charts = [(chart["title"], [mark["tag"] for mark in chart["marks"]]) for chart in two[1]["charts"]]
    for title, tags in charts[:7]:
        # Of each run: two restarts and a skipped step, which is also a gap in the loss.
        assert tags.count("line") == 6, title
        assert tags.count("polyline") == (4 if title == "Loss" else 2), title
    for title, tags in charts[7:9]:
        assert tags == ["polygon"] * len(PARTS), title
    assert charts[9:] == [("FP8 health: llama-160m-fp8", ["rect"] * 12 * 30)]


def test_the_split_names_communication_and_leaves_the_first_step_out(two):
    for chart in two[1]["charts"][7:9]:
        assert [mark["name"] for mark in chart["marks"]] == list(PARTS)
        middle = (chart["box"][1] + chart["box"][3]) / 2
        assert min(mark["box"][1] for mark in chart["marks"]) < middle  # 40 s would press the rest to the ground


def test_runs_of_about_the_same_speed_share_a_scale(two):
    slow, fast = (sum(m["box"][3] - m["box"][1] for m in chart["marks"]) for chart in two[1]["charts"][7:9])
    assert slow / fast == pytest.approx(1.4, rel=0.05)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return many_runs(tmp_path_factory.mktemp("many"))


@pytest.mark.parametrize("width", WIDTHS)
def test_many_runs_with_long_names_are_readable_without_complaint(tmp_path, many, width):
    assert complaints(look(many, width, tmp_path)) == []


def test_a_bad_page_is_complained_about(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><html><head></head><body><h2 hidden>Secret</h2><p style='font-size: 8px'>Fine print</p>"
        "<div style='width: 500px'>Wide</div><img src='https://page.invalid/picture.png'>"
        "<script>console.warn('careful')</script>"
        "<svg width='380' height='100' viewBox='0 0 380 100' aria-label='Bad'>"
        "<polyline points='10,10 90,90'/><polyline points='10,20 90,99' stroke='red' visibility='hidden'/>"
        "<rect x='350' y='0' width='50' height='20'/><text x='10' y='50' font-size='5'>Tiny</text>"
        "<text x='370' y='50'>Beyond</text><text x='100' y='80'>One</text><text x='101' y='81'>Two</text></svg>"
        "<svg width='380' height='100' aria-label='Empty'></svg></body></html>"
    )
    said = "\n".join(complaints(look(page, 400, tmp_path)))
    for what in (
        "console: \"careful\"", "picture.png", "is 508 px wide in a window of 400", "h2 'Secret' is not to be seen",
        "p 'Fine print' has 8 px", "Bad: polyline '' is not drawn", "Bad: rect '' leaves the chart", "'Tiny' has 5.0 px",
        "'Beyond' is cut off", "'One' and 'Two' cover each other", "Empty: nothing is drawn",
    ):  # fmt: skip
        assert what in said, said
