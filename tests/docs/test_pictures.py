"""The pictures in the docs are the ones their scripts draw."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_batch_picture_is_current() -> None:
    script = runpy.run_path(str(DOCS / "draw_batch.py"))
    drawn = script["draw"]()
    assert (DOCS / "images" / "batch.svg").read_text() == drawn, "run docs/draw_batch.py"
    ElementTree.fromstring(drawn)  # well-formed


def test_batch_picture_adds_up() -> None:
    """To the sums of docs/memory.md, which its own code measures."""
    script = runpy.run_path(str(DOCS / "draw_batch.py"))
    stops = script["ATTENTION"] + script["MLP"]
    (sums,) = re.findall(
        r"^\| \*\*sum\*\* \| \*\*(\d+)u\*\* \| \*\*(\d+)u\*\* \| \*\*(\d+)u\*\* \|$",
        (DOCS / "memory.md").read_text(),
        re.M,
    )
    bf16, fp8, recompute = map(int, sums)
    assert sum(float(stop.keeps or 0) for stop in stops) == fp8
    # Recompute drops the quantized copies, and only those.
    assert sum(float(stop.keeps or 0) for stop in stops if stop.kind != "fp8") == recompute
    assert (
        f"{fp8}u, of which recompute drops every quantized copy: {recompute}u. bf16 keeps {bf16}u." in script["draw"]()
    )
