"""Writes TensorBoard event files with tensorboard's own writer. Loads neither torch nor tensorflow."""

from __future__ import annotations

from typing import Any

from homing.trackers.tracker import What, values_of
from homing.wire.event_lines import Metric

__all__ = ["ToTensorBoard"]


class ToTensorBoard:
    def __init__(self, what: What) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary = summary_pb2.Summary
        self._folder = str(what.folder / "tensorboard" / what.run_id)
        self._new: Any = EventFileWriter
        self._writers: dict[str, Any] = {}  # one per phase, because steps restart in each

    def log(self, metric: Metric) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in values_of(metric).items()]
        event = self._event(wall_time=metric.t, step=metric.step, summary=self._summary(value=values))
        self._writer(metric.phase).add_event(event)

    def rewind(self, metric: Metric) -> None:
        """Make readers drop what they have from this step on."""
        session = self._session(status=self._session.START)
        event = self._event(wall_time=metric.t, step=metric.step, session_log=session)
        self._writer(metric.phase).add_event(event)

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self, state: str) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, phase: str) -> Any:
        if phase not in self._writers:
            self._writers[phase] = self._new(f"{self._folder}/{phase}")
        return self._writers[phase]
