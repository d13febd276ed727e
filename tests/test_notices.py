"""What users are told: once, at a level that they see, and where something is done differently from what they asked for."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

import ottava
from ottava import notices


def test_a_warning_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    notices.warn_once.cache_clear()
    for message in ("a", "a", "b"):
        notices.warn_once(message)
    assert [(r.levelno, r.name, r.message) for r in caplog.records] == [
        (logging.WARNING, "ottava", "a"),
        (logging.WARNING, "ottava", "b"),
    ]


def test_a_mask_without_effect_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    notices.warn_once.cache_clear()
    attend = ottava.DotProductAttention(2, 16, attn_mask_type="causal", device="cpu")
    q = torch.randn(4, 1, 2, 16)
    attend(q, q, q, attention_mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    assert ["attention_mask has no effect" in r.message and r.levelname == "WARNING" for r in caplog.records] == [True]


def test_a_script_on_a_cpu_shows_one_line_without_any_logging_set_up() -> None:
    script = (
        "import torch, ottava; from ottava import recipe\n"
        "layer = ottava.Linear(32, 32, device='cpu')\n"
        "for r in (recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()):\n"
        "    with ottava.autocast(recipe=r): layer(torch.randn(32, 32)).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stderr.splitlines() if "ottava" in line]
    assert len(shown) == 1 and "exact emulation" in shown[0], done.stderr
