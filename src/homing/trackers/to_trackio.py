"""Sends metrics to trackio: a local SQLite file, opened with `trackio show --project homing`. No server, no account."""

from __future__ import annotations

import datetime
from typing import Any

from homing.trackers.tracker import What, values_of
from homing.wire.event_lines import Metric

__all__ = ["ToTrackio"]


class ToTrackio:
    def __init__(self, what: What) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage: Any = SQLiteStorage
        self._what = what
        self._waiting: list[Metric] = []

    def log(self, metric: Metric) -> None:
        self._waiting.append(metric)

    def rewind(self, metric: Metric) -> None:
        """Do nothing: each line has its own id, so values logged again appear next to the first ones."""

    def flush(self) -> None:
        if not self._waiting:
            return
        self._storage.bulk_log(
            self._what.project,
            self._what.name,
            [{f"{m.phase}/{name}": value for name, value in values_of(m).items()} for m in self._waiting],
            steps=[m.step for m in self._waiting],
            timestamps=[datetime.datetime.fromtimestamp(m.t, tz=datetime.UTC).isoformat() for m in self._waiting],
            config=self._what.config,
            # A line with an existing id is not inserted twice.
            log_ids=[f"{self._what.run_id}-{m.phase}-{m.step}-{m.t}" for m in self._waiting],
            run_id=self._what.run_id,
        )
        self._waiting.clear()

    def close(self, state: str) -> None:
        self.flush()
