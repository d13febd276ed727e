"""Opens the corpus, a case after the other in one process, and measures what each takes: `python -m hostile.attempts [KIND]`."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hostile.corpus import Case, cases, make_good
from hostile.spoil import TOKENIZER, TOKENS, TOML
from ottava.checkpoint import CheckpointError, Checkpoints, verify
from ottava.models.hf_files import import_hf
from ottava.train.arguments import parse
from ottava.train.token_file import TokenFile
from ottava.train.tokenize import load_tokenizer

HANGS_S = 300.0
"""The process ends with the stacks of all threads if a case takes longer: it waits for something."""
MOST_S, MOST_MB = 10.0, 200.0


@dataclass(frozen=True)
class Outcome:
    """Of one case."""

    case: Case
    wanted: str
    """Names of which the error has to contain one."""
    said: str
    """The error; empty if there was none."""
    wrong: str
    """Why it is not a refusal as it should be; empty if it is one."""
    seconds: float
    """Of the processor: machines have other work too."""
    megabytes: float
    """More than before, at the most."""


def _checkpoint(folder: Path) -> None:
    root = folder / "root"
    before = sorted(p.name for p in (folder / "outside").iterdir()) if (folder / "outside").exists() else []
    rows = list(verify(root))
    state = {"w": torch.zeros(16, 4), "step": 0}
    try:
        Checkpoints(root).load(state, 1)
    finally:
        assert not torch.equal(state["w"], torch.arange(64.0).view(16, 4)), "it was loaded"
        assert not rows or not all(row.good for row in rows), "verify is content"
        assert not before or before == sorted(p.name for p in (folder / "outside").iterdir()), "something was made"


def _tokenizer(folder: Path) -> None:
    load_tokenizer(str(folder / TOKENIZER)).encode(["a" * 100, "ab", "x"])


OPEN: dict[str, Callable[[Path], object]] = {
    "checkpoint": _checkpoint,
    "Hugging Face directory": lambda folder: import_hf(folder / "hf", folder / "out"),
    "token file": lambda folder: TokenFile(folder / TOKENS),
    "tokenizer": _tokenizer,
    "configuration": lambda folder: parse([str(folder / TOML), "--dry-run"]),
}
"""By kind: what a user would do with it."""


def attempt(case: Case, folder: Path) -> Outcome:
    """Spoils and opens what is in the folder."""
    wanted = case.spoil(folder)
    gc.collect()
    _forget_peak()
    before, began, said, wrong = _resident("VmRSS"), time.process_time(), "", ""
    console = io.StringIO()
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    try:
        with contextlib.redirect_stderr(console):
            OPEN[case.kind](folder)
        wrong = "accepted"
    except (ValueError, CheckpointError) as error:
        said = str(error)
    except SystemExit as error:
        said, wrong = console.getvalue(), "" if error.code == 2 else f"exit code {error.code}"
    except BaseException as error:
        wrong = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds, megabytes = time.process_time() - began, (_resident("VmHWM") - before) / 1024
    if not wrong and not any(name in said for name in wanted.split("|")):
        wrong = f"{wanted} is not named"
    if not wrong and any(ord(letter) < 32 and letter not in "\n\t" for letter in _plain(said)):
        wrong = "the message has control characters"
    if not wrong and (seconds > MOST_S or megabytes > MOST_MB):
        wrong = "takes too much"
    return Outcome(case, wanted, said, wrong, seconds, megabytes)


def run(chosen: Sequence[Case]) -> list[Outcome]:
    """Each case in a folder of its own."""
    found = []
    with tempfile.TemporaryDirectory(prefix="hostile-") as root:
        for case in chosen:
            good, folder = Path(root) / case.kind, Path(root) / "case"
            if not good.exists():
                good.mkdir()
                make_good(case.kind, good)
            shutil.copytree(good, folder)
            found.append(attempt(case, folder))
            shutil.rmtree(folder)
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """By kind, as in the docs."""
    lines = ["| Files | Tried | Refused by name | Most seconds | Most memory |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(o.case.kind for o in outcomes):
        own = [o for o in outcomes if o.case.kind == kind]
        most = f"{max(o.seconds for o in own):.1f} | {max(o.megabytes for o in own):.0f} MB"
        lines.append(f"| {kind} | {len(own)} | {sum(not o.wrong for o in own)} | {most} |")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Without the colours of tyro's messages."""
    return "" if "\x1b[" in text and "╭" in text else text


def _forget_peak() -> None:
    """VmHWM begins anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> float:
    """kB"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


if __name__ == "__main__":
    outcomes = run([case for case in cases() if len(sys.argv) < 2 or case.kind == sys.argv[1]])
    for outcome in outcomes:
        if outcome.wrong or "-v" in sys.argv:
            print(f"{outcome.case.kind}: {outcome.case.name}: {outcome.wrong}: {outcome.said[:300]!r}")
    print(table(outcomes))
    os._exit(int(any(o.wrong for o in outcomes)))
