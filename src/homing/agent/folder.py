"""The instance's work folder: its documents, its events, and the programs that are started in it.

Agent and dead-man touch it only from here, so that an ill or full disk takes neither of them down.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Type, TypeVar

from homing.wire import instance as names
from homing.wire.codec import WireError, dumps, loads
from homing.wire.event import Event
from homing.wire.orders import Orders
from homing.world.machine import Machine

log = logging.getLogger(__name__)
T = TypeVar("T")
TAIL_LINES, TAIL_BYTES = 25, 4000
LEAST_KEY = 8  # characters of a key that is kept out of what is written


class Folder:
    def __init__(self, boot: Orders, world: Machine, source: str = "agent") -> None:
        """`source` is who speaks in its events."""
        self.boot, self.world, self.source = boot, world, source
        self._offsets: Dict[str, int] = {}  # how far each file of lines was read

    def path(self, *parts: str) -> str:
        return os.path.join(self.boot.work_dir, *parts)

    def run_path(self, *parts: str) -> str:
        return self.path(names.RUN_DIR, *parts)

    def log_path(self, name: str) -> str:
        return self.run_path(names.LOGS, f"{name}.log")

    def read(self, name: str, cls: Type[T]) -> Optional[T]:
        """A document of the run directory; None where it is absent or damaged."""
        try:
            return loads(cls, self.world.read(self.run_path(name)))
        except (OSError, WireError):
            return None

    def new_lines(self, name: str, cls: Type[T]) -> Iterator[T]:
        """Whole lines since the last look; one that cannot be read is left out, it is not ours to judge."""
        path = self.run_path(name)
        try:
            size, offset = self.world.size(path), self._offsets.get(name, 0)
            offset = 0 if size < offset else offset  # the trainer cut it back to its checkpoint
            data = self.world.read(path, offset, size - offset) if size > offset else b""
        except OSError:  # not there yet, or ill
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[name] = offset + len(whole)
        for line in whole.splitlines():
            try:
                yield loads(cls, line)
            except WireError:
                continue

    def log_tail(self, name: str) -> str:
        """Its last lines: from the last traceback on, where there is one."""
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
        """Without the keys that this process holds: events and logs go to the store."""
        names_of_keys = (*self.boot.secret_names, *self.boot.end_billing.header_env.values())
        for value in (os.environ.get(name, "") for name in names_of_keys):
            # Settings travel with the keys. One such as "1" is no secret, and stands in every number.
            text = text.replace(value, "***") if len(value) >= LEAST_KEY else text
        return text

    def record(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        made = logging.LogRecord(*args, **kwargs)
        trace = logging.Formatter().formatException(made.exc_info) if made.exc_info else ""
        made.msg, made.args, made.exc_text = self.redacted(made.getMessage()), (), self.redacted(trace)
        return made

    def start(self, argv: List[str], log_name: str, hidden: Sequence[str] = (), **env: str) -> int:
        """The pid of a program with this machine's environment, less what is hidden from it, and `env`."""
        inherited = {name: value for name, value in self.world.environment().items() if name not in hidden}
        told = {**inherited, **env, names.MARK_ENV: self.boot.mark}
        try:
            return self.world.spawn(argv, told, self.boot.work_dir, self.log_path(log_name))
        except OSError:  # perhaps it is its log, on an ill disk: what ends billing must start all the same
            return self.world.spawn(argv, told, self.boot.work_dir, os.devnull)
