"""What `homing serve` tells Prometheus at /metrics: requests, tokens, waiting and active texts, times.

The registry belongs to one server, so several servers in one process do not add up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from homing.web.worker import Worker

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self, worker: Worker, models: Sequence[str]) -> None:
        """`models`: the names of the worker's models, in its order."""
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "homing_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self._prompt_tokens = Counter("homing_prompt_tokens", "Tokens of prompts.", ["model"], registry=self._registry)
        self._tokens = Counter("homing_generated_tokens", "Generated tokens.", ["model"], registry=self._registry)
        self._timeouts = Counter(
            "homing_timed_out_requests", "Requests that ran out of time.", ["model"], registry=self._registry
        )
        self._first = Histogram(
            "homing_first_token_seconds", "Time from a request to its first text.", ["model"], buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._whole = Histogram(
            "homing_request_seconds", "Time from a request to the end of its response.", ["model"], buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        for name in models:  # so that Prometheus sees them from the beginning, and not only after the first request
            for family in (self._prompt_tokens, self._tokens, self._timeouts, self._first, self._whole):
                family.labels(name)
        self._registry.register(_WorkerState(worker, models))

    def document(self) -> bytes:
        return generate_latest(self._registry)

    def responded(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def began(self, model: str, started: float, first_at: float) -> None:
        self._first.labels(model).observe(first_at - started)

    def timed_out(self, model: str) -> None:
        self._timeouts.labels(model).inc()

    def finished(self, model: str, started: float, *, num_prompt_tokens: int, num_tokens: int) -> None:
        self._whole.labels(model).observe(time.monotonic() - started)
        self._prompt_tokens.labels(model).inc(num_prompt_tokens)
        self._tokens.labels(model).inc(num_tokens)


class _WorkerState(Collector):
    """Reads the state of the worker when Prometheus asks."""

    def __init__(self, worker: Worker, models: Sequence[str]) -> None:
        self._worker, self._models = worker, models

    def collect(self):  # type: ignore[no-untyped-def]  # the package has no type for its families
        active = GaugeMetricFamily("homing_active_texts", "Texts that are being generated.", labels=["model"])
        waiting = GaugeMetricFamily("homing_waiting_texts", "Texts that wait.", labels=["model"])
        reused = CounterMetricFamily(
            "homing_reused_prompt_tokens", "Prompt tokens copied from the cache.", labels=["model"]
        )
        for lane, name in enumerate(self._models):
            num_active = self._worker.num_active(lane)
            active.add_metric([name], num_active)
            waiting.add_metric([name], max(0, self._worker.num_texts(lane) - num_active))
            reused.add_metric([name], self._worker.num_reused(lane))
        yield from (active, waiting, reused)
