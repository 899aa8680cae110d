"""What a pod's container wrote, out of RunPod's stream of events, which does not end by itself.

    GET /pods/ID/logs?source=container&tail=N  ->  id: ...  data: {"ts", "source", "line"}  ->  text

A stream that breaks is taken up again after its last event; one that is quiet has said all there is for now.
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
_LONGEST_S = 10.0  # of one read; a program that writes without a pause is cut there
_READS = 4


def read_log(api: Api, path: str) -> str:
    """ "" for a pod that is not there."""
    lines: dict[str, str] = {}  # event id -> line: what is sent twice counts once
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
            what=f"{api.name} could not be asked for a log.", why=problem, fix="Try again in a minute: homing logs RUN"
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
            f"{api.name} refuses to show a log.", f"{reply.status} {text}", api.fix, status=reply.status, text=text
        )
    return reply.body.decode("utf-8", "replace")


def _events(text: str) -> Iterator[tuple[str, str]]:
    """Id and line of each whole event; the last one may have been cut in the middle."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(":", 1) for line in block.splitlines() if ":" in line and not line.startswith(":"))
        try:
            body = json.loads(fields.get("data", ""))
        except ValueError:
            continue
        if isinstance(body, dict) and "line" in body:
            yield fields.get("id", str(body.get("ts", ""))).strip(), str(body["line"])
