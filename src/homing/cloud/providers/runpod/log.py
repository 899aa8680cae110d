"""Reads a pod's container log from RunPod's event stream, which does not end by itself.

    GET /pods/ID/logs?source=container&tail=N  ->  id: ...  data: {"ts", "source", "line"}  ->  text

A stream that breaks is resumed after its last event; a silent one has delivered everything available.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from homing.cloud.providers.rest import Api, Unwelcome
from homing.errors import ProviderSilent
from homing.world import HttpRequest, NetworkError

__all__ = ["read_log"]

_TAIL = 1000
_QUIET_S = 3.0
_LONGEST_S = 10.0  # per read; the output of a program that writes without a pause is cut there
_READS = 4


def read_log(api: Api, path: str) -> str:
    """Return the log's text; "" if the pod does not exist."""
    lines: dict[str, str] = {}  # event id -> line: duplicates count once
    last, problem = "", ""
    for _ in range(_READS):
        try:
            events = list(_events(_read(api, f"{path}?source=container&tail={_TAIL}", last)))
        except NetworkError as exc:
            problem = str(exc)
            continue
        new = {event: line for event, line in events if event not in lines}
        lines.update(new)
        if not new:
            return "\n".join(lines.values())
        last = next(reversed(new))
    if not lines and problem:
        raise ProviderSilent(
            what=f"Could not get the log from {api.name}.", why=problem, fix="Try again in a minute: homing logs RUN"
        )
    return "\n".join(lines.values())


def _read(api: Api, path: str, last: str) -> str:
    headers = {**api.headers, "accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    reply = api.world.stream(HttpRequest("GET", api.url + path, headers, timeout_s=_QUIET_S), _LONGEST_S)
    if reply.status == 404:
        return ""
    if reply.status >= 500 or reply.status == 429:
        raise NetworkError(f"{api.name} answered {reply.status}")
    if reply.status != 200:
        text = reply.body.decode("utf-8", "replace")[:300]
        raise Unwelcome(
            f"{api.name} refused to return the log.", f"{reply.status} {text}", api.fix, status=reply.status, text=text
        )
    return reply.body.decode("utf-8", "replace")


def _events(text: str) -> Iterator[tuple[str, str]]:
    """Yield id and line of each complete event; the last one may be truncated."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(":", 1) for line in block.splitlines() if ":" in line and not line.startswith(":"))
        try:
            body = json.loads(fields.get("data", ""))
        except ValueError:
            continue
        if isinstance(body, dict) and "line" in body:
            yield fields.get("id", str(body.get("ts", ""))).strip(), str(body["line"])
