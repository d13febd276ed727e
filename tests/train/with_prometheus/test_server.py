"""A real Prometheus server fetches the page."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request

from ottava.train.metrics import StepMetrics
from ottava.train.prometheus import Prometheus


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask(port: int, query: str) -> dict[str, float]:
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=5) as answer:
        found = json.load(answer)["data"]["result"]
    return {r["metric"].get("__name__", ""): float(r["value"][1]) for r in found}


def test_a_server_scrapes_a_run(tmp_path):
    sink = Prometheus(0, mfu_baseline=0.5, address="127.0.0.1")
    port = free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        f"scrape_configs: [{{job_name: ottava, static_configs: [{{targets: ['127.0.0.1:{sink.port}']}}]}}]\n"
    )
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen(
        [
            "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=log, stderr=log,
    )  # fmt: skip
    try:
        sink.record(StepMetrics(3, 2.5, 1.0, 1e-3, 300, 1234.0, 0.1, mfu=0.45, peak_reserved_gib=2.0))
        found: dict[str, float] = {}
        end = time.monotonic() + 60
        while len(found) < 6 and time.monotonic() < end:
            time.sleep(0.2)
            try:
                found = ask(port, '{__name__=~"training_.*"}')
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
        now = found.pop("training_last_step_timestamp_seconds")
        assert abs(now - time.time()) < 120
        assert found == {
            "training_loss": 2.5,
            "training_mfu": 0.45,
            "training_mfu_baseline": 0.5,
            "training_tokens_per_second": 1234.0,
            "training_peak_memory_bytes": 2 * 2**30,
        }
    finally:
        server.terminate()
        server.wait(timeout=30)
        sink.close()
        log.close()
