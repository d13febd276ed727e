"""TransformerEngine's environment variables act nowhere, and that is said."""

from __future__ import annotations

import os

import pytest

from ottava.compat.environment import PREFIX, tell_of_variables


def test_variables_that_are_set_are_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in [n for n in os.environ if n.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    tell_of_variables()
    assert not caplog.records
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    tell_of_variables()
    assert "NVTE_FLASH_ATTN, NVTE_NVFP4_DISABLE_RHT (use NVFP4BlockScaling(disable_rht=True))" in caplog.text
