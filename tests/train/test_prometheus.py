"""The page that Prometheus fetches. (tests/train/with_prometheus has the server and the rules, where Prometheus is.)"""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path

import pytest

from ottava.train.metrics import StepMetrics
from ottava.train.prometheus import GAUGES, Prometheus


def page(sink: Prometheus) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def test_what_is_not_known_is_not_on_the_page():
    sink = Prometheus(0, address="127.0.0.1")
    try:
        assert page(sink) == {}
        sink.record(StepMetrics(1, 5.0, 1.0, 1e-3, 100, 10.0, 0.1))
        assert set(page(sink)) == {
            "training_loss",
            "training_tokens_per_second",
            "training_last_step_timestamp_seconds",
        }
        sink.record(StepMetrics(2, 4.0, 1.0, 1e-3, 200, 10.0, 0.1, mfu=0.3))
        assert page(sink)["training_loss"] == 4.0 and page(sink)["training_mfu"] == 0.3
    finally:
        sink.close()


def test_a_port_in_use_is_explained():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"prometheus_port {port} cannot be served"):
            Prometheus(port, address="127.0.0.1")


def test_rules_speak_of_metrics_that_exist():
    rules = (Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml").read_text()
    assert set(re.findall(r"\btraining_\w+", rules)) <= set(GAUGES)
