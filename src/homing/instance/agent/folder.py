"""The work folder on the instance: its documents, its events, and the programs started in it.

The agent and the dead-man access it only through class Folder, so that a faulty or full disk crashes neither."""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Type, TypeVar

from homing.wire import instance_file_names as names
from homing.wire.boot_json_agent import Orders
from homing.wire.codec import WireError, dumps, loads
from homing.wire.event_lines import Event
from homing.world.machine import Machine

log = logging.getLogger(__name__)
T = TypeVar("T")
TAIL_LINES, TAIL_BYTES = 25, 4000
LEAST_KEY = 8  # minimum length of a secret value that is redacted


class Folder:
    def __init__(self, boot: Orders, world: Machine, source: str = "agent") -> None:
        """Open the work folder. `source` names this process in every event that it writes."""
        self.boot, self.world, self.source = boot, world, source
        self._offsets: Dict[str, int] = {}  # number of bytes read so far of each JSON-lines file

    def path(self, *parts: str) -> str:
        return os.path.join(self.boot.work_dir, *parts)

    def run_path(self, *parts: str) -> str:
        return self.path(names.RUN_DIR, *parts)

    def log_path(self, name: str) -> str:
        return self.run_path(names.LOGS, f"{name}.log")

    def read(self, name: str, cls: Type[T]) -> Optional[T]:
        """Return a document from the run directory, or None if it is absent or damaged."""
        try:
            return loads(cls, self.world.read(self.run_path(name)))
        except (OSError, WireError):
            return None

    def new_lines(self, name: str, cls: Type[T]) -> Iterator[T]:
        """Parse and yield the complete lines added since the last call; skip lines that cannot be parsed."""
        path = self.run_path(name)
        try:
            size, offset = self.world.size(path), self._offsets.get(name, 0)
            offset = 0 if size < offset else offset  # a rollback shortened the file, so read it from the start
            data = self.world.read(path, offset, size - offset) if size > offset else b""
        except OSError:  # the events or metrics file does not exist yet, or the disk failed
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[name] = offset + len(whole)
        for line in whole.splitlines():
            try:
                yield loads(cls, line)
            except WireError:
                continue

    def log_tail(self, name: str) -> str:
        """Return the last lines of a log, starting at the last traceback if there is one."""
        path = self.log_path(name)
        try:
            text = self.world.read(path, max(0, self.world.size(path) - TAIL_BYTES)).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text[max(0, text.rfind("Traceback (")) :].strip().splitlines()[-TAIL_LINES:])

    def write(self, name: str, document: object) -> None:
        self._put(self.world.write, name, dumps(document))

    def event(self, kind: str, text: str, **data: Any) -> None:
        log.info("%s: %s", kind, text)
        event = Event(self.world.now(), self.source, kind, text, data=data)
        self._put(self.world.append, names.EVENTS, dumps(event) + "\n")

    def _put(self, put: Callable[[str, bytes], None], name: str, text: str) -> None:
        try:
            put(self.run_path(name), self.redacted(text).encode())
        except OSError:
            log.exception("%s could not be written", name)

    def redacted(self, text: str) -> str:
        """Return `text` with this process's secrets masked, because events and logs are pushed to the store."""
        names_of_keys = (*self.boot.secret_names, *self.boot.end_billing.header_env.values())
        for value in (os.environ.get(name, "") for name in names_of_keys):
            # Some of these variables are settings, not secrets. Masking a value such as "1" would corrupt numbers.
            text = text.replace(value, "***") if len(value) >= LEAST_KEY else text
        return text

    def record(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        made = logging.LogRecord(*args, **kwargs)
        trace = logging.Formatter().formatException(made.exc_info) if made.exc_info else ""
        made.msg, made.args, made.exc_text = self.redacted(made.getMessage()), (), self.redacted(trace)
        return made

    def start(self, argv: List[str], log_name: str, hidden: Sequence[str] = (), **env: str) -> int:
        """Start a program and return its pid.

        The program gets the environment of this process, minus the variables in `hidden`, plus `env`."""
        inherited = {name: value for name, value in self.world.environment().items() if name not in hidden}
        full_env = {**inherited, **env, names.MARK_ENV: self.boot.mark}
        try:
            return self.world.spawn(argv, full_env, self.boot.work_dir, self.log_path(log_name))
        except OSError:
            # On a faulty disk, the log may fail to open. The command that ends billing must start even without a log.
            return self.world.spawn(argv, full_env, self.boot.work_dir, os.devnull)
