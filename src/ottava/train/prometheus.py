"""A page of metrics for a Prometheus server to fetch. deploy/prometheus/rules.yml has alerts on them."""

from __future__ import annotations

import math
import time

from ottava.train.metrics import StepMetrics
from ottava.train.sinks import missing

GAUGES = {
    "training_loss": "Loss of the last step.",
    "training_mfu": "Share of the device's peak that the last step reached.",
    "training_tokens_per_second": "Tokens of the last step over all ranks, by its time.",
    "training_peak_memory_bytes": "Most memory that a rank's allocator has reserved.",
    "training_last_step_timestamp_seconds": "When the last step ended, Unix time.",
    "training_mfu_baseline": "The MFU that this job should reach.",
}


class Prometheus:
    """Serves the last step on http://HOST:port/metrics, from a thread of its own.

    port 0 takes any free one, which `port` then names. What is not known (the MFU of an unknown device) is not on the page.

        >>> sink = Prometheus(port=9100, mfu_baseline=0.42)
    """

    def __init__(self, port: int, mfu_baseline: float | None = None, address: str = "127.0.0.1") -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError as error:
            raise missing("metrics.prometheus_port", "prometheus_client", error) from error
        self._gauge = Gauge
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, address, self._registry)
        except OSError as error:
            raise ValueError(
                f"metrics.prometheus_port {port} cannot be served on {address}: {error.strerror}. Take another, or 0 for any."
            ) from error
        self.port: int = self._server.server_port
        self._set("training_mfu_baseline", mfu_baseline)

    def _set(self, name: str, value: float | None) -> None:
        """A gauge appears with its first value, so that no 0 stands for "not known"."""
        if value is None:
            return
        if name not in self._gauges:
            self._gauges[name] = self._gauge(name, GAUGES[name], registry=self._registry)
        self._gauges[name].set(value)

    def record(self, metrics: StepMetrics) -> None:
        """One step."""
        self._set("training_loss", metrics.loss)
        self._set("training_mfu", metrics.mfu)
        self._set("training_tokens_per_second", metrics.tokens_per_s)
        reserved = metrics.peak_reserved_gib
        self._set("training_peak_memory_bytes", None if reserved is None else math.floor(reserved * 2**30))
        self._set("training_last_step_timestamp_seconds", time.time())

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
