"""The report: one page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tomli_w

from ottava.train import charts
from ottava.train.arguments import to_toml
from ottava.train.config import Config
from ottava.train.metrics import Metrics, StepMetrics
from ottava.train.report import POLICY, STYLE, load_run, write_report


def make_run(folder: Path, steps: int = 40, speed: float = 1.0) -> Path:
    """A run with a restart, a step that was skipped, gates and FP8 health."""
    with Metrics(folder) as metrics:
        for n in range(1, steps + 1):
            metrics.record(
                StepMetrics(
                    n, float("nan") if n == 9 else 2 + 3.5 / n, 1.0, 1e-3, 64 * n, 640.0 * speed, 0.1,
                    mfu=0.4 * speed, mfu_basis="6N <causal>", peak_reserved_gib=1.5, forward_s=0.03, backward_s=0.05,
                    communication_s=0.01, optimizer_s=0.01, validation_loss=2.5 if n % 10 == 0 else None, attempt=int(n > 20),
                    event="skipped: non-finite loss" if n == 9 else None,
                )
            )  # fmt: skip
    (folder / "config.toml").write_text(to_toml(Config()))
    gates = [{"name": "min_mfu", "limit": 0.5, "value": 0.4, "passed": False}]
    (folder / "summary.json").write_text(json.dumps({"outcome": "gate failed", "gates": gates}))
    looks = [
        {"step": s, "tensors": {f"layers.{i}.proj.input": {"underflow": 0.01 * i, "saturated": 0.0} for i in range(12)}}
        for s in (10, 20, 30)
    ]
    (folder / "fp8.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    return folder


class Page(HTMLParser):
    """Tags, what they refer to, and whether they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.references += [value for key, value in attributes if key in ("src", "href", "srcset")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def page(tmp_path):
    text = write_report(
        [make_run(tmp_path / "bf16"), make_run(tmp_path / "fp8 <b>", speed=1.3)], tmp_path / "r.html"
    ).read_text()
    return text, Page(text)


def test_the_page_needs_nothing_else(page):
    text, parsed = page
    assert "script" not in parsed.seen and parsed.references == ["data:,"]
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text


def test_names_and_texts_are_escaped(page):
    text, parsed = page
    assert "fp8 <b>" not in text and "b" not in parsed.seen and "fp8 <b>" in " ".join(parsed.words)


def test_everything_is_drawn_for_both_runs(page):
    _, parsed = page
    words = " ".join(parsed.words)
    for title in (
        "Loss",
        "Validation loss",
        "MFU",
        "Reserved memory, GiB",
        "Where a step's seconds go: bf16",
        "FP8 health: bf16",
    ):
        assert title in words
    for said in (
        "gate failed",
        "communication 10%",
        ": 0.4, limit 0.5",
        "restart 1",
        "skipped: non-finite loss",
        "52.0%",
        "6N <causal>",
        "layer 11, step 30: 11%",
    ):
        assert said in words
    assert parsed.words.count("failed") == 2
    assert parsed.seen.count("svg") == 7 + 2 + 2
    assert parsed.seen.count("polygon") == 2 * 4
    assert parsed.seen.count("rect") == 2 * 12 * 3


def test_charts_are_valid_xml_without_nan(page):
    for svg in re.findall(r"<svg.*?</svg>", page[0], flags=re.S):
        ElementTree.fromstring(svg)
        assert "nan" not in svg.replace("non-finite", "").lower() and "inf" not in svg.replace("non-finite", "").lower()


def test_a_skipped_step_is_a_gap_in_the_line(tmp_path):
    loss = load_run(make_run(tmp_path / "a")).column("loss")
    svg = charts.lines("Loss", [loss])
    assert svg.count("<polyline") == 2


def test_long_runs_make_small_pages(tmp_path):
    path = write_report([make_run(tmp_path / "long", steps=5_000)], tmp_path / "r.html")
    assert path.stat().st_size < 300_000


def test_a_run_that_just_began_and_has_nothing_else(tmp_path):
    with Metrics(tmp_path / "new") as metrics:
        metrics.record(StepMetrics(1, 5.5, 1.0, 1e-3, 64, 640.0, 0.1))
    parsed = Page(write_report([tmp_path / "new"], tmp_path / "r.html").read_text())
    assert "running or killed" in parsed.words and "circle" in parsed.seen


def test_a_step_that_was_looked_at_twice_counts_as_it_was_last(tmp_path):
    run = make_run(tmp_path / "a")
    with (run / "fp8.jsonl").open("a") as file:  # the run went back to step 10
        for step in (20, 30, 40):
            file.write(json.dumps({"step": step, "tensors": {"layers.0.proj.input": {"underflow": 0.07}}}) + "\n")
    assert [look["step"] for look in load_run(run).health] == [10, 20, 30, 40]
    words = Page(write_report([run], tmp_path / "r.html").read_text()).words
    assert "layer 0, step 20: 7%" in words and "layer 11, step 20: not measured" in words


def test_a_bad_look_among_many_is_shown(tmp_path):
    run = make_run(tmp_path / "a")
    looks = [
        {"step": s, "tensors": {"layers.0.proj.input": {"underflow": 0.09 if s == 77 else 0.0}}} for s in range(1, 1001)
    ]
    (run / "fp8.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    parsed = Page(write_report([run], tmp_path / "r.html").read_text())
    assert parsed.seen.count("rect") <= 60 and any(
        re.fullmatch(r"layer 0, step \d+: 9%", word) for word in parsed.words
    )


def test_runs_of_the_same_name_are_told_apart(tmp_path, monkeypatch):
    first, second = make_run(tmp_path / "monday" / "run"), make_run(tmp_path / "tuesday" / "run")
    words = Page(write_report([first, second], tmp_path / "r.html").read_text()).words
    assert "monday/run" in words and "tuesday/run" in words
    monkeypatch.chdir(first)
    assert load_run(Path(".")).name == "run"


def test_events_beyond_the_table_are_counted(tmp_path):
    with Metrics(tmp_path / "a") as metrics:
        for n in range(1, 251):
            metrics.record(StepMetrics(n, 5.5, 1.0, 1e-3, 64, 640.0, 0.1, event="loss spike"))
    words = Page(write_report([tmp_path / "a"], tmp_path / "r.html").read_text()).words
    assert "50 more are not shown." in words


def test_slow_first_steps_do_not_hide_the_others(tmp_path):
    with Metrics(tmp_path / "a") as metrics:
        for n in range(1, 21):
            metrics.record(StepMetrics(n, 5.5, 1.0, 1e-3, 64, 640.0, 0.1, forward_s=60.0 if n == 1 else 0.1))
    svg = re.findall(r"<svg.*?</svg>", write_report([tmp_path / "a"], tmp_path / "r.html").read_text(), flags=re.S)[-1]
    assert "Seconds of a step" in svg and ">0.1<" in svg and ">20<" in svg and ">60<" not in svg


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG 2 defines it."""
    levels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in levels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", charts.COLOURS)
def test_lines_stand_out_from_a_light_and_a_dark_page(colour):
    """WCAG 2 asks for 3:1 of what is drawn."""
    for card in re.findall(r"--card: (#\w+)", STYLE):
        high, low = sorted((luminance(colour), luminance(card)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, card


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run: it has no metrics.jsonl"):
        write_report([tmp_path], tmp_path / "r.html")
    (tmp_path / "metrics.jsonl").write_text("")
    for _ in range(2):
        with pytest.raises(ValueError, match="has no step yet: `ottava status` and `ottava logs` tell"):
            write_report([tmp_path], tmp_path / "r.html")
        (tmp_path / "config.toml").write_text("")
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)  # it has failed before its first step
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], tmp_path / "r.html")


@pytest.mark.parametrize(
    "low, high, want",
    [(0, 10, [0, 2, 4, 6, 8, 10]), (2.01, 5.6, [3, 4, 5]), (0, 3e-3, [0, 1e-3, 2e-3, 3e-3]), (5, 5, [5])],
)
def test_ticks_are_round(low, high, want):
    assert charts.ticks(low, high) == pytest.approx(want)


@pytest.mark.parametrize(
    "value, want",
    [
        (0.0, "0"), (0.25, "0.25"), (3.1662, "3.1662"), (1_500.0, "1,500"), (9_500.0, "9,500"), (12_000.0, "12k"),
        (150_000.0, "150k"), (2_500_000.0, "2.5M"), (4e9, "4G"), (2.5e-4, "2.5e-4"), (6e-10, "6e-10"), (-20_000.0, "-20k"),
    ],
)  # fmt: skip
def test_labels_say_the_number(value, want):
    assert charts.plain(value) == want


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def hostile_run(folder: Path) -> Path:
    """Text that is a script wherever a run's files may have text or a number."""
    folder.mkdir(parents=True)
    base = {"step": 1, "loss": 1.0, "mfu": 0.1, "tokens_per_s": 10.0, "tokens": 100, "attempt": 0, "forward_s": 0.1}
    numbers = [
        {**base, "step": n, key: evil} for n, key in enumerate(base, 2) for evil in (EVIL, [EVIL], 10**400, 1e308)
    ]
    lines = [
        base,
        *(line for line in numbers if line["step"] is not EVIL),
        {**base, "step": 50, "event": EVIL, "mfu_basis": EVIL},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(
        tomli_w.dumps({"a": 1, EVIL: {EVIL: EVIL}, "gate": {"warmup_steps": EVIL}, "model": {"name": EVIL}})
    )
    gates = [
        EVIL,
        {"name": EVIL, "limit": EVIL, "value": EVIL},
        {"name": EVIL, "limit": 1, "value": 2, "passed": False},
    ]
    (folder / "summary.json").write_text(json.dumps({"outcome": EVIL, "gates": gates}))
    tensors = [{EVIL: {"underflow": 0.1}}, {EVIL: {"underflow": EVIL}}, {EVIL: EVIL}, EVIL]
    looks = [{"step": n, "tensors": tensor} for n, tensor in enumerate(tensors)]
    (folder / "fp8.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    return folder


def test_everything_of_a_strangers_run_is_escaped(tmp_path):
    runs = [hostile_run(tmp_path / name / EVIL.replace("/", "")) for name in ("a", "b")]
    text = write_report(runs, tmp_path / "report.html").read_text()
    page = Page(text)
    assert {"script", "img"}.isdisjoint(page.seen) and page.references == ["data:,"]
    assert "alert(1)" in " ".join(page.words) and "<script" not in text and "<img" not in text
    assert f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">' in text and "script" not in POLICY


@pytest.mark.parametrize("name", ["summary.json", "config.toml"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"3", b""])
def test_a_damaged_file_of_a_run_is_named_or_empty(tmp_path, name, content):
    (make_run(tmp_path / "run") / name).write_bytes(content)
    if name == "config.toml" and not content:
        write_report([tmp_path / "run"], tmp_path / "report.html")
        return
    with pytest.raises(ValueError, match=name):
        write_report([tmp_path / "run"], tmp_path / "report.html")
