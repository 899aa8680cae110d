"""What `homing serve` tells Prometheus at /metrics: requests, tokens, waiting and active texts, times.

The registry belongs to one server, so several servers in one process do not add up.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from homing.web.worker import Worker

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self, worker: Worker) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "homing_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self._prompt_tokens = Counter("homing_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self._tokens = Counter("homing_generated_tokens", "Generated tokens.", registry=self._registry)
        self._first = Histogram(
            "homing_first_token_seconds", "Time from a request to its first text.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._whole = Histogram(
            "homing_request_seconds", "Time from a request to the end of its response.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(_WorkerState(worker))

    def document(self) -> bytes:
        return generate_latest(self._registry)

    def responded(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def began(self, started: float, first_at: float) -> None:
        self._first.observe(first_at - started)

    def finished(self, started: float, *, num_prompt_tokens: int, num_tokens: int) -> None:
        self._whole.observe(time.monotonic() - started)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._tokens.inc(num_tokens)


class _WorkerState(Collector):
    """Reads the state of the worker when Prometheus asks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self):  # type: ignore[no-untyped-def]  # the package has no type for its families
        active, total = self._worker.num_active, self._worker.num_texts
        yield GaugeMetricFamily("homing_active_texts", "Texts that are being generated.", active)
        yield GaugeMetricFamily("homing_waiting_texts", "Texts that wait.", max(0, total - active))
        yield CounterMetricFamily(
            "homing_reused_prompt_tokens", "Prompt tokens copied from the cache.", self._worker.num_reused
        )
