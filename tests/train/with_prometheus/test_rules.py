"""The alert rules, by Prometheus' own tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "deploy" / "prometheus"


def promtool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def test_rules_are_valid():
    done = promtool(FOLDER, "check", "rules", "rules.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_only_then():
    done = promtool(FOLDER, "test", "rules", "rules_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "old, new",
    [
        ("training:mfu:now < 0.85 * training:mfu:baseline_6h", "training:mfu:now < 0.5 * training:mfu:baseline_6h"),
        ("training:mfu:now < 0.85 * training_mfu_baseline", "training:mfu:now < 0.85 * training:mfu:baseline_6h"),
        ("> 900", "> 3000"),
        ('up{job="ottava"} == 0', 'up{job="ottava"} == 2'),
        ("[1d]", "[1m]"),
        ("0.85 *", "0.95 *"),
    ],
)
def test_the_tests_of_the_rules_notice_a_wrong_rule(tmp_path, old, new):
    rules = (FOLDER / "rules.yml").read_text()
    assert old in rules
    (tmp_path / "rules.yml").write_text(rules.replace(old, new))
    (tmp_path / "rules_test.yml").write_text((FOLDER / "rules_test.yml").read_text())
    assert promtool(tmp_path, "check", "rules", "rules.yml").returncode == 0
    assert promtool(tmp_path, "test", "rules", "rules_test.yml").returncode == 1
