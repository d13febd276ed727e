"""Folders of runs that a crash has damaged or a stranger has made: `report`, `explain`, `status` and `logs` are asked about each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

Spoil = Callable[[Path], Any]
"""Spoils the run in a folder."""

ESCAPE = "\x1b[2J\x1b]0;evil\x07\r"
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
METRICS, EVENTS, RANK_LOG = "metrics.jsonl", "events.jsonl", "logs/rank-0.log"
FILES = (METRICS, EVENTS, "config.toml", "summary.json", "fp8.jsonl", "restarts.jsonl", RANK_LOG, "stalls/rank-0.txt")
DEEP = 100_000


def _finding(**fields: Any) -> dict[str, Any]:
    return {
        "kind": "non-finite",
        "layer": "layers.0",
        "operand": "input",
        "rank": 0,
        "step": 4,
        "direction": "forward",
        **fields,
    }


def _event(**fields: Any) -> dict[str, Any]:
    return {"step": 4, "what": "skipped", "text": "Step 4 has a non-finite loss.", "findings": [_finding()], **fields}


def _step(step: int, **fields: Any) -> dict[str, Any]:
    times = {"step_s": 0.5, "tokens_per_s": 128.0, "communication_s": 0.1, "forward_s": 0.1}
    return {
        "step": step,
        "loss": 5.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 64 * step,
        "attempt": 0,
        **times,
        **fields,
    }


WHO = {"rank": 0, "size": 1, "host": "here", "pid": 1, "time": 1.0, "restart": 0, "launcher": None}


def make_run(folder: Path) -> None:
    """A run that nothing is wrong with."""
    (folder / "logs").mkdir(parents=True)
    (folder / "stalls").mkdir()
    steps = [_step(n, event="loss spike" if n == 9 else None) for n in range(1, 13)]
    _write(folder, METRICS, *steps)
    _write(folder, EVENTS, _event())
    (folder / "config.toml").write_text("[train]\nsteps = 12\n")
    (folder / "summary.json").write_text(json.dumps({"outcome": "done", "step": 12, "gates": []}))
    figures = {"amax": 1.0, "scale": 2.0, "underflow": 0.1, "saturated": 0.0, "non_finite": 0.0}
    _write(folder, "fp8.jsonl", {"step": 5, "tensors": {"layers.0.input": figures}})
    restart = {"attempt": 1, "cause": "a rank died", "in_place": True, "planned": False, "step_before": 6, "step": 5}
    _write(folder, "restarts.jsonl", {**restart, "down_s": 1.0, "redone_s": 0.5})
    (folder / RANK_LOG).write_text(
        f"--- start {json.dumps(WHO)}\nall is well\n--- error 2.0\nValueError: no\n--- end\n"
    )
    (folder / "stalls/rank-0.txt").write_text("no progress for 60 s.\n")


def _write(folder: Path, name: str, *lines: Any) -> None:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def _replace(folder: Path, name: str, make: Callable[[Path], Any]) -> None:
    (folder / name).unlink()
    make(folder / name)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


WAYS: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to another file": lambda path: path.symlink_to("/etc/passwd"),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "not text": lambda path: path.write_bytes(bytes(range(255, -1, -1)) * 20),
    "a terabyte of holes": _sparse,
    "20 MB in one line": lambda path: path.write_bytes(b"[" * (20 << 20)),
    "brackets": lambda path: path.write_text("[" * DEEP),
    "a number": lambda path: path.write_text("7\n"),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "a table without anything": lambda path: path.write_text("{}\n"),
    "escapes": lambda path: path.write_text(f"{ESCAPE}\nValueError: {ESCAPE}\n"),
}
"""What may lie where a file of a run is expected."""

STEPS: dict[str, list[Any]] = {
    "losses of text": [_step(n, loss=SCRIPT) for n in range(1, 9)],
    "no loss at all": [{"step": n} for n in range(1, 9)],
    "times that are no numbers": [_step(n, step_s=float("nan")) for n in range(1, 9)],
    "endless times": [_step(n, step_s=float("inf"), tokens_per_s=float("inf")) for n in range(1, 9)],
    "times of lists": [_step(n, step_s=[1], communication_s={}) for n in range(1, 9)],
    "steps that are true": [_step(1) | {"step": True}],
    "steps of text": [_step(1) | {"step": "1"}],
    "a step of 4,000 digits": [_step(1), _step(1) | {"step": 10**3999}],
    "a step of 10^400 tokens": [_step(1), _step(2, tokens=10**400, attempt=10**400)],
    "events with escapes": [_step(1), _step(2, event=ESCAPE)],
    "events with scripts": [_step(1), _step(2, event=SCRIPT)],
    "events that are tables": [_step(1), _step(2, event={"a": ESCAPE})],
    "slow ranks without how slow": [_step(n, slow_rank=1) for n in range(10, 51, 10)],
    "slow ranks of text": [_step(n, slow_rank=ESCAPE, slow_rank_times=2.0) for n in range(10, 51, 10)],
    "restarts of text": [_step(1), _step(2, attempt=ESCAPE)],
    "restarts that are no number": [_step(1), _step(2, attempt=float("nan"))],
    "steps that go back": [_step(n) for n in (5, 4, 3, 3, 9)],
    "a basis with scripts": [_step(1, mfu=0.4, mfu_basis=SCRIPT)],
}
STORIES: dict[str, list[Any]] = {
    "no kind": [{"step": 4, "text": "something", "findings": []}],
    "no findings": [{"step": 4, "what": "found", "text": "something"}],
    "findings that are a number": [_event(findings=7)],
    "findings of numbers": [_event(findings=[7, None, "a"])],
    "a finding of no kind": [_event(findings=[_finding(kind=SCRIPT)])],
    "a finding of lists": [_event(findings=[_finding(layer=[], operand={}, rank="a")])],
    "a direction that nobody knows": [_event(findings=[_finding(direction="sideways")])],
    "ranks of text and numbers": [_event(findings=[_finding(rank="x"), _finding(rank=2), _finding(rank=None)])],
    "a text with escapes": [_event(text=ESCAPE, findings=[_finding(layer=ESCAPE), _finding(operand=ESCAPE)])],
    "a text in a list": [_event(text=[ESCAPE])],
    "a step of text": [_event(step="4")],
    "ten thousand findings": [_event(findings=[_finding()] * 10_000)],
}
SIDE: dict[str, tuple[str, str]] = {
    "a summary without its outcome": ("summary.json", json.dumps({"step": 12})),
    "an outcome with escapes": ("summary.json", json.dumps({"outcome": ESCAPE, "step": 12})),
    "an outcome with scripts": ("summary.json", json.dumps({"outcome": SCRIPT, "step": 12})),
    "gates of text": ("summary.json", json.dumps({"outcome": "done", "step": 12, "gates": [SCRIPT, {"value": SCRIPT}]})),
    "a summary that is cut": ("summary.json", '{"outcome": "do'),
    "a configuration that is cut": ("config.toml", "[train\nsteps"),
    "a configuration without sections": ("config.toml", "train = 7\ngate = 8\n"),
    "steps of text": ("config.toml", '[train]\nsteps = "many"\n[gate]\nwarmup_steps = "few"\n'),
    "a huge number of steps": ("config.toml", "[train]\nsteps = " + "9" * 4000),
    "a configuration with scripts": ("config.toml", f'["{SCRIPT}"]\n"{SCRIPT}" = "{SCRIPT}"\n'),
    "a log whose start is cut": (RANK_LOG, '--- start {"rank": 0, "si\n'),
    "a log whose start says nothing": (RANK_LOG, "--- start {}\nValueError: x\n"),
    "a log whose start is a list": (RANK_LOG, "--- start [1]\n--- error now\n"),
    "a log of another time": (RANK_LOG, f"--- start {json.dumps({**WHO, 'time': 'now', 'size': '1'})}\n--- error 1\n"),
    "a log with an error at no time": (RANK_LOG, f"--- start {json.dumps(WHO)}\n--- error now\nValueError: x\n"),
    "a log with an error of no lines": (RANK_LOG, f"--- start {json.dumps(WHO)}\n--- error 3.0\n"),
    "a log with a launcher of lists": (RANK_LOG, f"--- start {json.dumps({**WHO, 'launcher': [1]})}\n"),
    "a log with escapes": (RANK_LOG, f"--- start {json.dumps(WHO)}\n--- error 3.0\nValueError: {ESCAPE}\n--- end\n"),
    "looks with scripts": ("fp8.jsonl", json.dumps({"step": 5, "tensors": {SCRIPT: {SCRIPT: 1, "amax": SCRIPT}}})),
    "looks of lists": ("fp8.jsonl", json.dumps({"step": 5, "tensors": [1]}) + "\n"),
    "restarts with scripts": ("restarts.jsonl", json.dumps({"attempt": 0, "cause": SCRIPT}) + "\n"),
}  # fmt: skip


def runs() -> Iterator[tuple[str, Spoil]]:
    """(name, what spoils a good run) of every case."""
    for name in FILES:
        for way, make in WAYS.items():
            yield f"{name}: {way}", partial(_replace, name=name, make=make)
        yield f"{name}: half a line", partial(_cut, name=name)
    for way, lines in STEPS.items():
        yield f"steps: {way}", partial(_write_lines, name=METRICS, lines=lines)
    for way, lines in STORIES.items():
        yield f"story: {way}", partial(_write_lines, name=EVENTS, lines=lines)
    for way, (name, text) in SIDE.items():
        yield f"beside: {way}", partial(_write_text, name=name, text=text)
    yield "nothing but a configuration: it has not begun", _not_begun
    yield "nothing at all", _nothing
    yield "a pipe for a rank's number", _pipe_beside_a_log
    yield "a page that is a link", _page_is_a_link


def _cut(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: max(len(data) - 7, 1)])


def _write_lines(folder: Path, name: str, lines: list[Any]) -> None:
    _write(folder, name, *lines)


def _write_text(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def _not_begun(folder: Path) -> None:
    for name in FILES:
        if name != "config.toml":
            (folder / name).unlink()


def _nothing(folder: Path) -> None:
    for name in FILES:
        (folder / name).unlink()


def _pipe_beside_a_log(folder: Path) -> None:
    (folder / "logs/x/attempt_0/0").mkdir(parents=True)
    (folder / "logs/x/attempt_0/0/stderr.log").write_text("ValueError: x\n")
    os.mkfifo(folder / "logs/x/attempt_0/0/rank")


def _page_is_a_link(folder: Path) -> None:
    (folder.parent / "precious").write_text("mine")
    (folder / "report.html").symlink_to(folder.parent / "precious")
